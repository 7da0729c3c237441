"""FlashInfer's router of DeepSeek-V3, for compute capability 8.9 and newer. nvcc compiles it at first use."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from moedoctor.testing.questions import declare


@declare(kind="router", package="flashinfer-python", scoring="sigmoid", renormalize=True)
def route(
    logits: Tensor, top_k: int, bias: Tensor, num_groups: int = 1, topk_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Route by `fused_topk_deepseek`. Its outputs hold -7 before, so that what it leaves is seen.

    It refuses a top_k above the square of the number of groups, so one group becomes several, all taken.
    """
    experts = logits.shape[1]
    if num_groups == 1 and top_k > 1:
        fitting = (
            count for count in range(2, experts // 2 + 1) if experts % count == 0 and count**2 >= top_k
        )
        num_groups = topk_groups = next(fitting, 1)
    fused = importlib.import_module("flashinfer.fused_moe").fused_topk_deepseek
    weights = torch.full((len(logits), top_k), -7.0, dtype=logits.dtype, device=logits.device)  # [T, K]
    ids = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
    fused(logits, bias.to(logits.dtype), num_groups, topk_groups, top_k, 1.0, weights, ids)
    return weights, ids
