"""Computes a layer of vLLM with the experts in its cache while others are copied, and then with those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moedoctor.fixes.expert_cache import ExpertCache

UNSORTED = 4
"""TRITON does not sort ids if there are at least so many times as many experts as pairs."""
TRITON = "TritonExperts"


def can_split(layer: Any) -> bool:
    """Return True if the backend computes a row of a pair alone and adds a token's rows up by `moe_sum`.

    That is TRITON: if it does not sort ids, it writes zeros for an id of -1. The fix checks in vLLM's source
    when it sorts and how it adds up. It is not TRITON with one scale for all rows of the second input,
    because that scale depends on the rows of a call.
    """
    experts = layer.quant_method.moe_kernel.fused_experts
    described = experts.quant_config
    return type(experts).__name__ == TRITON and (
        layer.w13_weight.dtype in (torch.bfloat16, torch.float16)
        or described._a2.scale is not None
        or described.block_shape is not None
        or described.per_act_token_quant
    )


class _JoinedSum:
    """Takes the place of a backend's sum over a token's experts while a layer is computed in two calls."""

    def __init__(self, add_up: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """`add_up`: the backend's own sum of rows [T, K, H], written to [T, H]."""
        self._add_up = add_up
        self._first_rows: torch.Tensor | None = None
        self.calls = 0
        self.first: torch.Tensor | None = None
        """Bool [T, K]: the pairs of the first call."""

    def __call__(self, rows: torch.Tensor, output: torch.Tensor, *ids_and_map: Any) -> None:
        """Keep `rows` [T, K, H] of the first call; write the sum of both calls' to `output` [T, H]."""
        self.calls += 1
        if self._first_rows is None:
            self._first_rows = rows.clone()  # they are in the backend's workspace, which is used again
            return
        assert self.first is not None
        self._add_up(torch.where(self.first[..., None], self._first_rows, rows), output)


def compute_in_two(
    cache: ExpertCache, experts: Any, compute: Any, topk_ids: torch.Tensor, given: dict[str, Any]
) -> torch.Tensor:
    """Compute the layer in two calls of the backend's kernel, first with resident experts: [T, H].

    The rows of both calls, one for each pair, are added up at once by the backend's own sum, so the bits are
    those of one call. `topk_ids` [T, K] must be so few that the backend does not sort them, and fit in the
    slots.
    """
    joined = _JoinedSum(experts.moe_sum)
    experts.moe_sum = joined
    try:
        for part in cache.groups(topk_ids, overlap=True):
            if joined.first is None:
                joined.first = part.slot_ids >= 0
            result: torch.Tensor = compute(topk_ids=part.slot_ids, **given)  # [T, H]
    finally:
        del experts.moe_sum
    if joined.calls != 2:
        raise RuntimeError("the backend did not add up its rows by moe_sum: set overlap=0")
    return result
