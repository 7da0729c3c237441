"""Three ways to index with an id of -1, restated, and the same without; what runs in the child for MD016.

The expert outputs are small whole numbers and the weights eighths, so a row is either right or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moedoctor.fixes.expert_ids import local_ids, without_sentinels
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.routing.sentinel_ids import SentinelIdsParameters

_STALE = 64.0
"""What a buffer holds that an earlier call left."""


class Batch(NamedTuple):
    ids: torch.Tensor
    """int32 [T, K], -1 in empty slots"""
    weights: torch.Tensor
    """float32 [T, K]; those of empty slots are not 0"""
    expert_map: torch.Tensor
    """int64 [E]: the local id of each expert, or -1"""


class Used(NamedTuple):
    """What came out of a use."""

    slots: torch.Tensor
    """int64 [T, K]: the local expert that each slot was given to, -1 for none"""
    sums: torch.Tensor
    """float32 [T]"""


def make_batch(parameters: SentinelIdsParameters) -> Batch:
    """Distinct ids, then -1 as `parameters.slots` says; drawn on the CPU."""
    draw = torch.Generator().manual_seed(parameters.seed)
    tokens, experts, top_k = parameters.tokens, parameters.experts, parameters.top_k
    ids = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :top_k].int()  # [T, K]
    if parameters.slots == "padding":
        ids[-max(tokens // 4, 1) :] = -1
    else:
        ids[:, top_k - 1] = -1
    weights = (torch.arange(ids.numel()).reshape(ids.shape) % 4 + 1) / 8  # [T, K]
    share = experts // parameters.ranks
    first = share * parameters.rank
    expert_map = torch.full((experts,), -1)  # [E]
    expert_map[first : first + share] = torch.arange(share)
    return Batch(ids, weights, expert_map)


class FaultyUse:
    """The id is an index as it is; Python and torch take -1 for the last entry."""

    def expert_map(self, batch: Batch) -> Used:
        """The map to local ids, indexed with -1, says what it says of the last expert."""
        local = batch.expert_map[batch.ids.long()]  # [T, K]
        return Used(local, _weighted(batch, local))

    def gather(self, batch: Batch) -> Used:
        """The experts themselves, indexed with -1: the last one computes."""
        local = batch.ids.long() % batch.expert_map.shape[0]  # [T, K]
        return Used(local, _weighted(batch, local))

    def row_map(self, batch: Batch) -> Used:
        """A map from slots to sorted rows, of which the empty slots are not written and yet read."""
        rows, row_of_slot = _sorted_rows(batch, fill=0)
        values = rows[row_of_slot]  # [T, K]
        return Used(batch.ids.long(), (values * batch.weights).sum(1))


class FixedUse:
    """Empty slots are told apart before anything is indexed."""

    def expert_map(self, batch: Batch) -> Used:
        local = local_ids(batch.ids, batch.expert_map).long()  # [T, K]
        return Used(local, _weighted(batch, local))

    def gather(self, batch: Batch) -> Used:
        ids, weights = without_sentinels(batch.ids, batch.weights)  # [T, K] each
        sums = _weighted(batch._replace(ids=ids, weights=weights), ids.long())  # [T]
        return Used(torch.where(weights > 0, ids.long(), -1), sums)

    def row_map(self, batch: Batch) -> Used:
        rows, row_of_slot = _sorted_rows(batch, fill=-1)
        values = torch.where(row_of_slot >= 0, rows[row_of_slot], 0.0)  # [T, K]
        return Used(batch.ids.long(), (values * batch.weights).sum(1))


def observe(parameters: SentinelIdsParameters, implementation: Any) -> Observation:
    """Compare each token's sum with that over its real slots."""
    batch = make_batch(parameters)
    used: Used = getattr(implementation, parameters.use)(batch)
    is_empty = batch.ids < 0  # [T, K]
    here = ~is_empty & (batch.expert_map[batch.ids.clamp_min(0).long()] >= 0)  # [T, K]
    local = torch.where(here, batch.expert_map[batch.ids.clamp_min(0).long()], -1)  # [T, K]
    wrong = used.sums != _weighted(batch, local)  # [T]
    given = is_empty & (used.slots >= 0)  # [T, K]
    return Observation(
        {
            "rows": parameters.tokens,
            "rows_wrong": int(wrong.sum()),
            "empty_slots": int(is_empty.sum()),
            "empty_slots_given_to_an_expert": int(given.sum()),
            "expert": int(used.slots[given][0]) if bool(given.any()) else None,
        }
    )


def _output(token: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """What expert `expert` makes of token `token`: a whole number from 1 to 13."""
    return ((token * 7 + expert * 3) % 13 + 1).float()


def _weighted(batch: Batch, local: torch.Tensor) -> torch.Tensor:
    """float32 [T]: the sum over slots whose `local` id [T, K] is not negative."""
    token = torch.arange(local.shape[0])[:, None]  # [T, 1]
    return torch.where(local >= 0, _output(token, local) * batch.weights, 0.0).sum(1)


def _sorted_rows(batch: Batch, *, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert outputs in sorted order, float32 [T * K], and each slot's row, int64 [T, K], `fill` before."""
    used = (batch.ids >= 0).nonzero()  # [N, 2]
    order = used[batch.ids[used[:, 0], used[:, 1]].argsort(stable=True)]  # [N, 2], by expert
    token, slot = order.unbind(1)  # [N] each
    rows = torch.full((batch.ids.numel(),), _STALE)  # [T * K]
    rows[: len(order)] = _output(token, batch.ids[token, slot])
    row_of_slot = torch.full(batch.ids.shape, fill)  # [T, K]
    row_of_slot[token, slot] = torch.arange(len(order))
    return rows, row_of_slot
