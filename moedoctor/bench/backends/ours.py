"""OURS: Triton kernels on a GPU, torch's grouped matrix product elsewhere. Activations are not quantised."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moedoctor.bench.backends.grouped import Grouped
from moedoctor.reference.experts import Weight
from moedoctor.reference.moe_backend import Backend, Prepared, Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.reference.nvfp4 import Nvfp4

if TYPE_CHECKING:
    from moedoctor.models.layer_shape import LayerShape


@dataclass(frozen=True)
class _OnGpu(Prepared):
    w13: Any
    w2: Any
    activation: str

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        from moedoctor.kernels.moe.expert_launch import run_experts

        return run_experts(x, self.w13, self.w2, topk_weights, topk_ids, activation=self.activation)


class Ours(Backend):
    """Ours for NVFP4 (weights only) and bfloat16; on a CPU for every quantisation."""

    def __init__(self, quantization: str, activations: str = "none") -> None:
        self.variant = Variant("OURS", quantization, activations)

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        if not device.startswith("cuda"):
            return None
        if self.variant.quantization == "fp8" or self.variant.activations != "none":
            return "our kernels have NVFP4 and bfloat16 weights with bfloat16 activations only"
        if importlib.util.find_spec("triton") is None:
            return "needs Triton: pip install triton"
        return None

    def prepare(self, layer: Layer) -> Prepared:
        weight: Any = layer.w13 if isinstance(layer.w13, torch.Tensor) else vars(layer.w13)
        first = weight if isinstance(weight, torch.Tensor) else next(iter(weight.values()))
        if not first.is_cuda or self.unavailable(layer.shape, str(first.device)):
            return Grouped.of(layer, self.variant.activations)
        return _OnGpu(_weights(layer.w13), _weights(layer.w2), layer.shape.activation)


def _weights(weight: Weight) -> Any:
    from moedoctor.kernels.moe.expert_launch import ExpertWeights
    from moedoctor.kernels.moe.nvfp4_words import pack_words

    if isinstance(weight, Nvfp4):
        return ExpertWeights(*pack_words(weight.packed, weight.block_scales), weight.global_scale)
    assert isinstance(weight, torch.Tensor)
    return ExpertWeights(weight)
