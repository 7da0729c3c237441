"""REFERENCE: the float32 forward pass, rounded to bfloat16 at the end. Slow, and runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moedoctor.reference.moe_backend import Backend, Prepared, Variant
from moedoctor.reference.moe_layer import Layer, Problem, expected_output

if TYPE_CHECKING:
    import torch

    from moedoctor.models.layer_shape import LayerShape


@dataclass(frozen=True)
class _Prepared(Prepared):
    layer: Layer
    activations: str

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return expected_output(Problem(self.layer, x, topk_weights, topk_ids), self.activations).bfloat16()


class Reference(Backend):
    """`moedoctor.reference.experts`."""

    capturable = False

    def __init__(self, quantization: str, activations: str = "none") -> None:
        self.variant = Variant("REFERENCE", quantization, activations)

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        return None

    def prepare(self, layer: Layer) -> Prepared:
        return _Prepared(layer, self.variant.activations)
