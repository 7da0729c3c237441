"""The report of `moedoctor bench`: the record, the JSON and the page that its three kinds share.

Each kind is a module that shows its figures, which are plain data as JSON has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import moedoctor
from moedoctor.reporters.page import Block, Heading
from moedoctor.reporters.pages import bench_backends, bench_cache, bench_engines
from moedoctor.reporters.pages.machine import make_environment_table
from moedoctor.results import ScenarioVerdict

_KINDS: Mapping[str, tuple[str, Any]] = {
    "backends": ("--backend", bench_backends),
    "cache": ("--cache", bench_cache),
    "engines": ("--engine", bench_engines),
}
"""Key of the figures in JSON -> the option, and the module of the kind."""


@dataclass(frozen=True)
class Bench:
    """Everything that a benchmark measured."""

    kind: str
    """``backends``, ``cache`` or ``engines``."""
    figures: Mapping[str, Any]
    environment: Mapping[str, Any]
    exit_code: int = 0
    origin: Mapping[str, Any] | None = None
    """Where the report comes from, as `moedoctor.origin.Origin`; None in reports of older releases."""


def make_bench_document(bench: Bench) -> dict[str, Any]:
    """Return the JSON document: the shape of every report, and `bench`."""
    return {
        "moedoctor": moedoctor.__version__,
        "command": "bench",
        "origin": bench.origin,
        "environment": bench.environment,
        "scenarios": [],
        "bench": {bench.kind: bench.figures},
        "summary": {**{verdict.value: 0 for verdict in ScenarioVerdict}, "exit_code": bench.exit_code},
    }


def read_bench(document: Mapping[str, Any]) -> Bench:
    """Return the record that `make_bench_document` wrote. Raises LookupError or ValueError for another."""
    ((kind, figures),) = document["bench"].items()
    if kind not in _KINDS:
        raise ValueError(f"bench is none of {', '.join(_KINDS)}")
    code, origin = document["summary"]["exit_code"], document.get("origin")
    return Bench(kind, figures, document["environment"], code, origin)


def make_bench_page(bench: Bench, *, full: bool = False) -> list[Block]:
    """Return the answer, the tables and the pictures. `full` adds the environment."""
    option, kind = _KINDS[bench.kind]
    heading = Heading(f"moedoctor {moedoctor.__version__}: bench {option}", 1)
    page = [heading, *kind.list_blocks(bench.figures, full=full)]
    return [*page, *make_environment_table(bench.environment)] if full else page


def summarize(bench: Bench) -> str:
    """Return the answer in one line."""
    line: str = _KINDS[bench.kind][1].summarize(bench.figures)
    return line


def list_reasons(bench: Bench) -> list[str]:
    """Return a line for each thing that is wrong or failed."""
    reasons: list[str] = _KINDS[bench.kind][1].list_reasons(bench.figures)
    return reasons
