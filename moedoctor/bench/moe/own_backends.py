"""The backends OURS and REFERENCE."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight, dequantize_expert
from moedoctor.reference.moe_backend import Backend, Computed, Prepared, Variant
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected, make_quantizer
from moedoctor.reference.nvfp4 import Nvfp4

if TYPE_CHECKING:
    from moedoctor.models.layer_shape import LayerShape


class Reference(Backend):
    """REFERENCE: the float32 forward pass, rounded to bfloat16 at the end. Slow, and runs anywhere."""

    capturable = False

    def __init__(self, quantization: str, activations: str = "none") -> None:
        self.variant = Variant("REFERENCE", quantization, activations)

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        return None

    def prepare(self, layer: Layer) -> Prepared:
        def compute(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
            problem = Problem(layer, x, topk_weights, topk_ids)
            return compute_expected(problem, self.variant.activations).bfloat16()

        return Computed(compute)


class Ours(Backend):
    """OURS: Triton kernels on a GPU if activations are not quantized, `Grouped` elsewhere."""

    def __init__(self, quantization: str, activations: str = "none") -> None:
        self.variant = Variant("OURS", quantization, activations)

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        if not device.startswith("cuda"):
            return None
        if self.variant.activations != "none":
            return "our kernels do not quantize activations"
        if importlib.util.find_spec("triton") is None:
            return "needs Triton: pip install triton"
        return None

    def prepare(self, layer: Layer) -> Prepared:
        values = layer.w13 if isinstance(layer.w13, torch.Tensor) else next(iter(vars(layer.w13).values()))
        if not values.is_cuda or self.unavailable(layer.shape, str(values.device)):
            return Grouped.dequantize(layer, self.variant.activations)
        from moedoctor.kernels.moe.launch import run_experts

        w13, w2, activation = convert_weights(layer.w13), convert_weights(layer.w2), layer.shape.activation
        return Computed(
            lambda x, topk_weights, ids: run_experts(x, w13, w2, topk_weights, ids, activation=activation)
        )


def convert_weights(weight: Weight) -> Any:
    """Return the `ExpertWeights` of a weight. Needs Triton."""
    from moedoctor.kernels.moe.expert_weights import ExpertWeights, make_fp8_weights, make_nvfp4_weights

    if isinstance(weight, Nvfp4):
        return make_nvfp4_weights(weight.packed, weight.block_scales, weight.global_scale)
    if isinstance(weight, Fp8):
        return make_fp8_weights(weight.values, weight.scale, block=weight.block, halves=weight.halves)
    return ExpertWeights(weight)


@dataclass(frozen=True)
class Grouped(Prepared):
    """A layer as bfloat16 weights, computed by torch's grouped matrix product.

    Tokens are sorted by expert and multiplied in one product. Intermediates are rounded to bfloat16 as
    kernels round them. It shares nothing with the float32 reference but the dequantization of one expert's
    weight.
    """

    bits: ClassVar[float | None] = 16.0

    w13: torch.Tensor
    """bfloat16 [E, H, 2I] or [E, H, I]"""
    w2: torch.Tensor
    """bfloat16 [E, I, H]"""
    activation: str
    activations: str
    input_scale: float
    intermediate_scale: float

    @classmethod
    def dequantize(cls, layer: Layer, activations: str) -> Grouped:
        """Dequantize every expert; exact for weights on the grid of `moedoctor.reference.moe_layer`."""
        w13, w2 = (
            torch.stack(
                [dequantize_expert(weight, expert).T.bfloat16() for expert in range(layer.shape.experts)]
            )
            for weight in (layer.w13, layer.w2)
        )
        return cls(w13, w2, layer.shape.activation, activations, layer.input_scale, layer.intermediate_scale)

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        flat = topk_ids.flatten()  # [T * K]
        used = flat >= 0  # [T * K]
        order = torch.where(used, flat, self.w13.shape[0]).argsort(stable=True)[: int(used.sum())]  # [S]
        tokens = order // topk_ids.shape[1]  # [S]
        counts = torch.bincount(flat[order], minlength=self.w13.shape[0])  # [E]
        ends = counts.cumsum(0).int()  # [E]
        up = functional.grouped_mm(self._round(x, self.input_scale)[tokens], self.w13, offs=ends)  # [S, 2I]
        middle = self._round(self._activate(up), self.intermediate_scale)  # [S, I]
        out = functional.grouped_mm(middle, self.w2, offs=ends)  # [S, H]
        weighted = out.float() * topk_weights.flatten()[order, None]  # [S, H]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
        return total.index_add_(0, tokens, weighted).bfloat16()

    def _round(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        quantize = make_quantizer(self.activations, scale)
        return values if quantize is None else quantize(values.float()).bfloat16()

    def _activate(self, up: torch.Tensor) -> torch.Tensor:
        """Return bfloat16 [S, I] of the first product [S, 2I] or [S, I]; the curve itself is in float32."""
        if self.activation == "relu2":
            return up.clamp(min=0) ** 2
        size = up.shape[1] // 2
        gate = up[:, :size].float()  # [S, I]
        if self.activation == "gelu_tanh":
            opened = functional.gelu(gate, approximate="tanh")  # [S, I]
        else:
            opened = gate / (1 + (-gate).exp())  # [S, I]
        return opened.bfloat16() * up[:, size:]
