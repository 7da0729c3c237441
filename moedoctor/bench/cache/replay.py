"""Replays what an expert cache would do with a recorded or synthetic routing trace. No GPU, no torch."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.entries import find_reports_folder
from moedoctor.fixes.eviction import ONLINE_POLICIES, POLICIES, CacheStats, SlotTable, replay, simulate
from moedoctor.trace.format import Call, RoutingTrace, load

SHIPPED = Path("traces", "small_moe_decode.safetensors")
"""In the folder of the evidence: the trace that commands and failures replay unless they get another."""
SCOPES = ("layer", "global")
"""``layer``: every layer has a cache of its own, as in vLLM's PR 37190. ``global``: one for all layers, with
as many slots as the layers' caches have together."""


@dataclass(frozen=True)
class TraceFacts:
    """The figures of a trace at one batch size that decide the hit rates."""

    model: str
    layers: int
    num_experts: int
    top_k: int
    tokens: int
    calls: int
    """Forward passes."""
    experts_a_call: float
    """Distinct experts that a layer needs in one call, on average."""
    most_experts_a_call: int
    reuse: float
    """Share of a call's experts that the call before it in the same layer needed too."""
    experts_for_90: float
    """Share of a layer's experts that take 90 % of its accesses, the mean over layers."""


@dataclass(frozen=True)
class ReplayPoint:
    policy: str
    capacity: int
    """Slots a layer."""
    stats: CacheStats
    overflowing: int
    """Calls that need more experts than there are slots; they run in groups."""
    hit_rate_by_layer: tuple[float, ...]
    """Empty for `belady` in one cache for all layers."""

    @property
    def hit_rate(self) -> float:
        """Hits over accesses, 0 to 1."""
        return self.stats.hit_rate

    def to_figures(self, facts: TraceFacts) -> dict[str, Any]:
        """Return the point as JSON has it; `facts` are those of its trace."""
        return {
            "policy": self.policy,
            "capacity": self.capacity,
            "share_resident": self.capacity / facts.num_experts,
            "hit_rate": self.hit_rate,
            "hits": self.stats.hits,
            "misses": self.stats.misses,
            "wrong_calls": self.stats.wrong,
            "overflowing_calls": self.overflowing,
            "layer_calls": self.stats.calls,
            "misses_per_token": self.stats.misses / facts.tokens,
            "hit_rate_by_layer": self.hit_rate_by_layer,
        }


def collect_trace_facts(trace: RoutingTrace, batch: int | None = None) -> TraceFacts:
    """Read the facts off `trace` at `batch`, before a cache is chosen. Raises TraceError."""
    by_layer = [trace.list_calls(layer, batch) for layer in range(len(trace.layers))]
    needed = sum(len(call) for calls in by_layer for call in calls)
    again = sum(
        len(set(now).intersection(before)) for calls in by_layer for before, now in itertools.pairwise(calls)
    )
    later = needed - sum(len(calls[0]) for calls in by_layer)
    count = sum(map(len, by_layer))
    return TraceFacts(
        model=trace.model,
        layers=len(trace.layers),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        tokens=trace.rows,
        calls=len(by_layer[0]),
        experts_a_call=needed / count,
        most_experts_a_call=max(len(call) for calls in by_layer for call in calls),
        reuse=again / later if later else 0.0,
        experts_for_90=sum(_count_most_used(calls, 0.9) / trace.num_experts for calls in by_layer)
        / len(by_layer),
    )


def replay_trace(
    trace: RoutingTrace,
    *,
    capacities: Sequence[int],
    policies: Sequence[str] = POLICIES,
    batch: int | None = None,
    scope: str = "layer",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[ReplayPoint]:
    """Replay every policy at every capacity, from empty caches; the unit is a call, not an access.

    `progress` takes how many points are done, how many there are, and which one comes now.
    Raises TraceError for a batch that the trace cannot be replayed at, ValueError for an unknown policy or a
    capacity below 1.
    """
    if not capacities or min(capacities) < 1:
        raise ValueError("capacity must be at least 1")
    by_layer = [trace.list_calls(layer, batch) for layer in range(len(trace.layers))]
    steps = [] if scope == "layer" else trace.list_steps(batch)
    pairs, points = list(itertools.product(policies, capacities)), list[ReplayPoint]()
    for policy, capacity in pairs:
        progress(len(points), len(pairs), f"{policy} with {capacity} slots")
        if scope == "layer":
            points.append(_replay_layers(policy, capacity, by_layer, trace.num_experts))
        else:
            points.append(_replay_globally(policy, capacity, steps, len(by_layer), trace.num_experts))
    return points


def load_shipped_trace() -> RoutingTrace:
    """Return the decode of a small MoE language model on held-out text. Raises TraceError."""
    return load(find_reports_folder() / SHIPPED)


def choose_capacities(trace: RoutingTrace) -> list[int]:
    """Doubling from a token's experts to all of them."""
    doubled = (trace.top_k << power for power in itertools.count())
    return [*itertools.takewhile(lambda size: size < trace.num_experts, doubled), trace.num_experts]


def _count_most_used(calls: Iterable[Call], mass: float) -> int:
    """Return the number of experts, the most used first, that take `mass` of the accesses."""
    counts = Counter(expert for call in calls for expert in call)
    taken = list(itertools.accumulate(count for _, count in counts.most_common()))
    return min(bisect_left(taken, mass * sum(counts.values())) + 1, len(counts))


def _replay_layers(
    policy: str, capacity: int, by_layer: Sequence[Sequence[Call]], num_experts: int
) -> ReplayPoint:
    stats = [simulate(calls, num_experts=num_experts, capacity=capacity, policy=policy) for calls in by_layer]
    overflowing = sum(len(call) > capacity for calls in by_layer for call in calls)
    rates = tuple(layer.hit_rate for layer in stats)
    return ReplayPoint(policy, capacity, CacheStats.sum(stats), overflowing, rates)


class _ByLayer:
    """A table for all layers that also counts each layer's own hits."""

    def __init__(self, table: SlotTable, num_experts: int, layers: int) -> None:
        self.capacity, self.slot_of, self.expert_of = table.capacity, table.slot_of, table.expert_of
        self.split, self._step, self._experts = table.split, table.step, num_experts
        self.hits, self.accesses = [0] * layers, [0] * layers

    def step(self, experts: Sequence[int]) -> int:
        missed = self._step(experts)
        if experts:
            layer = experts[0] // self._experts
            self.hits[layer] += len(experts) - missed
            self.accesses[layer] += len(experts)
        return missed


def _replay_globally(
    policy: str, capacity: int, steps: Sequence[Call], layers: int, num_experts: int
) -> ReplayPoint:
    slots, every = capacity * layers, num_experts * layers
    overflowing = sum(len(call) > slots for call in steps)
    if policy not in ONLINE_POLICIES:
        total = simulate(steps, num_experts=every, capacity=slots, policy=policy)
        return ReplayPoint(policy, capacity, total, overflowing, ())
    table = _ByLayer(SlotTable(every, slots, policy), num_experts, layers)
    total = replay(steps, table)
    rates = (hits / (needed or 1) for hits, needed in zip(table.hits, table.accesses, strict=True))
    return ReplayPoint(policy, capacity, total, overflowing, tuple(rates))
