"""Computes a layer of vLLM with the experts in its cache while others are copied, and then with those.

moedoctor's kernels do it, or the kernel of vLLM's backend in two calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import moe_forward, moe_forward_in_parts
from moedoctor.plugin.moe_layer import ACTIVATIONS

_FEW_PAIRS = 64
"""With more pairs of a token and an expert, each pair of an expert would read its weights once more."""
_UNSORTED = 4
"""TRITON does not sort ids if there are at least so many times as many experts as pairs."""
_OWN_NAMES = {"w1": "w13", "w2": "w2", "_w1.bias": "w13_bias", "_w2.bias": "w2_bias"}
"""The cache's name of a tensor -> that of `moe_forward`."""
_TRITON = "TritonExperts"


def who_computes(layer: Any, wish: str | None) -> str | None:
    """Return `HostExperts.hits_first` of `layer`, if `wish` is `CacheOptions.overlap`."""
    if wish == "own" and _has_own_kernels(layer):
        return "own"
    return "backend" if wish is not None and _adds_up_rows(layer) else None


def is_split(who: str | None, pairs: int, experts: int) -> bool:
    """Return whether a call with so many pairs, of a layer with so many experts, is computed in two parts."""
    return pairs <= _FEW_PAIRS if who == "own" else who is not None and pairs * _UNSORTED <= experts


def _has_own_kernels(layer: Any) -> bool:
    """Return whether moedoctor's kernels compute what this layer's backend does: BF16 and FP16 of TRITON."""
    method, moe = layer.quant_method, layer.moe_config
    return (
        type(method).__name__ == "UnquantizedFusedMoEMethod"
        and type(method.moe_kernel.fused_experts).__name__ == _TRITON
        and moe.activation.value in ACTIVATIONS
        and getattr(moe, "swiglu_limit", None) is None
        and getattr(layer, "swiglu_limit", None) is None
        and layer.w13_weight.dtype in (torch.bfloat16, torch.float16)
        and os.environ.get("VLLM_BATCH_INVARIANT", "0") in ("", "0")
    )


def _adds_up_rows(layer: Any) -> bool:
    """Return whether the backend computes a row of a pair alone and adds a token's rows up by `moe_sum`.

    That is TRITON: if it does not sort ids, it writes zeros for an id of -1. The fix checks in vLLM's source
    when it sorts and how it adds up. It is not TRITON with one scale for all rows of the second input,
    because that scale depends on the rows of a call.
    """
    experts = layer.quant_method.moe_kernel.fused_experts
    described = experts.quant_config
    return type(experts).__name__ == _TRITON and (
        layer.w13_weight.dtype in (torch.bfloat16, torch.float16)
        or described._a2.scale is not None
        or described.block_shape is not None
        or described.per_act_token_quant
    )


def by_own_kernels(
    cache: ExpertCache, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: str
) -> torch.Tensor:
    """Compute the layer with our kernels, with resident experts while the others are copied.

    `x` [T, H], `topk_weights` and `topk_ids` [T, K]; `activation` is vLLM's name. Sums are float32 until the
    end. Which experts are resident changes no bit, unless the call may need more experts than there are
    slots.
    """
    weights = {own: cache.weights[name] for name, own in _OWN_NAMES.items() if name in cache.weights}
    ours = ACTIVATIONS[activation]
    if not cache.may_need_groups(topk_ids):
        parts = (part.slot_ids for part in cache.groups(topk_ids, overlap=True))
        return moe_forward_in_parts(x, weights, parts, topk_weights, activation=ours).to(x.dtype)
    total: torch.Tensor | None = None
    for group in cache.groups(topk_ids):  # each takes the slots of the one before
        total = moe_forward(x, weights, group.slot_ids, topk_weights, activation=ours, out=total)
    assert total is not None
    return total.to(x.dtype)


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


def by_backend(
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
        raise RuntimeError("the backend did not add up its rows by moe_sum: set overlap=0, or overlap=own")
    return result
