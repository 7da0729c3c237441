"""Time of one MoE layer: with a cold and a warm L2 cache in a CUDA graph, and launched call by call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moedoctor.bench.timing import CallGraph, Check, Spread, graph_time

_TARGET_SECONDS = 0.004
"""How long one replay should take: long enough for the resolution of events."""
_ROUNDS, _FEWEST = 15, 5
_ENOUGH_SECONDS = 0.1
"""Calls that take long are repeated less often: their times scatter less, too."""


@dataclass(frozen=True)
class LayerTimes:
    """Microseconds a call."""

    time: Spread
    """With a cold L2 cache in a CUDA graph where the backend can be captured; wall time on a CPU."""
    how: str
    """``graph, cold L2``, ``eager`` or ``wall time``"""
    warm: Spread | None = None
    """In a CUDA graph, with what the call before left in the L2 cache."""
    eager: Spread | None = None
    """Launched from Python, one after another."""


def time_layer(
    call: Callable[[], object],
    device: str,
    *,
    capturable: bool = True,
    check: Callable[[str, object], None] = lambda how, output: None,
) -> LayerTimes:
    """Time `call`, whose result has been checked; `check` gets that of each way of calling once more.

    A call that was right a few times may be wrong later, or in a graph, where nothing but its kernels runs:
    (``eager``, the last output), (``graph``, that of a last replay), and so on. Raises RuntimeError where it
    cannot be captured, and what `check` raises.
    """
    if not device.startswith("cuda"):
        return LayerTimes(wall_time(call, check=partial(check, "wall time")), "wall time")
    eager = eager_time(call, check=partial(check, "eager"))
    if not capturable:
        return LayerTimes(eager, "eager", eager=eager)
    launches, rounds = launches_for(eager.median), rounds_for(eager.median)
    warm = graph_time(call, launches=launches, replays=rounds, check=partial(check, "graph"))
    cold = cold_time(call, device, launches=launches, rounds=rounds, check=partial(check, "graph, cold L2"))
    return LayerTimes(cold, "graph, cold L2", warm, eager)


def launches_for(microseconds: float, most: int = 50) -> int:
    """How many calls to put between two events."""
    return max(1, min(most, round(_TARGET_SECONDS * 1e6 / max(microseconds, 1.0))))


def rounds_for(microseconds: float) -> int:
    """How often to repeat a measurement."""
    return max(_FEWEST, min(_ROUNDS, round(_ENOUGH_SECONDS * 1e6 / max(microseconds, 1.0))))


def cold_time(
    call: Callable[[], object],
    device: str,
    *,
    launches: int = 20,
    rounds: int = _ROUNDS,
    check: Check = lambda output: None,
) -> Spread:
    """Microseconds of `call` after the L2 cache was overwritten.

    Overwriting and calling in turn is captured into one graph, overwriting alone into another; the time is
    the difference of their replays, taken in turn.
    """
    size = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def after_flush() -> object:
        scratch.zero_()
        return call()

    both, flush = CallGraph(after_flush, launches), CallGraph(scratch.zero_, launches)
    for measure in (both, flush):
        measure()
    # A difference of two times: noise can make that of a very short call less than nothing.
    spread = Spread.of([max(0.0, both() - flush()) for _ in range(rounds)])
    check(both.computed_again())
    return spread


def eager_time(call: Callable[[], object], *, check: Check = lambda output: None) -> Spread:
    """Microseconds a call by CUDA events around a few of them: what the host needs is part of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    output: object = None

    def several(calls: int) -> float:
        nonlocal output
        start.record()
        for _ in range(calls):
            output = call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / calls

    several(2)  # compiles and loads
    first = several(1)
    calls = launches_for(first, most=5)
    spread = Spread.of([several(calls) for _ in range(rounds_for(first))])
    check(output)
    return spread


def wall_time(
    call: Callable[[], object],
    *,
    seconds: float = 0.5,
    least: int = 3,
    check: Check = lambda output: None,
) -> Spread:
    """Microseconds a call on a CPU."""
    call()
    samples: list[float] = []
    output: object = None
    until = time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < until:
        start = time.perf_counter()
        output = call()
        samples.append((time.perf_counter() - start) * 1e6)
    check(output)
    return Spread.of(samples)
