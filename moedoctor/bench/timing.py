"""GPU time of short calls, by replaying CUDA graphs of many launches, and wall time on a CPU.

A call of a few microseconds is far shorter than what the host needs to launch it. So each callable is
captured many times into one graph, and the replay of the graph is timed with CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]
"""Work on the GPU, with everything it needs bound to it; it must not synchronize."""
Check = Callable[[object], None]
"""Looks at what a timed call returned, and raises if that is wrong."""

_TARGET_SECONDS = 0.004
"""The time that one replay should take: long enough for the resolution of events."""
_ROUNDS, _FEWEST = 15, 5
_ENOUGH_SECONDS = 0.1
"""Calls that take long are repeated less often: their times also scatter less."""


@dataclass(frozen=True)
class Spread:
    """The percentiles of repeated measurements of one quantity."""

    median: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def summarize(cls, values: Sequence[float]) -> Spread:
        """Return the percentiles of at least one value, interpolated linearly."""
        if not values:
            raise ValueError("values must hold at least one measurement")
        p20, median, p80 = torch.tensor(values, dtype=torch.float64).quantile(
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        )
        return cls(float(median), float(p20), float(p80), len(values))

    def to_row(
        self, name: str, *, scale: float = 1.0, offset: float = 0.0, digits: int | None = None
    ) -> dict[str, float]:
        """Return the median and percentiles under the names that reporters show together."""
        values = {name: self.median, f"{name}_p20": self.p20, f"{name}_p80": self.p80}
        figures = {key: value * scale + offset for key, value in values.items()}
        return figures if digits is None else {key: round(value, digits) for key, value in figures.items()}


@dataclass(frozen=True)
class Comparison:
    baseline: str
    times: Mapping[str, Spread]
    """Microseconds a launch, by name."""
    ratios: Mapping[str, Spread]
    """Time over the baseline's time of the same round, by name; without the baseline itself."""


@dataclass(frozen=True)
class LayerTimes:
    """Microseconds a call."""

    time: Spread
    """With a cold L2 cache in a CUDA graph if the backend can be captured; wall time on a CPU."""
    how: str
    """``graph, cold L2``, ``eager`` or ``wall time``"""
    warm: Spread | None = None
    """In a CUDA graph, with the L2 cache as the call before left it."""
    eager: Spread | None = None
    """Launched from Python, one after another."""


def time_graph(
    calls: Call | Sequence[Call],
    *,
    launches: int = 100,
    replays: int = 30,
    warmup_seconds: float = 0.05,
    check: Check | None = None,
) -> Spread:
    """Return microseconds a launch of `calls`, which share one graph of `launches` launches in rotation.

    Give one call for each set of inputs: rotating among more of them than the L2 cache holds measures
    memory, one alone measures the cache. `check` gets what the graph computes once it has been timed.
    Raises RuntimeError without a CUDA device, and what `check` raises.
    """
    measure = CallGraph(calls, launches)
    _run_until_warm([measure], warmup_seconds)
    spread = Spread.summarize([measure() for _ in range(replays)])
    if check is not None:
        check(measure.compute_again())
    return spread


def compare_times(
    calls: Mapping[str, Call | Sequence[Call]], *, baseline: str, launches: int = 100, replays: int = 30
) -> Comparison:
    """Time several callables in turn, in `replays` rounds, so that clocks and neighbors affect all alike.

    `calls` maps a name to one call or a call for each set of inputs, as in `time_graph`. Raises KeyError
    if `baseline` is not one of the names, RuntimeError without a CUDA device.
    """
    if baseline not in calls:
        raise KeyError(f"baseline must be one of {', '.join(calls)}, got {baseline!r}")
    graphs = {name: CallGraph(rotation, launches) for name, rotation in calls.items()}
    _run_until_warm(list(graphs.values()))
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
        name: Spread.summarize(
            [mine / base for mine, base in zip(samples[name], samples[baseline], strict=True)]
        )
        for name in names
        if name != baseline
    }
    return Comparison(baseline, {name: Spread.summarize(values) for name, values in samples.items()}, ratios)


def time_layer(
    call: Callable[[], object],
    device: str,
    *,
    capturable: bool = True,
    check: Callable[[str, object], None] = lambda how, output: None,
) -> LayerTimes:
    """Time `call`, whose result has been checked before: with a cold and a warm L2 cache, and call by call.

    A call that was right a few times may be wrong later, or in a graph, in which nothing but its kernels
    runs. So `check` gets the output of each way of calling once more: (``eager``, the last output),
    (``graph``, that of a last replay), and so on. Raises RuntimeError if `call` cannot be captured, and what
    `check` raises.
    """
    if not device.startswith("cuda"):
        return LayerTimes(time_wall(call, check=partial(check, "wall time")), "wall time")
    eager = time_eager(call, check=partial(check, "eager"))
    if not capturable:
        return LayerTimes(eager, "eager", eager=eager)
    launches, rounds = choose_launches(eager.median), choose_rounds(eager.median)
    warm = time_graph(call, launches=launches, replays=rounds, check=partial(check, "graph"))
    cold = time_cold(call, device, launches=launches, rounds=rounds, check=partial(check, "graph, cold L2"))
    return LayerTimes(cold, "graph, cold L2", warm, eager)


def choose_launches(microseconds: float, most: int = 50) -> int:
    """Return how many calls to put between two events."""
    return max(1, min(most, round(_TARGET_SECONDS * 1e6 / max(microseconds, 1.0))))


def choose_rounds(microseconds: float) -> int:
    """Return how often to repeat a measurement."""
    return max(_FEWEST, min(_ROUNDS, round(_ENOUGH_SECONDS * 1e6 / max(microseconds, 1.0))))


def time_cold(
    call: Callable[[], object],
    device: str,
    *,
    launches: int = 20,
    rounds: int = _ROUNDS,
    check: Check = lambda output: None,
) -> Spread:
    """Return microseconds of `call` after the L2 cache was overwritten.

    Overwriting and calling in turn is captured into one graph, overwriting alone into another. The time is
    the difference of their replays, taken in turn.
    """
    measure, graph = _make_cold_measures({"": call}, device, launches)[""]
    spread = Spread.summarize([measure() for _ in range(rounds)])
    check(graph.compute_again())
    return spread


def compare_cold(
    calls: Mapping[str, Call], device: str, *, baseline: str, launches: int = 20, rounds: int = _ROUNDS
) -> Comparison:
    """Time several callables in turn as `time_cold` does. Raises KeyError if `baseline` is not a name."""
    measures = _make_cold_measures(calls, device, launches)
    return compare_rounds(
        {name: measure for name, (measure, _) in measures.items()}, baseline=baseline, rounds=rounds
    )


def _make_cold_measures(
    calls: Mapping[str, Call], device: str, launches: int
) -> dict[str, tuple[Callable[[], float], CallGraph]]:
    """Return what measures each call with a cold L2 cache, and the graph that it is in."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.empty(2 * size, dtype=torch.uint8, device=device)
    flush = CallGraph(scratch.zero_, launches)
    flush()

    def make_measure(call: Call) -> tuple[Callable[[], float], CallGraph]:
        def call_cold() -> object:
            scratch.zero_()
            return call()

        graph = CallGraph(call_cold, launches)
        graph()
        # A difference of two times: noise can make that of a very short call negative.
        return lambda: max(1e-3, graph() - flush()), graph

    return {name: make_measure(call) for name, call in calls.items()}


def measure_seconds(call: Callable[[], object], device: str | torch.device) -> float:
    """Return seconds of `call` by the wall clock, until `device` has done its work."""

    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def time_eager(call: Callable[[], object], *, check: Check = lambda output: None) -> Spread:
    """Return microseconds a call by CUDA events around a few of them, the host's work included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    output: object = None

    def run_calls(calls: int) -> float:
        nonlocal output
        start.record()
        for _ in range(calls):
            output = call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / calls

    run_calls(2)  # compiles and loads
    first = run_calls(1)
    calls = choose_launches(first, most=5)
    spread = Spread.summarize([run_calls(calls) for _ in range(choose_rounds(first))])
    check(output)
    return spread


def time_wall(
    call: Callable[[], object], *, seconds: float = 0.5, check: Check = lambda output: None
) -> Spread:
    """Return microseconds a call on a CPU."""
    call()
    samples: list[float] = []
    output: object = None
    until = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        output = call()
        samples.append((time.perf_counter() - start) * 1e6)
    check(output)
    return Spread.summarize(samples)


class CallGraph:
    """A captured graph of calls in rotation. Calling it replays it once and returns microseconds a launch.

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
            # Compiles, loads modules and creates handles, which must not happen during capture.
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

    def compute_again(self) -> object:
        """Return the last call's output after one more replay, which has to write it over NaN."""
        if isinstance(self._output, torch.Tensor) and self._output.is_floating_point():
            with torch.inference_mode():  # a tensor made in inference mode can only be written in it
                self._output.fill_(float("nan"))
        self()
        return self._output


def _run_until_warm(measures: Sequence[Callable[[], float]], seconds: float = 0.05) -> None:
    """Replay until the clocks are up."""
    until = time.perf_counter() + seconds
    while True:
        for measure in measures:
            measure()
        if time.perf_counter() >= until:
            return
