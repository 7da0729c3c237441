"""FlashInfer's router and bfloat16 kernel that run on compute capability 9.0; both are compiled at first use.

Not asked: `cutlass_fused_moe`, which nvcc compiles for hours, and what needs 10.0 or another library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moedoctor.reference.moe_layer import Layer
from moedoctor.testing.adapters.reference import make_moe
from moedoctor.testing.questions import declare

_PACKAGE = "flashinfer-python"


@declare(kind="router", package=_PACKAGE, scoring="sigmoid", renormalize=True)
def route(
    logits: Tensor, top_k: int, bias: Tensor | None = None, num_groups: int = 1, topk_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Route by `fused_topk_deepseek`. Its outputs hold -7 before, so that what it leaves is seen."""
    from flashinfer.fused_moe import fused_topk_deepseek

    weights = torch.full((len(logits), top_k), -7.0, dtype=logits.dtype, device=logits.device)  # [T, K]
    ids = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
    offsets = logits.new_zeros(logits.shape[1]) if bias is None else bias.to(logits.dtype)  # [E]
    fused_topk_deepseek(logits, offsets, num_groups, topk_groups, top_k, 1.0, weights, ids)
    return weights, ids


def _run_cute_dsl(layer: Layer, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    from flashinfer.fused_moe.cute_dsl.sm90_contiguous_gather_grouped_gemm_act_fusion import (
        interleave_up_gate_sm90,
    )
    from flashinfer.fused_moe.cute_dsl.sm90_fused_moe import cute_dsl_fused_moe_bf16

    w13 = interleave_up_gate_sm90(layer.w13)  # [E, 2I, H]
    shape = layer.shape
    output: Tensor = cute_dsl_fused_moe_bf16(
        x, topk_ids, topk_weights, w13, layer.w2, shape.experts, shape.top_k
    )
    return output


run_cute_dsl = make_moe(_run_cute_dsl, package=_PACKAGE, formats=("bf16",))
"""Computes by `cute_dsl_fused_moe_bf16`, whose weights are interleaved by FlashInfer's own function."""
