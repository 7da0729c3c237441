"""Repeated, unknown and empty expert ids in torch operators, for devices without a kernel of ours."""

from __future__ import annotations

import torch


def count_rows(
    ids: torch.Tensor, num_experts: int, counts: torch.Tensor, real_rows: torch.Tensor | None = None
) -> None:
    """Add to `counts` int32 [2, 3] the rows of `ids` [T, K] that hold an unusual id.

    A row may have a repeated id, an id out of range, and an id of -1. Real rows are counted first, then
    padding: rows from `real_rows` int32 [1] on.
    """
    known = (ids >= 0) & (ids < num_experts)  # [T, K]
    repeated = (_find_same(ids, known) & _find_earlier(ids)).flatten(1).any(1)  # [T]
    outside = ((ids != -1) & ~known).any(1)  # [T]
    flags = torch.stack([repeated, outside, (ids == -1).any(1)])  # [3, T]
    padding = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)  # [T]
    if real_rows is not None:
        padding = torch.arange(ids.shape[0], device=ids.device) >= real_rows
    counts += torch.stack([(flags & ~padding).sum(1), (flags & padding).sum(1)]).to(torch.int32)


def deduplicate(
    ids: torch.Tensor, weights: torch.Tensor, *, use_spare: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 [T, K] without repeats and weights float32 [T, K]; see `moedoctor.fixes.expert_ids`.

    A repeated id becomes -1, or with `use_spare` the id of an expert that the row does not hold.
    """
    limits = torch.iinfo(torch.int32)
    ids = torch.where((ids >= limits.min) & (ids <= limits.max), ids, -1)  # [T, K]
    same = _find_same(ids, ids >= 0)  # [T, K, K]
    same |= torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    again = (same & _find_earlier(ids)).any(2)  # [T, K]
    total = torch.where(same, weights.float().unsqueeze(1), 0.0).sum(2)  # [T, K]
    spare = torch.full_like(ids, -1)  # [T, K]
    if use_spare:
        # d repeated ids leave d of the lowest K experts free.
        expert = torch.arange(ids.shape[1], device=ids.device)  # [K]
        free = (ids.unsqueeze(1) != expert[:, None]).all(2)  # [T, K]
        place, number = free.cumsum(1), again.cumsum(1)  # [T, K] each, from 1
        taken = free.unsqueeze(1) & (place.unsqueeze(1) == number.unsqueeze(2))  # [T, K, K]
        spare = torch.where(taken, expert, -1).amax(2)  # [T, K]
    return torch.where(again, spare, ids).int(), torch.where(again, 0.0, total)


def _find_same(ids: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return bool [T, K, K]: whether two lanes hold the same known expert."""
    return (ids.unsqueeze(2) == ids.unsqueeze(1)) & known.unsqueeze(2)


def _find_earlier(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [K, K]: whether the second lane comes before the first."""
    lane = torch.arange(ids.shape[1], device=ids.device)  # [K]
    return lane[None, :] < lane[:, None]
