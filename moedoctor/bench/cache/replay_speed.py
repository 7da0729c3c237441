"""How fast the policies replay a trace: pure Python on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from moedoctor.fixes.eviction import ONLINE_POLICIES, simulate
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

_TOKENS = 10_000


def replay_speed(
    *,
    capacities: Sequence[int] = (16, 32, 64),
    tokens: int = _TOKENS,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Expert accesses a second of `simulate`, the median of `rounds`: a row a policy and capacity.

    One layer of 128 experts, top-8, Zipf routing. ``hit_rate_optimum`` is Belady's rate over the same calls.
    """
    calls = zipf_trace(ZipfSettings(layers=1, rows=tokens, streams=1)).calls(0)
    rows = []
    for capacity in capacities:
        best = simulate(calls, num_experts=128, capacity=capacity, policy="belady").hit_rate
        for policy in ONLINE_POLICIES:
            seconds = []
            for _ in range(rounds):
                start = clock()
                stats = simulate(calls, num_experts=128, capacity=capacity, policy=policy)
                seconds.append(clock() - start)
            median = sorted(seconds)[rounds // 2]
            rows.append(
                {
                    "policy": policy,
                    "capacity": capacity,
                    "accesses_per_second": stats.accesses / median,
                    "hit_rate": stats.hit_rate,
                    "hit_rate_optimum": best,
                }
            )
    return rows
