"""MD006 in the child: the PR's cache and ours on the same routes, and the hit rates that the claims need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moedoctor.bench.cache.replay import load_shipped_trace, replay_trace
from moedoctor.faults.cache.self_evicting_cache import SelfEvictingCacheParameters
from moedoctor.fixes.eviction import CacheTable, SlotTable, replay, simulate
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.reference.expert_cache import PrCache, Problem, PrRule, differ
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.results import Case, Evidence
from moedoctor.trace.format import RoutingTrace
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace

_HIDDEN, _INTERMEDIATE = 64, 32


class TestedCache(NamedTuple):
    table: CacheTable
    """Its bookkeeping alone."""
    acquire: Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
    """Ids [T, K] -> (slots [C, ...] by name, slot ids [T, K]): what the kernel is given."""
    engine: str | None = None


def make_control(parameters: SelfEvictingCacheParameters, problem: Problem) -> TestedCache:
    """Return PR 37190's cache."""
    capacity, clock = parameters.capacity, parameters.clock
    cache = PrCache(problem.weights, capacity, device=problem.device, clock=clock)
    table = PrRule(parameters.experts, capacity, clock=clock)
    return TestedCache(table, lambda ids: (cache.slots, cache.acquire(ids)))


def make_fix(parameters: SelfEvictingCacheParameters, problem: Problem) -> TestedCache:
    """Return our cache with the same policy."""
    # The engine `device` goes by shape: a call whose ids could all differ must fit.
    capacity, device = parameters.capacity, problem.device
    engine = "auto" if parameters.tokens * parameters.top_k <= capacity else "host"
    cache = ExpertCache(problem.weights, capacity, policy="lfru", device=device, engine=engine)

    def acquire(ids: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        acquired = cache.acquire(ids)
        return acquired.weights, acquired.slot_ids

    return TestedCache(SlotTable(parameters.experts, capacity, "lfru"), acquire, cache.engine)


def model(case: Case, parameters: SelfEvictingCacheParameters, release: object) -> Evidence:
    """Replay the bookkeeping over all calls, and compute some of them with real weights."""
    return measure(parameters, case.device, make_control if case.subject == "faulty" else make_fix)


def measure(
    parameters: SelfEvictingCacheParameters,
    device: str,
    make: Callable[[SelfEvictingCacheParameters, Problem], TestedCache],
) -> Evidence:
    trace = _load_routing(parameters)
    experts, capacity = parameters.experts, parameters.capacity
    if (trace.num_experts, trace.top_k) != (experts, parameters.top_k):
        raise ValueError(f"the trace has {trace.num_experts} experts and top-{trace.top_k}")
    calls = trace.list_calls(0, parameters.tokens)[: parameters.calls]
    if max(map(len, calls)) > capacity:
        raise ValueError("a call needs more experts than there are slots; that is MD007")
    problem = Problem.make(experts, _HIDDEN, _INTERMEDIATE, device, parameters.seed)
    cache = make(parameters, problem)
    stats = replay(calls, cache.table)
    bounds = {
        name: simulate(calls, num_experts=experts, capacity=capacity, policy=name).hit_rate
        for name in ("lru", "belady")
    }
    return {
        "calls": stats.calls,
        "wrong_calls": stats.wrong,
        "hit_rate": stats.hit_rate,
        "lru_hit_rate": bounds["lru"],
        "belady_hit_rate": bounds["belady"],
        **_compute(parameters, trace, problem, cache),
    }


def _load_routing(parameters: SelfEvictingCacheParameters) -> RoutingTrace:
    """Return the recorded trace, or one that is drawn for the parameters."""
    if parameters.routing == "trace":
        return load_shipped_trace()
    sizes = parameters.model_dump(include={"experts", "top_k", "seed"})
    rows, streams = parameters.calls * parameters.tokens, parameters.tokens
    return draw_zipf_trace(ZipfSettings(**sizes, layers=1, rows=rows, streams=streams, drift=0.0))


def _compute(
    parameters: SelfEvictingCacheParameters, trace: RoutingTrace, problem: Problem, cache: TestedCache
) -> dict[str, Any]:
    """Move real weights in all calls, and compare the output of some with the layer without a cache."""
    width = len(trace.layers) * trace.top_k
    ids = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, width)[:, : trace.top_k]  # [rows, K]
    batches = [ids[list(rows)] for rows in trace.split_batches(parameters.tokens)[: parameters.calls]]
    computed = _choose_calls(parameters, [batch.unique().tolist() for batch in batches])
    wrong_outputs, worst = 0, 0.0
    for call, batch in enumerate(batches):
        topk_ids = batch.to(problem.device)  # [T, K]
        slots, slot_ids = cache.acquire(topk_ids)
        if call not in computed:
            continue
        x = problem.draw_tokens(len(topk_ids), seed=call)  # [T, H]
        topk_weights = torch.full(slot_ids.shape, 1.0 / trace.top_k, device=problem.device)  # [T, K]
        output = forward(x, MoeWeights.from_tensors(slots), topk_weights, slot_ids)  # [T, H]
        difference = differ(output, problem.compute_expected(x, topk_weights, topk_ids))
        wrong_outputs += bool(difference.rows.any())
        worst = max(worst, difference.worst)
    return {
        "computed": len(computed),
        "wrong_outputs": wrong_outputs,
        "worst_error": worst,
        "engine": cache.engine,
    }


def _choose_calls(parameters: SelfEvictingCacheParameters, calls: list[list[int]]) -> set[int]:
    """Choose the calls whose output is compared, the same for every subject.

    Half of them are the first calls, half are calls in which the PR's rule is wrong, if there are enough.
    """
    rule = PrRule(parameters.experts, parameters.capacity, clock=parameters.clock)
    wrong = []
    for index, call in enumerate(calls):
        rule.step(call)
        if any(rule.expert_of[rule.slot_of[expert]] != expert for expert in call):
            wrong.append(index)
    half = parameters.computed // 2
    return {*range(min(len(calls), parameters.computed - half)), *wrong[:half]}


# --- Measurements for the claims --------------------------------------------------------------------------


def _load_traces() -> Iterator[tuple[str, RoutingTrace]]:
    """Yield the recorded trace, and two drawn in the shape of the model that the claim was made for."""
    yield "recorded, 128 experts top-8", load_shipped_trace()
    for skew in (1.0, 1.5):
        settings = ZipfSettings(experts=128, top_k=6, layers=2, rows=1500, streams=1, skew=skew, drift=0.1)
        yield f"Zipf {skew:g}, 128 experts top-6", draw_zipf_trace(settings)


def measure_lfru_at_half() -> list[dict[str, Any]]:
    """Measure the hit rates of LFRU with 8 slots and LRU with 16, beside the optimum of each.

    Hit rates belong to policies, so they come from a replay of `moedoctor.fixes.eviction`. The PR's own rule
    is listed beside them: it counts hits on slots that hold another expert.
    """
    rows = []
    for name, trace in _load_traces():
        rates = {
            (point.policy, point.capacity): point.hit_rate
            for point in replay_trace(trace, capacities=(8, 16), policies=("lru", "lfru", "belady"))
        }
        counts = [
            replay(trace.list_calls(layer), PrRule(trace.num_experts, 8))
            for layer in range(len(trace.layers))
        ]
        rows.append(
            {
                "trace": name,
                "lfru_8": rates["lfru", 8],
                "belady_8": rates["belady", 8],
                "lru_16": rates["lru", 16],
                "belady_16": rates["belady", 16],
                "pr_rule_counts_8": sum(count.hits for count in counts)
                / sum(count.accesses for count in counts),
                "pr_rule_wrong_8": sum(count.wrong for count in counts)
                / sum(count.calls for count in counts),
            }
        )
    return rows


def measure_lru_monopoly() -> dict[str, Any]:
    """Measure each layer's hit rate with a cache of its own and in one cache for all, under LRU and LFRU.

    ``all_layers`` has each scope's rates over all layers with the optimum of the same scope. The optimum of a
    cache a layer does not bound one cache for all, whose own optimum has no rates by layer.
    """
    trace = load_shipped_trace()
    rows: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    for capacity in (16, 32):
        points = {
            f"{point.policy}_{scope}": point
            for scope in ("layer", "global")
            for point in replay_trace(
                trace, capacities=(capacity,), policies=("lru", "lfru", "belady"), scope=scope
            )
        }
        by_layer = {key: point.hit_rate_by_layer for key, point in points.items() if point.hit_rate_by_layer}
        rows += [
            {"slots": capacity, "layer": layer, **{name: rates[layer] for name, rates in by_layer.items()}}
            for layer in range(len(trace.layers))
        ]
        totals.append({"slots": capacity, **{name: point.hit_rate for name, point in points.items()}})
    return {"rows": rows, "all_layers": totals}
