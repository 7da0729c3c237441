"""The float32 reference as a MoE kernel: an example of how the formats' scales are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moedoctor.reference import e2m1
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import MoeWeights, Weight, forward
from moedoctor.reference.nvfp4 import Nvfp4


def compute(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    format: str,
    activation: str = "silu",
) -> torch.Tensor:
    """Return bfloat16 [T, H]. An id that is no expert is skipped."""
    known = torch.where((topk_ids >= 0) & (topk_ids < len(w2)), topk_ids, -1)  # [T, K]
    weights = MoeWeights(read(w13, scales, "w13", format), read(w2, scales, "w2", format), activation)
    return forward(hidden_states, weights, topk_weights, known).bfloat16()


def read(values: torch.Tensor, scales: Mapping[str, torch.Tensor], name: str, format: str) -> Weight:
    """Return ``w13`` or ``w2`` as the reference holds it."""
    if format == "fp8":
        return Fp8(values, scales[name])
    if format == "fp8-block":
        return Fp8(values, scales[name], (128, 128), 2 if name == "w13" else 1)
    if format == "nvfp4":
        return Nvfp4(values, scales[name], scales[f"{name}_global"])
    if format == "mxfp4":
        factor = torch.exp2(scales[name].float() - 127).masked_fill(scales[name] == 255, torch.nan)
        weight: torch.Tensor = e2m1.decode(e2m1.unpack(values)) * factor.repeat_interleave(32, -1)
        return weight
    return values
