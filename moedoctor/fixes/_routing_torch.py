"""The routing rule in torch operators, for devices without a kernel of ours.

`torch.topk` leaves the order of equal values open, so each choice and its expert's id share one int64 key:
the choice, coded to sort as an integer of 32 bits, above the inverted id of 28. What ranks behind every
choice has a code below those.
"""

from __future__ import annotations

import torch

_NOT_FINITE = -0x7F800001
"""The code of -inf: below that of every finite choice."""
_NAN_LAST = -(1 << 33)
"""Added to the code of a NaN logit's choice under the policy "finite"."""
_ABSENT = -(1 << 34)


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    renormalize: bool,
    nan_policy: str,
    num_groups: int,
    topk_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [T, K] and ids int32 [T, K] of checked arguments; see `moedoctor.fixes.routing`."""
    # torch's CPU activations give other last bits where elements do not lie side by side.
    x = logits.float().contiguous()  # [T, E]
    clean = _sanitise(x) if nan_policy == "finite" else x  # [T, E]
    score = torch.softmax(clean, dim=-1) if scoring == "softmax" else torch.sigmoid(clean)  # [T, E]
    if nan_policy == "zero":
        score.nan_to_num_(nan=0.0)  # neither activation gives an Inf
    code = _choice_code(x, clean, score, bias, nan_policy)  # [T, E]
    if num_groups > 1:
        code = _keep_best_groups(code, num_groups, topk_groups, sum_of_two=bias is not None)
    ids = _highest(code, top_k)  # [T, K]
    weights = score.gather(1, ids)  # [T, K]
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)  # [T, 1]
        weights = weights / torch.where(total > 0, total, 1.0)
    if scale != 1.0:
        weights = weights * scale
    return weights, ids.to(torch.int32)


def _sanitise(x: torch.Tensor) -> torch.Tensor:
    """NaN and -Inf become the lowest finite float32, +Inf the highest."""
    limits = torch.finfo(torch.float32)
    return torch.where(x.isnan(), limits.min, x.clamp(limits.min, limits.max))


def _choice_code(
    x: torch.Tensor, clean: torch.Tensor, score: torch.Tensor, bias: torch.Tensor | None, nan_policy: str
) -> torch.Tensor:
    """int64 codes [T, E] that order the experts of each row, the best highest."""
    if bias is not None:
        choice = score + bias.float()
    elif nan_policy == "finite":
        dirty = (~x.isfinite()).any(dim=-1, keepdim=True)  # [T, 1]
        choice = torch.where(dirty, clean, score)
    else:
        choice = score
    code = _code_of(choice)
    if bias is not None:
        code = torch.where(choice.isfinite(), code, _NOT_FINITE)
    code = code.long()
    if nan_policy == "finite":
        code = torch.where(x.isnan(), code + _NAN_LAST, code)
    return code


def _code_of(x: torch.Tensor) -> torch.Tensor:
    """float32 -> int32 that sorts the same way."""
    bits = (x + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 tie with 0.0
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _value_of(code: torch.Tensor) -> torch.Tensor:
    """The inverse of `_code_of`."""
    bits = code.to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _keep_best_groups(code: torch.Tensor, groups: int, kept: int, *, sum_of_two: bool) -> torch.Tensor:
    """`code` [T, E] with the experts outside the best groups made absent."""
    grouped = code.unflatten(1, (groups, -1))  # [T, G, S]
    rank = grouped.amax(dim=-1)  # [T, G]
    if sum_of_two:
        best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values  # [T, G, 2 or 1]
        total = torch.where(best > _NOT_FINITE, _value_of(best), 0.0).sum(dim=-1)  # [T, G]
        # A sum can overflow to -inf: still better than a group without a finite choice.
        code_of_total = _code_of(total).clamp(min=_NOT_FINITE + 1).long()
        rank = torch.where(rank > _NOT_FINITE, code_of_total, _NOT_FINITE)
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(1, _highest(rank, kept), True)  # [T, G]
    return torch.where(chosen.unsqueeze(-1), grouped, _ABSENT).flatten(1)


def _highest(code: torch.Tensor, count: int) -> torch.Tensor:
    """Columns [T, count] of the highest codes, the highest first, ties to the lower column."""
    last = code.shape[1] - 1
    inverted = torch.arange(last, -1, -1, device=code.device)  # [columns]
    keys = (code << 28).bitwise_or_(inverted).topk(count, dim=-1, sorted=True).values  # [T, count]
    return last - (keys & 0xFFFFFFF)
