"""The time that this harness adds to a kernel, compared with the GPU's own clock.

`triton.testing.do_bench` is measured beside it in the same run. It decides nothing: if two harnesses
differ, neither of them is the truth.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from moedoctor.bench.timing import CallGraph, Comparison, compare_rounds, time_cold, time_graph

TARGET_US = 20.0
_LIMIT = 0.02
_ROUNDS, _LAUNCHES = 7, 50
_PROBE_CYCLES = 200_000
_OURS = ("graph", "graph_cold")


def measure_harness_cost(device: str) -> Mapping[str, Any]:
    """Time a kernel of about 20 µs that waits and touches no memory: by its own stamps, by us, by do_bench.

    Each launch stamps its begin and its end. ``kernel_us`` is from begin to end, and ``launch_gap_us`` is
    the GPU's own gap between two kernels of a graph: every model pays it, and no harness can leave it out.
    `judge_cost` describes the other figures. Raises ImportError without Triton.
    """
    from triton.testing import do_bench

    from moedoctor.kernels.device_guard import make_current
    from moedoctor.kernels.stamped_wait import stamped_wait

    stamps = torch.zeros(_LAUNCHES, 2, dtype=torch.int64, device=device)  # [L, 2] nanoseconds

    def wait(stamp: torch.Tensor, cycles: int) -> None:
        with make_current(stamp):
            stamped_wait[(1,)](stamp, cycles, num_warps=1)

    def bind_waits(cycles: int) -> list[partial[None]]:
        return [partial(wait, stamp, cycles) for stamp in stamps]

    time_graph(bind_waits(_PROBE_CYCLES), launches=_LAUNCHES, replays=3)
    kernels = bind_waits(max(1, round(_PROBE_CYCLES * TARGET_US / measure_kernel_time(stamps))))
    replay, gaps = CallGraph(kernels, _LAUNCHES), []

    def own_clock() -> float:
        replay()
        gaps.append(measure_launch_gap(stamps))
        return measure_kernel_time(stamps) + gaps[-1]

    measures = {
        "launch": own_clock,
        "graph": lambda: time_graph(kernels, launches=_LAUNCHES, replays=20).median,
        "graph_cold": lambda: time_cold(kernels[0], device, launches=30, rounds=9).median,
        "do_bench": lambda: float(do_bench(kernels[0], warmup=20, rep=60, return_mode="median")) * 1000,
    }
    compared = compare_rounds(measures, baseline="launch", rounds=_ROUNDS)
    return judge_cost(compared, statistics.median(gaps))


def judge_cost(compared: Comparison, gap: float) -> dict[str, Any]:
    """Return times in microseconds, and how far each is from that of a launch: the kernel and its `gap`.

    ``overhead`` is the ratio minus 1. ``within_limit`` is whether both of ours are within 2 % of a launch;
    too short is as wrong as too long.
    """
    facts: dict[str, Any] = {f"{name}_us": round(spread.median, 3) for name, spread in compared.times.items()}
    facts |= {"kernel_us": round(facts["launch_us"] - gap, 3), "launch_gap_us": round(gap, 3)}
    for name, ratio in compared.ratios.items():
        facts |= ratio.to_row(f"{name}_overhead", offset=-1, digits=4)
    facts["within_limit"] = all(abs(compared.ratios[name].median - 1) <= _LIMIT for name in _OURS)
    return facts


def measure_kernel_time(stamps: torch.Tensor) -> float:
    """Return microseconds from begin to end, the mean of `stamps` int64 [L, 2] in nanoseconds.

    The mean, as the clock may tick once a microsecond: begins fall anywhere between two ticks.
    """
    return float((stamps[:, 1] - stamps[:, 0]).double().mean()) / 1000


def measure_launch_gap(stamps: torch.Tensor) -> float:
    """Return microseconds from an end to the next begin, the mean of `stamps` int64 [L, 2] in nanoseconds."""
    return float((stamps[1:, 0] - stamps[:-1, 1]).double().mean()) / 1000
