"""`moedoctor bench --cache`: the replay of a trace, the speed on a GPU, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from moedoctor import environment
from moedoctor.bench.cache.replay import (
    SHIPPED,
    choose_capacities,
    collect_trace_facts,
    load_shipped_trace,
    replay_trace,
)
from moedoctor.commands.options import convert_errors, parse_numbers
from moedoctor.origin import record_origin
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import show_progress
from moedoctor.reporters.pages.bench import Bench
from moedoctor.trace.format import RoutingTrace, TraceError, load
from moedoctor.trace.synthetic import PREFIX, ZipfSettings, draw_zipf_trace

_MAX_CAPACITY = 65_535


def measure(
    given: str | None,
    capacity: Sequence[str] | None,
    *,
    policies: Sequence[str],
    batch: int | None,
    scope: str,
) -> Bench:
    """Replay a trace through every policy at every capacity.

    The exit code is 1 if a call would be wrong. Raises InputError.
    """
    with convert_errors(TraceError):
        name, trace = _trace(given)
        expected = "slots a layer, such as 8,16,32"
        given_slots = parse_numbers("--capacity", capacity, _MAX_CAPACITY, expected)
        capacities = list(given_slots) or choose_capacities(trace)
        facts = collect_trace_facts(trace, batch)
    machine = environment.collect()
    with show_progress(remaining=True) as progress:
        points = replay_trace(
            trace, capacities=capacities, policies=policies, batch=batch, scope=scope, progress=progress
        )
    redactor = Redactor.from_this_process()
    figures = {
        "trace": {
            "source": redactor.mask(name),
            **asdict(facts),
            "model": redactor.mask(facts.model),
            "made": redactor.record(trace.made),
        },
        "scope": scope,
        "batch": batch,
        "replay_unit": "call",
        "points": [point.to_figures(facts) for point in points],
    }
    code = int(any(point.stats.wrong for point in points))
    origin = record_origin(variables=machine.get("env"), iterations={"calls_replayed": facts.calls})
    return Bench.from_figures("cache", figures, machine, code, origin)


def _trace(given: str | None) -> tuple[str, RoutingTrace]:
    """Return the name of the trace for the report, and the trace."""
    if given is None:
        return f"the one that ships with moedoctor, {SHIPPED.as_posix()}", load_shipped_trace()
    if given == PREFIX or given.startswith(f"{PREFIX}:"):
        return given, draw_zipf_trace(ZipfSettings.parse(given))
    return given, load(Path(given))
