"""What runs in the child for MD006: the PR's cache, ours, and what each computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moedoctor.fixes.eviction import CacheTable, SlotTable, replay, simulate
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.reference.expert_cache_problem import PrCache, Problem, compute, differ, even_weights
from moedoctor.reference.pr37190 import PrRule
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.cache.self_evicting_cache import SelfEvictingCacheParameters
    from moedoctor.trace.format import RoutingTrace

_HIDDEN, _INTERMEDIATE = 64, 32
Resident = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""(slots [C, ...] by name, slot ids [T, K])."""


class CacheUnderTest(Protocol):
    """What is put to the test."""

    def table(self, experts: int, capacity: int) -> CacheTable:
        """The bookkeeping alone."""

    def cache(self, problem: Problem, capacity: int, ids_a_call: int) -> Any:
        """Something that `resident` takes."""

    def resident(self, cache: Any, ids: torch.Tensor) -> Resident:
        """What the kernel is given for `ids` [T, K]."""


@dataclass(frozen=True)
class FaultyCache:
    """PR 37190's rule, restated."""

    clock: str = "access"

    def table(self, experts: int, capacity: int) -> CacheTable:
        return PrRule(experts, capacity, clock=self.clock)

    def cache(self, problem: Problem, capacity: int, ids_a_call: int) -> PrCache:
        return PrCache(problem.weights, capacity, device=problem.device, clock=self.clock)

    def resident(self, cache: PrCache, ids: torch.Tensor) -> Resident:
        return cache.slots, cache.acquire(ids)


@dataclass(frozen=True)
class FixedCache:
    """Ours: `moedoctor.fixes.eviction` and `moedoctor.fixes.expert_cache`."""

    policy: str = "lfru"

    def table(self, experts: int, capacity: int) -> CacheTable:
        return SlotTable(experts, capacity, self.policy)

    def cache(self, problem: Problem, capacity: int, ids_a_call: int) -> ExpertCache:
        # The engine `device` goes by shape: a call whose ids could all differ must fit.
        engine = "auto" if ids_a_call <= capacity else "host"
        return ExpertCache(
            problem.weights, capacity, policy=self.policy, device=problem.device, engine=engine
        )

    def resident(self, cache: ExpertCache, ids: torch.Tensor) -> Resident:
        got = cache.acquire(ids)
        return got.weights, got.slot_ids


def routing(parameters: SelfEvictingCacheParameters) -> RoutingTrace:
    """The recorded trace, or one that is drawn for the parameters."""
    from moedoctor.trace.shipped import shipped_trace
    from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

    if parameters.routing == "trace":
        return shipped_trace()
    return zipf_trace(
        ZipfSettings(
            experts=parameters.experts,
            top_k=parameters.top_k,
            layers=1,
            rows=parameters.calls * parameters.tokens,
            streams=parameters.tokens,
            drift=0.0,
            seed=parameters.seed,
        )
    )


def observe(
    parameters: SelfEvictingCacheParameters, device: str, implementation: CacheUnderTest
) -> Observation:
    """Replay the bookkeeping over all calls, and compute the first of them with real weights."""
    trace = routing(parameters)
    if (trace.num_experts, trace.top_k) != (parameters.experts, parameters.top_k):
        raise ValueError(f"the trace has {trace.num_experts} experts and top-{trace.top_k}")
    calls = trace.calls(0, parameters.tokens)[: parameters.calls]
    if max(map(len, calls)) > parameters.capacity:
        raise ValueError("a call needs more experts than there are slots, which is MD007")
    experts, capacity = parameters.experts, parameters.capacity
    stats = replay(calls, implementation.table(experts, capacity))
    bounds = {
        name: simulate(calls, num_experts=experts, capacity=capacity, policy=name).hit_rate
        for name in ("lru", "belady")
    }
    return Observation(
        {
            "calls": stats.calls,
            "wrong_calls": stats.wrong,
            "hit_rate": stats.hit_rate,
            "lru_hit_rate": bounds["lru"],
            "belady_hit_rate": bounds["belady"],
            **_compute(parameters, trace, device, implementation),
        }
    )


def _compute(
    parameters: SelfEvictingCacheParameters, trace: RoutingTrace, device: str, implementation: CacheUnderTest
) -> dict[str, Any]:
    """Move real weights through all calls, and compare the output of some with the layer without a cache."""
    problem = Problem.make(parameters.experts, _HIDDEN, _INTERMEDIATE, device, parameters.seed)
    cache = implementation.cache(problem, parameters.capacity, parameters.tokens * parameters.top_k)
    batches = _batches(trace, parameters.tokens, parameters.calls)
    chosen = _to_compute(parameters, [ids.unique().tolist() for ids in batches])
    outputs = 0
    worst = 0.0
    for call, ids in enumerate(one.to(device) for one in batches):  # [T, K] each
        slots, slot_ids = implementation.resident(cache, ids)
        if call in chosen:
            x, weights = problem.tokens(len(ids), seed=call), even_weights(ids)  # [T, H], [T, K]
            found = differ(compute(slots, x, weights, slot_ids), problem.right(x, weights, ids))
            outputs += bool(found.rows.any())
            worst = max(worst, found.worst)
    engine = getattr(cache, "engine", None)
    return {"computed": len(chosen), "wrong_outputs": outputs, "worst_error": worst, "engine": engine}


def _to_compute(parameters: SelfEvictingCacheParameters, calls: list[list[int]]) -> set[int]:
    """Calls whose output is compared, the same for every subject: half of them first ones, half where the
    PR's rule is wrong, as far as there are such."""
    rule = PrRule(parameters.experts, parameters.capacity, clock=parameters.clock)
    wrong = []
    for index, call in enumerate(calls):
        rule.step(call)
        if any(rule.expert_of[rule.slot_of[expert]] != expert for expert in call):
            wrong.append(index)
    half = parameters.computed // 2
    return {*range(min(len(calls), parameters.computed - half)), *wrong[:half]}


def _batches(trace: RoutingTrace, tokens: int, count: int) -> list[torch.Tensor]:
    """int32 [T, K] of the first layer, the first `count` calls at `tokens` sequences side by side."""
    width = len(trace.layers) * trace.top_k
    ids = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, width)[:, : trace.top_k]  # [rows, K]
    return [ids[list(rows)] for rows in trace.batches(tokens)[:count]]
