"""The interface of an MoE backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from moedoctor.models.layer_shape import LayerShape
    from moedoctor.reference.moe_layer import Layer


@dataclass(frozen=True)
class Variant:
    """A backend for one quantization of the weights."""

    name: str
    """vLLM's own name in capitals, REFERENCE or OURS"""
    quantization: str
    """``nvfp4``, ``fp8``, ``fp8-block`` or ``bf16``"""
    activations: str = "none"
    """The format of its activations: ``nvfp4``, ``fp8``, ``fp8_block`` or ``none``"""

    @property
    def label(self) -> str:
        """Return the name in reports: ``MARLIN nvfp4``."""
        return f"{self.name} {self.quantization}"


class Prepared(ABC):
    """A layer in the form that a backend computes with."""

    bits: ClassVar[float | None] = None
    """Bits of a weight as it is read in a call; None if they are those of the quantization."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Return bfloat16 [T, H].

        `x` is bfloat16 [T, H], `topk_weights` float32 [T, K], `topk_ids` int32 [T, K].
        """

    def list_workspaces(self) -> Sequence[torch.Tensor]:
        """Return the buffers that outlive a call; a harness overwrites them before the next."""
        return ()


@dataclass(frozen=True)
class Computed(Prepared):
    """A layer that a function computes."""

    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x, topk_weights, topk_ids) -> output, as `Prepared`"""

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return self.compute(x, topk_weights, topk_ids)


class Backend(ABC):
    """One way to compute an MoE layer."""

    variant: Variant
    capturable: bool = True
    """True if a call can be captured into a CUDA graph."""

    @abstractmethod
    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        """Return why it cannot compute layers of this shape on `device`, in one line, or None if it can."""

    def check_empty_slots(self) -> str | None:
        """Return why it does not take ids of -1, or None if it skips them."""
        return None

    @abstractmethod
    def prepare(self, layer: Layer) -> Prepared:
        """Take over the layer, which is not changed. Raises UnavailableError if that turns out impossible."""
