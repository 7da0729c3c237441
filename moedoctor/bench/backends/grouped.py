"""OURS where there is no Triton: torch's grouped matrix product in bfloat16, over dequantised weights.

Tokens are sorted by expert and multiplied in one product, intermediates are rounded to bfloat16 as kernels
round them; nothing is shared with the float32 reference but the dequantisation of one expert's weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from moedoctor.reference.experts import Weight, expert_weight
from moedoctor.reference.moe_backend import Prepared
from moedoctor.reference.moe_layer import Layer, quantiser


@dataclass(frozen=True)
class Grouped(Prepared):
    """A layer as bfloat16 weights."""

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
    def of(cls, layer: Layer, activations: str) -> Grouped:
        """Dequantise every expert; exact for weights on the grid of `moedoctor.reference.moe_layer`."""
        w13, w2 = (_transposed(one, layer.shape.experts) for one in (layer.w13, layer.w2))
        return cls(w13, w2, layer.shape.activation, activations, layer.input_scale, layer.intermediate_scale)

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        flat = topk_ids.flatten()  # [T * K]
        kept = flat >= 0  # [T * K]
        order = torch.where(kept, flat, self.w13.shape[0]).argsort(stable=True)[: int(kept.sum())]  # [S]
        tokens = order // topk_ids.shape[1]  # [S]
        counts = torch.bincount(flat[order], minlength=self.w13.shape[0])  # [E]
        ends = counts.cumsum(0).int()  # [E]
        up = functional.grouped_mm(self._rounded(x, self.input_scale)[tokens], self.w13, offs=ends)  # [S, 2I]
        middle = self._rounded(self._activated(up), self.intermediate_scale)  # [S, I]
        out = functional.grouped_mm(middle, self.w2, offs=ends)  # [S, H]
        weighted = out.float() * topk_weights.flatten()[order, None]  # [S, H]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
        return total.index_add_(0, tokens, weighted).bfloat16()

    def _rounded(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        quantise = quantiser(self.activations, scale)
        return values if quantise is None else quantise(values.float()).bfloat16()

    def _activated(self, up: torch.Tensor) -> torch.Tensor:
        """bfloat16 [S, I] of the first product, bfloat16 [S, 2I] or [S, I]; the curve itself in float32."""
        if self.activation == "relu2":
            return up.clamp(min=0) ** 2
        size = up.shape[1] // 2
        gate = up[:, :size].float()  # [S, I]
        if self.activation == "gelu_tanh":
            opened = functional.gelu(gate, approximate="tanh")  # [S, I]
        else:
            opened = gate / (1 + (-gate).exp())  # [S, I]
        return opened.bfloat16() * up[:, size:]


def _transposed(weight: Weight, experts: int) -> torch.Tensor:
    return torch.stack([expert_weight(weight, one).T.bfloat16() for one in range(experts)])
