"""The interface of an MoE backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from moedoctor.models.layer_shape import LayerShape
    from moedoctor.reference.moe_layer import Layer


@dataclass(frozen=True)
class Variant:
    """A backend for one quantisation of the weights."""

    name: str
    """vLLM's own name in capitals, REFERENCE or OURS"""
    quantization: str
    """``nvfp4``, ``fp8`` or ``bf16``"""
    activations: str = "none"
    """How it quantises activations: ``nvfp4``, ``fp8`` or ``none``"""

    @property
    def label(self) -> str:
        """What reports call it: ``MARLIN nvfp4``."""
        return f"{self.name} {self.quantization}"


class Prepared(ABC):
    """A layer in the form that a backend computes with."""

    bits: ClassVar[float | None] = None
    """Bits of a weight as it is read in a call; None where they are those of the quantisation."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, H] of `x` bfloat16 [T, H], `topk_weights` float32 [T, K], `topk_ids` int32 [T, K]."""

    def workspaces(self) -> Sequence[torch.Tensor]:
        """Buffers that outlive a call; a harness overwrites them before the next."""
        return ()


class Backend(ABC):
    """One way to compute an MoE layer."""

    variant: Variant
    capturable: bool = True
    """Whether a call can be captured into a CUDA graph."""

    @abstractmethod
    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        """Why it cannot compute layers of this shape on `device`, in one line; None where it can."""

    def refuses_empty_slots(self) -> str | None:
        """Why ids of -1 are not for it; None where it skips them."""
        return None

    @abstractmethod
    def prepare(self, layer: Layer) -> Prepared:
        """Take the layer over, which is not changed. Raises for what `unavailable` did not foresee."""
