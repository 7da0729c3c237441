"""`moedoctor bench --cache`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moedoctor import environment
from moedoctor.bench.cache.replay import SCOPES, default_capacities, facts_of, replay_trace
from moedoctor.commands.bench_cache_speed import measure_speed
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.environment import no_gpu
from moedoctor.fixes.eviction import POLICIES
from moedoctor.redaction import Redactor
from moedoctor.reporters.bench_cache import FORMATS, render, summary_line, write_pictures
from moedoctor.reporters.bench_cache_json import CacheBench
from moedoctor.reporters.output import OutputError, check_writable, write
from moedoctor.reporters.plots import PlotError
from moedoctor.trace.format import SHIPPED, RoutingTrace, TraceError, load, shipped_trace
from moedoctor.trace.synthetic import PREFIX, ZipfSettings, zipf_trace

_MAX_CAPACITY = 65_535


@dataclass(frozen=True)
class BenchCacheRequest:
    """The command line of `moedoctor bench --cache`, as text."""

    trace: str | None = None
    """A file, or ``zipf:KEY=VALUE,...``; None for the trace that ships with moedoctor."""
    capacities: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    batch: int | None = None
    scope: str = "layer"
    speed: bool = False
    """Also measure tokens per second on the GPU."""
    format: str = "table"
    output: Path | None = None


def bench_cache_command(request: BenchCacheRequest) -> int:
    """Replay a trace through every policy at every capacity and report.

    1 where a call would be wrong, or a part of `speed` was not measured.
    """
    check_format(request.format)
    if request.scope not in SCOPES:
        raise InputError(f"--scope {request.scope}: expected one of {', '.join(SCOPES)}")
    policies = _listed("--policy", request.policies, POLICIES) or POLICIES
    with as_input_error(TraceError, OutputError):
        check_writable(request.output)
        name, trace = _trace(request.trace)
        capacities = _capacities(request.capacities) or default_capacities(trace)
        facts = facts_of(trace, request.batch)
    facts_here = environment.collect()
    if request.speed and (reason := no_gpu(facts_here)):
        raise InputError(f"--speed: {reason}")
    points = replay_trace(
        trace,
        capacities=capacities,
        policies=policies,
        batch=request.batch,
        scope=request.scope,
    )
    speed = measure_speed(request.batch or 1, capacities, str(facts_here["gpu"])) if request.speed else None
    redactor = Redactor.of_this_process()
    bench = CacheBench(
        trace=redactor.text(name),
        facts=replace(facts, model=redactor.text(facts.model)),
        made={
            key: redactor.text(value) if isinstance(value, str) and not key.endswith("_sha256") else value
            for key, value in trace.made.items()
        },
        scope=request.scope,
        batch=request.batch,
        points=tuple(points),
        environment=facts_here,
        speed=speed.decode if speed else (),
        speed_note=redactor.text(speed.note) if speed else "",
        measured=speed.measured if speed else {},
        limits=speed.limits if speed else (),
        exit_code=1 if any(one.stats.wrong for one in points) or (speed and not speed.complete) else 0,
    )
    write_report(bench, request.format, request.output)
    return bench.exit_code


def check_format(format: str) -> None:
    """Raise InputError for a format that this report does not have."""
    if format not in FORMATS:
        raise InputError(f"--format {format}: expected one of {', '.join(FORMATS)}")


def write_report(bench: CacheBench, format: str, output: Path | None) -> None:
    """Print the report, or write it to `output`, a Markdown report with its pictures beside it."""
    if output is None:
        terminal = format == "table" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = shutil.get_terminal_size().columns if terminal else None
        try:
            text = render(bench, format, width=width)
        except PlotError as error:
            print(f"moedoctor: no chart: {error}", file=sys.stderr)
            text = render(bench, format)
        sys.stdout.write(text)
        return
    pictures: Sequence[str] = ()
    with as_input_error(OutputError):
        if format == "markdown":
            try:
                pictures = write_pictures(bench, output)
            except PlotError as error:
                print(f"moedoctor: no picture beside the report: {error}", file=sys.stderr)
        write(output, render(bench, format, pictures=pictures))
    print(f"moedoctor: {summary_line(bench)}; written to {output}", file=sys.stderr)


def _trace(given: str | None) -> tuple[str, RoutingTrace]:
    """(what it is called in the report, the trace)."""
    if given is None:
        return f"the one that ships with moedoctor, {SHIPPED.as_posix()}", shipped_trace()
    if given == PREFIX or given.startswith(f"{PREFIX}:"):
        return given, zipf_trace(ZipfSettings.parse(given))
    return given, load(Path(given))


def _listed(option: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(one.strip() for text in given for one in text.split(",") if one.strip()))
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name}: expected one of {', '.join(known)}")
    return names


def _capacities(given: Sequence[str]) -> list[int]:
    found = set()
    for text in (one.strip() for part in given for one in part.split(",")):
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MAX_CAPACITY and len(text) < 9):
            raise InputError(f"--capacity {text[:40]}: expected slots a layer, such as 8,16,32")
        found.add(int(text))
    return sorted(found)
