"""Top-k routing written for reading: implementations are compared with it.

Every expert of a row gets a tier and a value; experts are ranked by tier, within a tier by value, highest
first, and among equals by id. Nothing is shared with `moedoctor.fixes.routing`, and arguments are not
checked.
"""

from __future__ import annotations

from functools import partial

import torch

_NORMAL, _NOT_FINITE, _NAN_LOGIT, _MASKED = 0, 1, 2, 4
"""Tiers, best first. A NaN logit whose choice is also not finite is in the sum of the two."""


def _route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    nan_policy: str = "zero",
    num_groups: int = 1,
    topk_groups: int = 1,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights float32 [T, K], ids int32 [T, K]) of `logits` [T, E]; see `moedoctor.fixes.routing`."""
    raw = logits.float()  # [T, E]
    finite_policy = nan_policy == "finite"
    limits = torch.finfo(torch.float32)
    x = (
        raw.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min) if finite_policy else raw
    )  # [T, E]
    scores = x.softmax(dim=-1) if scoring == "softmax" else x.sigmoid()  # [T, E]
    scores = scores.masked_fill(~scores.isfinite(), 0.0)

    value = scores if bias is None else scores + bias.float()  # [T, E]
    tier = torch.full_like(value, _NORMAL, dtype=torch.int64)  # [T, E]
    if finite_policy and bias is None:
        dirty = ~raw.isfinite().all(dim=-1, keepdim=True)  # [T, 1]
        value = torch.where(dirty, x, value)
    tier[~value.isfinite()] = _NOT_FINITE
    value = value.masked_fill(~value.isfinite(), 0.0)
    if finite_policy:
        tier[raw.isnan()] += _NAN_LOGIT

    if num_groups > 1:
        tier = _mask_groups(value, tier, num_groups, topk_groups, sum_of_two=bias is not None)
    ids = _rank(value, tier)[:, :top_k]  # [T, K]
    weights = scores.gather(1, ids)  # [T, K]
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)  # [T, 1]
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * routed_scaling_factor, ids.int()


topk_softmax = partial(_route, scoring="softmax")
topk_sigmoid = partial(_route, scoring="sigmoid")
grouped_topk = topk_sigmoid
"""Takes groups; by default it scores with sigmoid."""


def _mask_groups(
    value: torch.Tensor, tier: torch.Tensor, num_groups: int, topk_groups: int, *, sum_of_two: bool
) -> torch.Tensor:
    """Return `tier` [T, E] with the experts outside the best groups masked."""
    tokens, experts = value.shape
    size = experts // num_groups
    in_groups = value.reshape(tokens * num_groups, size)  # [T * G, S]
    tiers = tier.reshape(tokens * num_groups, size)  # [T * G, S]
    best = _rank(in_groups, tiers)[:, :2]  # [T * G, 2 or 1]
    best_values = in_groups.gather(1, best)  # [T * G, 2 or 1]
    best_tiers = tiers.gather(1, best)  # [T * G, 2 or 1]
    group_tier = best_tiers[:, 0]  # [T * G]
    group_value = best_values[:, 0]  # [T * G]
    if sum_of_two:
        # Choices that are not finite add nothing; a group without a finite choice comes last.
        group_value = best_values.masked_fill(best_tiers != _NORMAL, 0.0).sum(dim=-1)
        group_tier = group_tier.clamp(max=_NOT_FINITE)
    order = _rank(group_value.view(tokens, num_groups), group_tier.view(tokens, num_groups))  # [T, G]
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, :topk_groups], True)  # [T, G]
    return tier.masked_fill(~chosen.repeat_interleave(size, dim=1), _MASKED)


def _rank(value: torch.Tensor, tier: torch.Tensor) -> torch.Tensor:
    """Return column indices [N, M] by tier, then by value from the highest, then by index."""
    by_value = torch.argsort(value, dim=-1, descending=True, stable=True)  # [N, M]
    by_tier = torch.argsort(tier.gather(1, by_value), dim=-1, stable=True)  # [N, M]
    return by_value.gather(1, by_tier)
