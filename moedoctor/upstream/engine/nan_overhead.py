"""What the NaN trace and recordings cost a decode step: engines with and without, side by side, in turn.

Four engines are up at once and only one of them works at a time, in the order off, on, on, off and on the
same core, so that clocks and neighbours affect all alike and a drift cancels out. A round is the difference
between a long and a short generation. The time of an engine is the best of the medians of blocks of rounds,
because whatever else the machine does only adds time. The noise is how far two identical engines differ.

A tiny model shows what watching a layer costs if launches take the time; layers of a real model's size show
what is left of that beside real work. The trace is measured with piecewise graphs, recordings with the graphs
that vLLM captures by default: one for a whole decode step, so that no launch on a busy host counts.

A recording that compares calls does so in few steps, which medians would leave out. Its rounds are long, and
the time of an engine is the mean of all of them. A comparison may outlast its round; the rest of it then runs
during the turns of other engines.
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moedoctor.reference.checkpoints import write_qwen3_moe
from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.decode_speed import milliseconds, step_events
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult
from moedoctor.upstream.engine.experiment import Trial, run_trials, write_shape
from moedoctor.upstream.engine.nan_padding import BATCH, SECONDS, engine_arguments, prompts, traced
from moedoctor.upstream.plugin import record

_NAMES = ("off 1", "on 1", "on 2", "off 2")
_STEPS, _ROUNDS, _BLOCK = 48, 64, 8
_LONG = {"steps": 600, "rounds": 16}
"""For a recording that compares calls: at a rate of 0.01 six steps of a round are chosen on average."""
_PATIENCE = 200.0
"""Seconds that an engine waits for the others to start, or to finish."""


Typical = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class _Model:
    """A checkpoint to decode with."""

    name: str
    layers: int
    write: Callable[[Path, int], Path]
    arguments: Mapping[str, Any]


_TINY = _Model(
    "tiny",
    4,
    lambda folder, layers: write_qwen3_moe(
        folder, layers=layers, hidden=512, intermediate=256, experts=32, top_k=4
    ),
    {},
)
_WITH_WEIGHTS = _Model(
    "Qwen3-30B-A3B's layers",
    4,
    lambda folder, layers: write_qwen3_moe(
        folder, layers=layers, hidden=2048, intermediate=768, experts=128, top_k=8
    ),
    {"gpu_memory_utilization": 0.2},
)
"""The reference needs weights in files."""
_LARGE = _Model(
    "Qwen3-30B-A3B's layers",
    12,
    lambda folder, layers: write_shape(folder, num_hidden_layers=layers),
    {"load_format": "dummy", "gpu_memory_utilization": 0.2},
)


def overhead(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the milliseconds of a decode step without and with the trace, and the ratio less 1."""
    return [_measure(_LARGE, lambda folder: traced())]


def overhead_tiny(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the same for a tiny model."""
    return [_measure(_TINY, lambda folder: traced())]


def recording(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the same for a recording that waits for NaN."""
    return [_measure(_with_default_graphs(_LARGE), functools.partial(_recorded, "nan"))]


def recording_crash(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the same for a recording that saves what goes into every call."""
    return [_measure(_with_default_graphs(_LARGE), functools.partial(_recorded, "crash"))]


def recording_mismatch(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the same for a recording that compares a call in one step of a hundred, as a mean."""
    model = _with_default_graphs(_WITH_WEIGHTS)
    return [_measure(model, functools.partial(_recorded, "mismatch=0.01"), typical=statistics.mean, **_LONG)]


def _with_default_graphs(model: _Model) -> _Model:
    """Return a model whose engines capture the graphs that their release captures unless told otherwise."""
    sizes = engine_arguments()["compilation_config"]["cudagraph_capture_sizes"]
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    return replace(model, arguments={**model.arguments, **graphs})


def _recorded(when: str, folder: Path) -> dict[str, str]:
    return {"MOEDOCTOR_RECORD": str(folder / "capsules"), "MOEDOCTOR_RECORD_WHEN": when}


def _measure(
    model: _Model,
    on: Callable[[Path], Mapping[str, str]],
    *,
    typical: Typical | None = None,
    steps: int = _STEPS,
    rounds: int = _ROUNDS,
) -> dict[str, Any]:
    """Measure what the variables that `on` returns for a folder cost.

    `typical` returns the time of an engine from those of its rounds; if not given, `best_median` does.
    """
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = Path(name)
        model.write(folder / "model", model.layers)
        length = {"steps": steps, "rounds": rounds}
        trials = [Trial(_request(model, folder, engine, on(folder), length)) for engine in _NAMES]
        results = [ran.result for ran in run_trials(trials, parallel=len(_NAMES))]
        recorded = len(list(folder.glob("capsules/*")))
    for name, result in zip(_NAMES, results, strict=True):
        if result.error is not None:
            raise UnavailableError(f"{model.name}, {result.label}: {result.error.line()}")
        if (result.fixes is not None) != name.startswith("on"):
            raise UnavailableError(f"{model.name}, {result.label}: active was {result.fixes or 'nothing'}")
    if recorded:
        raise UnavailableError(f"{model.name}: {recorded} calls were recorded, so the rest was not watched")
    graphs = trials[0].request.arguments["compilation_config"].get("cudagraph_mode", "default")
    return {
        "model": model.name,
        "layers": model.layers,
        "batch": BATCH,
        "cudagraph_mode": graphs,
        **_figures(results, typical),
    }


def _request(
    model: _Model, folder: Path, name: str, on: Mapping[str, str], length: Mapping[str, int]
) -> EngineRequest:
    return EngineRequest(
        str(folder / "model"),
        prompts(),
        {**engine_arguments(), **model.arguments},
        # Without a seed for hashes even dictionaries differ from process to process.
        {"PYTHONHASHSEED": "0", **(on if name.startswith("on") else {})},
        max_tokens=2,
        probe="moedoctor.upstream.engine.nan_overhead:decode_times",
        probe_options={**length, "meet": str(folder), "name": name},
        seconds=SECONDS,
        label=f"trace {name}",
    )


def decode_times(llm: Any, *, steps: int, rounds: int, meet: str, name: str) -> dict[str, Any]:
    """Probe: return the milliseconds of a decode step in each round; the engines share the folder `meet`."""
    folder = Path(meet)
    _seconds(llm, steps)  # warm-up
    _wait_for_all(folder, name, "up")
    wall: list[float] = []
    gpu: list[float] = []
    before = record.comparisons()
    with step_events() as events, _one_core() as work:
        for turn, engine in enumerate(turns(rounds)):
            if engine != name:
                continue
            if turn:
                _wait_for(folder / f"{turn - 1}.done", "its turn did not come")
            with work():
                # A generation of two tokens has the prefill and one decode step; the rest is decode steps.
                short = _seconds(llm, 2)
                events.clear()
                wall.append((_seconds(llm, steps + 2) - short) / steps * 1e3)
            if times := milliseconds(events[2:]):
                gpu.append(statistics.median(times))
            (folder / f"{turn}.done").touch()
    compared, seconds = (now - then for now, then in zip(record.comparisons(), before, strict=True))
    _wait_for_all(folder, name, "through")
    return {
        "step_ms": wall,
        "gpu_ms": gpu,
        "compared": compared,
        "seconds_comparing": seconds,
    }


@contextmanager
def _one_core() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield a context in which this thread has the last core, as in every engine; outside it has the others.

    Without it identical engines differed by 8 %. It does nothing on systems that cannot choose cores.
    """
    every = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(every) < 2:
        yield nullcontext
        return
    own = {max(every)}

    @contextmanager
    def work() -> Iterator[None]:
        os.sched_setaffinity(0, own)
        try:
            yield
        finally:
            os.sched_setaffinity(0, every - own)

    os.sched_setaffinity(0, every - own)
    try:
        yield work
    finally:
        os.sched_setaffinity(0, every)


def turns(rounds: int) -> Sequence[str]:
    """Return which engine works, turn by turn: one round forwards, the next backwards."""
    return [name for index in range(rounds) for name in (_NAMES if index % 2 == 0 else _NAMES[::-1])]


def _seconds(llm: Any, tokens: int) -> float:
    vllm: Any = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling, use_tqdm=False)
    return time.perf_counter() - started


def _wait_for_all(folder: Path, name: str, stage: str) -> None:
    (folder / f"{name}.{stage}").touch()
    for engine in _NAMES:
        _wait_for(folder / f"{engine}.{stage}", f"not all engines were {stage}")


def _wait_for(file: Path, failure: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{failure} within {_PATIENCE:g} s")
        time.sleep(0.002)


def _figures(results: Sequence[EngineResult], typical: Typical | None = None) -> dict[str, Any]:
    """Return the figures of a row; with `typical`, those of all rounds and of what was compared in them."""
    probes = {name: result.probe for name, result in zip(_NAMES, results, strict=True)}
    rounds = zip(*(probes[name]["step_ms"] for name in _NAMES), strict=True)
    ratios = sorted((on_1 + on_2) / (off_1 + off_2) for off_1, on_1, on_2, off_2 in rounds)
    figures = {
        **_compared(probes, "step_ms", "", typical or best_median),
        "overhead_p20": ratios[len(ratios) // 5] - 1,
        "overhead_p80": ratios[len(ratios) * 4 // 5] - 1,
        "rounds": len(ratios),
    }
    if typical is not None:
        watched = [probes[name] for name in _NAMES if name.startswith("on")]
        compared = [probe["compared"] for probe in watched]
        seconds = sum(probe["seconds_comparing"] for probe in watched)
        return {**figures, "compared": compared, "compare_ms": seconds / max(1, sum(compared)) * 1e3}
    if all(probe["gpu_ms"] for probe in probes.values()):
        figures |= _compared(probes, "gpu_ms", "gpu_", best_median)
    return figures


def _compared(
    probes: Mapping[str, Mapping[str, Any]], key: str, prefix: str, typical: Typical
) -> dict[str, Any]:
    """The time of each engine, the overhead of their means, and how far identical engines differ."""
    times = {name: typical(probe[key]) for name, probe in probes.items()}
    off, on = ([times[name] for name in _NAMES if name.startswith(kind)] for kind in ("off", "on"))
    return {
        f"{prefix}step_ms_off": statistics.mean(off),
        f"{prefix}step_ms_on": statistics.mean(on),
        f"{prefix}overhead": statistics.mean(on) / statistics.mean(off) - 1,
        f"{prefix}noise": max(max(alike) / min(alike) for alike in (off, on)) - 1,
        f"{prefix}each_off": off,
        f"{prefix}each_on": on,
    }


def best_median(times: Sequence[float]) -> float:
    """Return the smallest median of `_BLOCK` rounds that follow each other."""
    return min(statistics.median(times[start : start + _BLOCK]) for start in range(0, len(times), _BLOCK))
