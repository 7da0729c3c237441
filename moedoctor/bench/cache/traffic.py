"""Hit rates of the timed steps, what the bus had to carry for them, and what it allows."""

from __future__ import annotations

from typing import Any

from moedoctor.bench.cache.run import Run
from moedoctor.fixes.eviction import CacheStats, replay, simulate
from moedoctor.reference.expert_cache import PrRule


def traffic_of(
    run: Run, hits: int, misses: int, bytes_a_miss: int, pinned_gb_s: float | None
) -> dict[str, Any]:
    """Hit rate, gigabytes a step, and the time that they take at the rate of a pinned copy."""
    if not hits + misses:
        return {}
    steps = run.rounds * run.each
    gigabytes = misses * bytes_a_miss / steps * 1e-9
    row = {
        "hit_rate": hits / (hits + misses),
        "misses_a_layer": misses / (steps * run.model.layers),
        "gigabytes_a_step": gigabytes,
    }
    return row if pinned_gb_s is None else row | {"bus_us": gigabytes / pinned_gb_s * 1e6}


def add_bounds(rows: list[dict[str, Any]], base: str) -> None:
    """What the bus allows: the step if nothing but its bytes took time, and the ratio to that of `base`."""
    first = next((row for row in rows if row["engine"] == base and "step_us" in row), None)
    for row in rows:
        if "bus_us" in row and "step_us" in row:
            row["bus_share"] = row["bus_us"] / row["step_us"]
            if first is not None and row is not first and row["bus_us"]:
                row["speedup_bound"] = first["step_us"] / row["bus_us"]


def pr_counts(run: Run) -> CacheStats:
    """What the PR's rule does in the timed steps, over all layers."""
    stats = []
    for calls in _by_layer(run):
        rule = PrRule(run.model.experts, run.capacity)
        replay(calls[: run.start], rule)
        stats.append(replay(calls[run.start :], rule))
    return CacheStats(
        *(sum(getattr(one, key) for one in stats) for key in ("calls", "hits", "misses", "wrong"))
    )


def optimum(run: Run) -> float:
    """Belady's hit rate over the whole trace, from empty caches."""
    stats = [
        simulate(calls, num_experts=run.model.experts, capacity=run.capacity, policy="belady")
        for calls in _by_layer(run)
    ]
    return sum(one.hits for one in stats) / sum(one.accesses for one in stats)


def _by_layer(run: Run) -> list[list[list[int]]]:
    calls: list[list[list[int]]] = run.inputs.ids.transpose(0, 1).flatten(2).tolist()
    return calls
