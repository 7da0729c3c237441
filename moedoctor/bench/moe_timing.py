"""Time of one MoE layer: with a cold and a warm L2 cache in a CUDA graph, and launched call by call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moedoctor.bench.timing import Spread, graph_time

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


def time_layer(call: Callable[[], object], device: str, *, capturable: bool = True) -> LayerTimes:
    """Time `call`, whose result has been checked. Raises RuntimeError where it cannot be captured."""
    if not device.startswith("cuda"):
        return LayerTimes(wall_time(call), "wall time")
    eager = eager_time(call)
    if not capturable:
        return LayerTimes(eager, "eager", eager=eager)
    launches, rounds = launches_for(eager.median), rounds_for(eager.median)
    warm = graph_time(call, launches=launches, replays=rounds)
    cold = cold_time(call, device, launches=launches, rounds=rounds)
    return LayerTimes(cold, "graph, cold L2", warm, eager)


def launches_for(microseconds: float, most: int = 50) -> int:
    """How many calls to put between two events."""
    return max(1, min(most, round(_TARGET_SECONDS * 1e6 / max(microseconds, 1.0))))


def rounds_for(microseconds: float) -> int:
    """How often to repeat a measurement."""
    return max(_FEWEST, min(_ROUNDS, round(_ENOUGH_SECONDS * 1e6 / max(microseconds, 1.0))))


def cold_time(
    call: Callable[[], object], device: str, *, launches: int = 20, rounds: int = _ROUNDS
) -> Spread:
    """Microseconds of `call` after the L2 cache was overwritten.

    Overwriting and calling in turn is captured into one graph, overwriting alone into another; the time is
    the difference of their replays, taken in turn.
    """
    size = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.empty(2 * size, dtype=torch.uint8, device=device)
    graphs = {
        "both": _captured(lambda: (scratch.zero_(), call()), launches),
        "flush": _captured(lambda: scratch.zero_(), launches),
    }
    for measure in graphs.values():
        measure()
    # A difference of two times: noise can make that of a very short call less than nothing.
    return Spread.of([max(0.0, graphs["both"]() - graphs["flush"]()) for _ in range(rounds)])


def eager_time(call: Callable[[], object]) -> Spread:
    """Microseconds a call by CUDA events around a few of them: what the host needs is part of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def several(calls: int) -> float:
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / calls

    several(2)  # compiles and loads
    first = several(1)
    calls = launches_for(first, most=5)
    return Spread.of([several(calls) for _ in range(rounds_for(first))])


def wall_time(call: Callable[[], object], *, seconds: float = 0.5, least: int = 3) -> Spread:
    """Microseconds a call on a CPU."""
    call()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return Spread.of(samples)


def _captured(call: Callable[[], object], launches: int) -> Callable[[], float]:
    """A graph of `launches` calls; calling it replays it and gives microseconds a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / launches

    return replay
