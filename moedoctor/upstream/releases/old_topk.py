"""The top-k of vLLM up to 0.19.1 restated (csrc/moe/topk_softmax_kernels.cu), one thread's view of it.

It gives a row that begins with NaN the same expert K times (MD001).
"""

from __future__ import annotations

import torch

from moedoctor.fixes.routing import TopK

_BLANK = -10000.0
"""The value with which vLLM's kernel overwrites a winner before it looks for the next winner."""


def topk_softmax(logits: torch.Tensor, top_k: int, *, renormalize: bool, bias: torch.Tensor | None) -> TopK:
    """Return what the kernel writes for `logits` [T, E] and `bias` [E]: weights [T, K], ids int32 [T, K]."""
    scores = torch.softmax(logits.float(), dim=-1)  # [T, E]
    return repeat_argmax(scores, top_k, renormalize=renormalize, bias=bias)


def topk_sigmoid(logits: torch.Tensor, top_k: int, *, renormalize: bool, bias: torch.Tensor | None) -> TopK:
    """Return the same with the sigmoid of each logit as its score."""
    return repeat_argmax(torch.sigmoid(logits.float()), top_k, renormalize=renormalize, bias=bias)


def grouped_topk(
    logits: torch.Tensor,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    bias: torch.Tensor | None,
) -> TopK:
    """Return the same argmax over groups and then over their experts.

    No upstream grouped kernel is known to do that. The tier `kernel` shows what the real ones do.
    """
    scores = torch.sigmoid(logits.float())  # [T, E]
    choice = scores if bias is None else scores + bias  # [T, E]
    grouped = choice.unflatten(1, (num_groups, -1))  # [T, G, E/G]
    counted = 1 if bias is None else min(2, grouped.shape[2])
    best = grouped.topk(counted, dim=2).values.sum(2)  # [T, G]
    groups = find_winners(best, topk_groups)  # [T, topk_groups]
    keep = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)  # [T, G]
    allowed = keep.repeat_interleave(grouped.shape[2], dim=1)  # [T, E]
    return repeat_argmax(scores, top_k, renormalize=renormalize, bias=bias, allowed=allowed)


def repeat_argmax(
    scores: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    bias: torch.Tensor | None,
    allowed: torch.Tensor | None = None,
) -> TopK:
    """Return weights [T, K] and ids int32 [T, K]: the `find_winners` of `scores` [T, E] plus `bias` [E].

    Only experts where `allowed` [T, E] is true can win, if it is given.
    """
    choice = scores if bias is None else scores + bias  # [T, E]
    if allowed is not None:
        choice = torch.where(allowed, choice, float("-inf"))  # [T, E]
    ids = find_winners(choice, top_k)  # [T, K]
    weights = scores.gather(1, ids)  # [T, K]
    if renormalize:
        total = weights.sum(1, keepdim=True)  # [T, 1]
        weights = weights / torch.where(total > 0, total, 1.0)
    return TopK(weights, ids.int())


def find_winners(choice: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64 [T, count]: the winner of ``value > best``, scanned from the first column, `count` times.

    Nothing is greater than NaN. So a scan that starts on NaN ends where it started, and one that starts
    elsewhere walks past it.
    """
    choice = choice.clone()  # [T, E]
    chosen = []
    for _ in range(count):
        passable = choice.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))  # [T, E]
        winner = torch.where(choice[:, 0].isnan(), 0, passable.argmax(1))  # [T]
        chosen.append(winner)
        choice.scatter_(1, winner[:, None], _BLANK)
    return torch.stack(chosen, dim=1)
