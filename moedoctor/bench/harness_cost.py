"""What this harness adds to a kernel, held against `triton.testing.do_bench` in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moedoctor.bench.moe_timing import cold_time
from moedoctor.bench.timing import compare_rounds, graph_time

TARGET_US = 20.0
_LIMIT = 0.02
_ROUNDS = 7


def measure_harness_cost(device: str) -> Mapping[str, Any]:
    """Times of one kernel of about 20 µs that waits and touches no memory, by do_bench and by ours in turn.

    ``overhead`` is the median ratio minus 1, and ``within_limit`` whether it is at most 2 %. Raises
    ImportError without Triton.
    """
    from triton.testing import do_bench

    cycles = _cycles(device)

    def kernel() -> None:
        torch.cuda._sleep(cycles)

    measures = {
        "do_bench": lambda: float(do_bench(kernel, warmup=20, rep=60, return_mode="median")) * 1000,
        "graph": lambda: graph_time(kernel, launches=50, replays=20).median,
        "graph_cold": lambda: cold_time(kernel, device, launches=30, rounds=9).median,
    }
    compared = compare_rounds(measures, baseline="do_bench", rounds=_ROUNDS)
    facts: dict[str, Any] = {f"{name}_us": round(one.median, 3) for name, one in compared.times.items()}
    for name, ratio in compared.ratios.items():
        facts[f"{name}_overhead"] = round(ratio.median - 1, 4)
        facts[f"{name}_overhead_p20"] = round(ratio.p20 - 1, 4)
        facts[f"{name}_overhead_p80"] = round(ratio.p80 - 1, 4)
    facts["within_limit"] = all(one.median - 1 <= _LIMIT for one in compared.ratios.values())
    return facts


def _cycles(device: str) -> int:
    """How many cycles the waiting kernel needs for `TARGET_US`."""
    probe = 1_000_000
    taken = graph_time(lambda: torch.cuda._sleep(probe), launches=5, replays=5).median
    return max(1, round(probe * TARGET_US / taken))
