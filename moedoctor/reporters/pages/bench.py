"""The report of `moedoctor bench`: the record, the JSON and the page that its three kinds share.

Each kind is a module that shows its figures, which are plain data as JSON has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    """Everything that a benchmark measured, in the shape of every report."""

    command: ClassVar[str] = "bench"
    origin: Mapping[str, Any] | None = field(default=None, kw_only=True, metadata={"sparse": True})
    """The origin of the report, as `moedoctor.origin.Origin`; None in reports of older releases."""
    environment: Mapping[str, Any]
    scenarios: tuple[()]
    bench: Mapping[str, Any] = field(metadata={"min_length": 1, "max_length": 1})
    """The figures by their kind: ``backends``, ``cache`` or ``engines``."""
    summary: Mapping[str, Any]

    @classmethod
    def from_figures(
        cls, kind: str, figures: Any, environment: Mapping[str, Any], code: int = 0, origin: Any = None
    ) -> Bench:
        """Return the report of a benchmark that ends with exit code `code`."""
        summary = {**{verdict.value: 0 for verdict in ScenarioVerdict}, "exit_code": code}
        return cls(environment, (), {kind: figures}, summary, origin=origin)


def _find_kind(report: Bench) -> tuple[str, Any, Mapping[str, Any]]:
    """Return the option, the module and the figures of a report's kind. Raises ValueError for another."""
    ((kind, figures),) = report.bench.items()
    if kind not in _KINDS:
        raise ValueError(f"bench is none of {', '.join(_KINDS)}")
    return (*_KINDS[kind], figures)


def make_bench_page(report: Bench, *, full: bool = False) -> list[Block]:
    """Return the answer, the tables and the pictures. `full` adds the environment."""
    option, kind, figures = _find_kind(report)
    heading = Heading(f"moedoctor {moedoctor.__version__}: bench {option}", 1)
    page = [heading, *kind.list_blocks(figures, full=full)]
    return [*page, *make_environment_table(report.environment)] if full else page


def summarize(report: Bench) -> str:
    """Return the answer in one line."""
    _, kind, figures = _find_kind(report)
    return str(kind.summarize(figures))


def list_reasons(report: Bench) -> list[str]:
    """Return a line for each thing that is wrong or failed."""
    _, kind, figures = _find_kind(report)
    return list(kind.list_reasons(figures))
