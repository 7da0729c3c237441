"""`moedoctor bench --cache`: the replay of a trace, the speed on a GPU, and the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedoctor import environment
from moedoctor.bench.cache.replay import default_capacities, facts_of, replay_trace
from moedoctor.bench.gpu_state import sampled
from moedoctor.commands.options import FULL_FORMATS, InputError, as_input_error, deliver, ended, numbers
from moedoctor.environment import no_gpu
from moedoctor.origin import origin
from moedoctor.processes import interrupts
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import progress_bar, terminal
from moedoctor.reporters.pages.bench_cache import (
    CacheBench,
    bench_document,
    bench_page,
    charts,
    reasons,
    summary_line,
)
from moedoctor.reporters.plots import PlotError, terminal_chart
from moedoctor.text import print_message, print_traceback
from moedoctor.trace.format import SHIPPED, RoutingTrace, TraceError, load, shipped_trace
from moedoctor.trace.synthetic import PREFIX, ZipfSettings, zipf_trace

if TYPE_CHECKING:
    from moedoctor.bench.cache.model import Host, Model

SUBJECTS = {
    "overlap": "ours: aging, packed, hits computed during copies",
    "packed": "ours: aging, packed",
    "aging": "ours: aging",
    "device": "ours: device engine",
    "host": "ours: host engine",
    "resident": "ours, all resident",
    "uncached": "no cache",
    "pr37190": "PR 37190, restated",
    "pinned": "a pinned copy",
}
"""Variants of `moedoctor.bench.cache.speed.decode` and of the misses, in words."""
_MAX_CAPACITY = 65_535

Rows = tuple[Mapping[str, Any], ...]


def measure(
    given: str | None,
    capacity: Sequence[str] | None,
    *,
    policies: Sequence[str],
    batch: int | None,
    scope: str,
    speed: bool,
) -> CacheBench:
    """Replay a trace through every policy at every capacity; with `speed`, also measure on the GPU.

    The exit code is 1 if a call would be wrong or a part of `speed` was not measured. Raises InputError.
    """
    with as_input_error(TraceError):
        name, trace = _trace(given)
        expected = "slots a layer, such as 8,16,32"
        capacities = list(numbers("--capacity", capacity, _MAX_CAPACITY, expected)) or default_capacities(
            trace
        )
        facts = facts_of(trace, batch)
    machine = environment.collect()
    if speed and (reason := no_gpu(machine)):
        raise InputError(f"--speed: {reason}")
    with progress_bar(remaining=True) as progress:
        points = replay_trace(
            trace, capacities=capacities, policies=policies, batch=batch, scope=scope, progress=progress
        )
    with sampled(machine, "cuda:0" if speed else "cpu") as readings:
        on_gpu = measure_speed(batch or 1, capacities, str(machine["gpu"])) if speed else Speed()
    redactor = Redactor.of_this_process()
    return CacheBench(
        trace=redactor.text(name),
        facts=replace(facts, model=redactor.text(facts.model)),
        made=redactor.record(trace.made),
        scope=scope,
        batch=batch,
        points=tuple(points),
        environment=machine,
        speed=on_gpu.decode,
        speed_note=redactor.text(on_gpu.note),
        measured=on_gpu.measured,
        limits=on_gpu.limits,
        not_measured=redactor.record(on_gpu.missing),
        exit_code=1 if any(point.stats.wrong for point in points) or on_gpu.missing else 0,
        origin=origin(
            variables=machine.get("env"),
            gpu_state=readings.state,
            iterations={"calls_replayed": facts.calls, **on_gpu.iterations},
        ),
    )


def _trace(given: str | None) -> tuple[str, RoutingTrace]:
    """Return the name of the trace for the report, and the trace."""
    if given is None:
        return f"the one that ships with moedoctor, {SHIPPED.as_posix()}", shipped_trace()
    if given == PREFIX or given.startswith(f"{PREFIX}:"):
        return given, zipf_trace(ZipfSettings.parse(given))
    return given, load(Path(given))


def write_report(bench: CacheBench, format: str, output: Path | None, *, full: bool = False) -> int:
    """Print the report, or write it to `output`; a terminal with colours gets the charts below the table.

    Returns the exit code.
    """
    page = bench_page(bench, full=format in FULL_FORMATS)
    code, why = ended(bench.exit_code, reasons(bench))
    deliver(
        page,
        bench_document(bench),
        format=format,
        output=output,
        summary=summary_line(bench),
        code=code,
        reasons=why,
        full=full,
    )
    colour, width = terminal(output)
    if format == "table" and colour and width is not None:
        try:
            for chart in charts(bench):
                print(f"\n{terminal_chart(chart, width=min(width, 100))}", end="")
        except PlotError as error:
            print_message(f"no chart: {error}")
    return code


@dataclass(frozen=True)
class Speed:
    """Everything that was measured on the GPU, as rows of tables."""

    decode: Rows = ()
    measured: Mapping[str, Rows] = field(default_factory=dict)
    """What is measured once, by name: ``recorded``, ``misses``, ``groups``, ``replays``."""
    limits: Rows = ()
    """What the cache is meant to reach, and the verdict."""
    note: str = ""
    iterations: Mapping[str, int] = field(default_factory=dict)
    """``rounds`` that a time is the median of, and ``steps_a_round``."""
    missing: tuple[str, ...] = ()
    """The parts that failed, with the error, or were not reached."""


def measure_speed(
    batch: int, capacities: Sequence[int], gpu: str, *, device: str = "cuda:0", model: Model | None = None
) -> Speed:
    """Decode through the restated cache of the PR and ours, at each capacity; at batch 1 the rest too.

    A part that fails does not stop the others. After Ctrl-C, SIGTERM or SIGHUP, what is finished is returned.
    """
    from moedoctor.bench.cache.limits import judge
    from moedoctor.bench.cache.model import Host, Model
    from moedoctor.bench.cache.speed import ROUNDS, TOKENS_A_ROUND

    model = model or Model()
    tables: dict[str, list[dict[str, Any]]] = {}
    missing: list[str] = []
    try:
        with interrupts.raised(), progress_bar(remaining=True) as progress:
            host = Host.make(model, device)
            parts = list(_parts(batch, capacities, device, model, host))
            for done, (name, part, run) in enumerate(parts):
                progress(done, len(parts), part)
                began = time.monotonic()
                tables.setdefault(name, [])
                missing.append(part)
                try:
                    tables[name] += run()
                    missing.pop()
                except Exception as error:
                    if _was_interrupted(error):
                        raise KeyboardInterrupt from error
                    print_traceback(Redactor.of_this_process().text)
                    message = (str(error).splitlines() or [""])[0]
                    missing[-1] += f" ({type(error).__name__}: {message})"
                if not sys.stderr.isatty():  # a log gets a line for each part, a terminal a bar
                    print_message(f"{part}: {time.monotonic() - began:.0f} s")
    except KeyboardInterrupt:
        missing.append("whatever comes next: interrupted")
    rows = tables.pop("decode", [])
    note = (
        f"Speed: decode at batch {batch} through {model.layers} MoE layers of the shape of Qwen3-30B-A3B in "
        f"bfloat16, without attention; random weights, Zipf routing with drift; {gpu}. bus_us is the time "
        "that the bytes of the misses take at the rate of a pinned copy; speedup_bound is the ratio if "
        "nothing else took time; recorded is the trace that comes with moedoctor. The timed steps are those "
        "in which the PR's cache computes right, if there are any; wrong_steps counts, by bookkeeping from "
        "empty caches, the steps of a longer part of the trace in which it computes with a wrong expert."
    )
    if missing:
        note += f" NOT MEASURED: {'; '.join(missing)}."
    measured = {name: tuple(map(_in_words, table)) for name, table in tables.items()}
    return Speed(
        tuple(map(_in_words, rows)),
        measured,
        tuple(judge(rows, **tables)),
        note,
        iterations={"rounds": ROUNDS, "steps_a_round": max(TOKENS_A_ROUND // batch, 1)},
        missing=tuple(missing),
    )


def _parts(
    batch: int, capacities: Sequence[int], device: str, model: Model, host: Host
) -> Iterator[tuple[str, str, Callable[[], list[dict[str, Any]]]]]:
    """Give (table, what is measured, the measurement that gives its rows), in the order of measurement."""
    from moedoctor.bench.cache.groups import group_cost
    from moedoctor.bench.cache.limits import MIN_SPEEDUP
    from moedoctor.bench.cache.replay import replay_speed
    from moedoctor.bench.cache.speed import decode, miss_bandwidth

    def decoded(capacity: int, **options: bool) -> Callable[[], list[dict[str, Any]]]:
        return lambda: decode(device, batch=batch, capacity=capacity, host=host, model=model, **options)

    for capacity in capacities:
        if capacity <= model.experts:
            yield "decode", f"decode with {capacity} slots", decoded(capacity)
    if batch != 1:
        return
    for capacity in capacities:
        if capacity in MIN_SPEEDUP:
            yield "recorded", f"the recorded trace with {capacity} slots", decoded(capacity, recorded=True)
    one_layer = replace(model, host_layers=1)
    yield "misses", "misses", lambda: miss_bandwidth(device, model=one_layer, host=host)
    yield "groups", "groups", lambda: group_cost(device, model=one_layer)["rows"]
    yield "replays", "replays", replay_speed


def _was_interrupted(error: BaseException) -> bool:
    """Return whether `error` was raised while a KeyboardInterrupt left, as a broken capture does."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, KeyboardInterrupt):
        inner = inner.__context__
    return inner is not None


def _in_words(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "engine" not in row:
        return row
    rest = {key: value for key, value in row.items() if key != "engine"}
    return {"subject": SUBJECTS.get(row["engine"], row["engine"]), **rest}
