"""GPU time of short calls, by replaying CUDA graphs of many launches.

A call of a few microseconds is far shorter than what the host needs to launch it, so each callable is
captured many times into one graph, and the replay of the graph is timed with CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
"""Work on the GPU, with everything it needs bound to it; it must not synchronise."""
Check = Callable[[object], None]
"""Looks at what a timed call returned, and raises where that is wrong."""


@dataclass(frozen=True)
class Spread:
    """What repeated measurements of one quantity gave."""

    median: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The percentiles of at least one value, interpolated linearly."""
        if not values:
            raise ValueError("values must hold at least one measurement")
        p20, median, p80 = torch.tensor(values, dtype=torch.float64).quantile(
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        )
        return cls(float(median), float(p20), float(p80), len(values))


@dataclass(frozen=True)
class Comparison:
    """Several callables timed in turn."""

    baseline: str
    times: Mapping[str, Spread]
    """Microseconds a launch, by name."""
    ratios: Mapping[str, Spread]
    """Time over the baseline's time of the same round, by name; without the baseline itself."""


def graph_time(
    calls: Call | Sequence[Call],
    *,
    launches: int = 100,
    replays: int = 30,
    warmup_seconds: float = 0.05,
    check: Check | None = None,
) -> Spread:
    """Microseconds a launch of `calls`, which share one graph of `launches` launches in rotation.

    Give one call for each set of inputs: rotating among more of them than the L2 cache holds measures
    memory, one alone measures the cache. `check` sees what the graph computes once it has been timed.
    Raises RuntimeError without a CUDA device, and what `check` raises.
    """
    measure = CallGraph(calls, launches)
    _warm_up([measure], warmup_seconds)
    spread = Spread.of([measure() for _ in range(replays)])
    if check is not None:
        check(measure.computed_again())
    return spread


def compare_times(
    calls: Mapping[str, Call | Sequence[Call]],
    *,
    baseline: str,
    launches: int = 100,
    replays: int = 30,
    warmup_seconds: float = 0.05,
) -> Comparison:
    """Time several callables in turn, in `replays` rounds, so that clocks and neighbours strike all alike.

    `calls` maps a name to one call or a call for each set of inputs, as in `graph_time`. Raises KeyError
    where `baseline` is none of the names, RuntimeError without a CUDA device.
    """
    if baseline not in calls:
        raise KeyError(f"baseline must be one of {', '.join(calls)}, got {baseline!r}")
    graphs = {name: CallGraph(one, launches) for name, one in calls.items()}
    _warm_up(list(graphs.values()), warmup_seconds)
    return compare_rounds(graphs, baseline=baseline, rounds=replays)


def compare_rounds(measures: Mapping[str, Callable[[], float]], *, baseline: str, rounds: int) -> Comparison:
    """Take one measurement of each in every round, each round starting with the next one."""
    names = list(measures)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(measures[name]())
    ratios = {
        name: Spread.of([mine / base for mine, base in zip(samples[name], samples[baseline], strict=True)])
        for name in names
        if name != baseline
    }
    return Comparison(baseline, {name: Spread.of(values) for name, values in samples.items()}, ratios)


class CallGraph:
    """A captured graph of calls in rotation; calling it replays it once and gives microseconds a launch.

    Raises RuntimeError without a CUDA device, ValueError without a call or a launch.
    """

    def __init__(self, calls: Call | Sequence[Call], launches: int) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("timing CUDA graphs needs a CUDA device, and torch sees none")
        rotation = [calls] if callable(calls) else list(calls)
        if not rotation or launches < 1:
            raise ValueError(
                f"a graph needs a call and a launch, got {len(rotation)} calls and {launches} launches"
            )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Compiles, loads modules and creates handles, none of which may happen during capture.
            for call in rotation:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for index in range(launches):
                self._output = rotation[index % len(rotation)]()
        self._launches = launches
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def __call__(self) -> float:
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1000.0 / self._launches

    def computed_again(self) -> object:
        """What the last call returns in one more replay, which has to write it over NaN."""
        if isinstance(self._output, torch.Tensor) and self._output.is_floating_point():
            with torch.inference_mode():  # a tensor that was made in it may be written only in it
                self._output.fill_(float("nan"))
        self()
        return self._output


def _warm_up(measures: Sequence[Callable[[], float]], seconds: float) -> None:
    """Replay until the clocks are up."""
    until = time.perf_counter() + seconds
    while True:
        for measure in measures:
            measure()
        if time.perf_counter() >= until:
            return
