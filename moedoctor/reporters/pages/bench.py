"""The report of `moedoctor bench`: the record, the JSON and the page that its three kinds share.

Each kind is a module with the figures of its record, and with what only its page shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import moedoctor
from moedoctor.reporters.page import Block, Heading
from moedoctor.reporters.pages import bench_backends, bench_cache, bench_engines
from moedoctor.reporters.pages.bench_backends import BackendBench
from moedoctor.reporters.pages.bench_cache import CacheBench
from moedoctor.reporters.pages.bench_engines import EngineBench
from moedoctor.reporters.pages.machine import make_environment_table
from moedoctor.results import ReportError, ScenarioVerdict

Bench = BackendBench | CacheBench | EngineBench
_KINDS: Mapping[str, tuple[str, Any]] = {
    "backends": ("--backend", bench_backends),
    "cache": ("--cache", bench_cache),
    "engines": ("--engine", bench_engines),
}
"""Key of the figures in JSON -> the option, and the module of the kind."""
_NAMES: Mapping[type[Bench], str] = {BackendBench: "backends", CacheBench: "cache", EngineBench: "engines"}


def make_bench_document(bench: Bench) -> dict[str, Any]:
    """Return the JSON document: the shape of every report, and `bench`."""
    name = _NAMES[type(bench)]
    return {
        "moedoctor": moedoctor.__version__,
        "command": "bench",
        "origin": bench.origin,
        "environment": bench.environment,
        "scenarios": [],
        "bench": {name: _KINDS[name][1].make_figures(bench)},
        "summary": {**{verdict.value: 0 for verdict in ScenarioVerdict}, "exit_code": bench.exit_code},
    }


def read_bench(document: Mapping[str, Any]) -> Bench:
    """Return the record that `make_bench_document` wrote. Raises ReportError that names what is wrong."""
    name = next((name for name in _KINDS if name in document["bench"]), None)
    if name is None:
        raise ValueError("bench is none of backends, cache and engines")
    option, kind = _KINDS[name]
    try:
        common = {
            "environment": document["environment"],
            "exit_code": document["summary"]["exit_code"],
            "origin": document.get("origin"),
        }
        bench: Bench = kind.read_figures(document["bench"][name], common)
    except (KeyError, TypeError) as error:
        raise ReportError("report", f"is not from `bench {option}`: {error}") from None
    return bench


def make_bench_page(bench: Bench, *, full: bool = False) -> list[Block]:
    """Return the answer, the tables and the pictures. `full` adds the environment."""
    option, kind = _KINDS[_NAMES[type(bench)]]
    heading = Heading(f"moedoctor {moedoctor.__version__}: bench {option}", 1)
    page = [heading, *kind.list_blocks(bench, full=full)]
    return [*page, *make_environment_table(bench.environment)] if full else page


def summarize(bench: Bench) -> str:
    """Return the answer in one line."""
    line: str = _KINDS[_NAMES[type(bench)]][1].summarize(bench)
    return line


def list_reasons(bench: Bench) -> list[str]:
    """Return a line for each thing that is wrong or failed."""
    reasons: list[str] = _KINDS[_NAMES[type(bench)]][1].list_reasons(bench)
    return reasons
