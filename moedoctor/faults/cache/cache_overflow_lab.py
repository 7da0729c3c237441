"""What runs in the child for MD007: a cache that drops experts, and ours, which refuses or makes groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from moedoctor.fixes.expert_cache import CacheOverflow, ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache_problem import PrCache, Problem, compute, differ
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.cache.cache_overflow import CacheOverflowParameters

_HIDDEN, _INTERMEDIATE = 64, 32


class Prefill(NamedTuple):
    """What came of one call."""

    output: torch.Tensor
    """float32 [T, H]"""
    refused: str | None
    """The error that a caller gets who did not ask for groups."""
    groups: int = 1
    dropped: int = 0
    """Experts that were left out."""


class OverflowingCache(Protocol):
    """What is put to the test."""

    def open(self, problem: Problem, capacity: int) -> None:
        """Start with an empty cache."""

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Prefill:
        """The layer for `x` [T, H], `weights` and `ids` [T, K]."""


class Truncating:
    """PR 37190 before its commit 1a8df90: keeps the highest expert ids that fit, and says nothing."""

    def open(self, problem: Problem, capacity: int) -> None:
        self._cache = PrCache(problem.weights, capacity, device=problem.device)

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Prefill:
        slot_ids = self._cache.acquire(ids)  # [T, K]
        output = compute(self._cache.slots, x, weights, slot_ids)  # [T, H]
        return Prefill(output, None, dropped=len(self._cache.rule.dropped))


class Grouped:
    """Ours: `acquire` refuses the call, `groups` computes it in parts that fit."""

    def open(self, problem: Problem, capacity: int) -> None:
        self._cache = ExpertCache(problem.weights, capacity, device=problem.device)

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Prefill:
        refused = None
        try:
            self._cache.acquire(ids)
        except CacheOverflow as error:
            refused = str(error)
        total, groups = torch.zeros_like(x), 0  # [T, H]
        for part in self._cache.groups(ids):
            moe_forward(x, part.weights, part.slot_ids, weights, out=total)
            groups += 1
        return Prefill(total, refused, groups)


def observe(
    parameters: CacheOverflowParameters, device: str, implementation: OverflowingCache
) -> Observation:
    """Prefills that need more experts than there are slots, against the layer without a cache."""
    draw = torch.Generator().manual_seed(parameters.seed)
    problem = Problem.make(parameters.experts, _HIDDEN, _INTERMEDIATE, device, parameters.seed)
    implementation.open(problem, parameters.capacity)
    rows = wrong = dropped = 0
    worst, needed, groups = 0.0, 0, 0
    refusals = []
    for index in range(parameters.prefills):
        logits = torch.randn(parameters.tokens, parameters.experts, generator=draw)  # [T, E]
        weights, ids = (one.to(device) for one in logits.softmax(1).topk(parameters.top_k))  # [T, K] each
        weights, ids = weights / weights.sum(1, keepdim=True), ids.int()  # [T, K] each
        needed = needed or len(ids.unique())
        x = problem.tokens(parameters.tokens, seed=index)  # [T, H]
        came = implementation.run(x, weights, ids)
        found = differ(came.output, problem.right(x, weights, ids))
        rows += parameters.tokens
        wrong += int(found.rows.sum())
        worst, groups, dropped = max(worst, found.worst), max(groups, came.groups), dropped + came.dropped
        refusals.append(came.refused)
    return Observation(
        {
            "needed": needed,
            "rows": rows,
            "wrong_rows": wrong,
            "worst_error": worst,
            "dropped_experts": dropped,
            "groups": groups,
            "refused": all(refusals),
            "message": refusals[0],
        }
    )
