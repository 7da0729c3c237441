"""`moedoctor check` for a person at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from moedoctor.diagnose.check.records import CheckResult, Finding, Problem
from moedoctor.reporters.check import CAN_STRIKE, DEPENDS, PROBLEMS, seen, summary_line
from moedoctor.reporters.check_facts import fact_rows
from moedoctor.reporters.text import one_line

DEFAULT_WIDTH = 100
MIN_WIDTH = 50

_STYLES = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[36m"}
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"


def check_table(result: CheckResult, *, colour: bool = False, width: int | None = None) -> str:
    """The result in lines of at most `width` columns."""
    page = _Page(max(width or DEFAULT_WIDTH, MIN_WIDTH), colour)
    return "\n".join(_lines(result, page)) + "\n"


@dataclass(frozen=True)
class _Page:
    columns: int
    colour: bool

    def paint(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self.colour else text

    def heading(self, text: str) -> Iterator[str]:
        yield from ("", self.paint(text, _BOLD))

    def wrapped(self, text: str, indent: int, hang: int) -> Iterator[str]:
        """`text` from column `indent` on, its further lines by `hang` more."""
        yield from textwrap.wrap(
            text,
            self.columns,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hang),
            break_on_hyphens=False,
        )

    def item(self, severity: str, title: str, rows: Iterator[tuple[str, str]]) -> Iterator[str]:
        first, *rest = self.wrapped(f"{severity:9}{one_line(title)}", 2, 9)
        yield first.replace(severity, self.paint(severity, _STYLES[severity]), 1)
        yield from rest
        for name, text in rows:
            yield from self.wrapped(f"{name + ':':7}{one_line(text)}", 11, 7)


def _lines(result: CheckResult, page: _Page) -> Iterator[str]:
    yield page.paint("Environment", _BOLD)
    rows = list(fact_rows(result.environment))
    size = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        yield from page.wrapped(f"{name:{size}}{text}", 2, size)
    if result.problems:
        yield from page.heading(PROBLEMS)
        for problem in result.problems:
            yield from page.item(problem.severity, problem.what, _problem(problem))
    if result.findings:
        yield from page.heading(CAN_STRIKE)
        for one in result.findings:
            yield from page.item(one.severity, f"{one.id} {one.name}: {one.title}", _finding(one))
    if result.conditional:
        yield from page.heading(DEPENDS)
        for one in result.conditional:
            yield from page.wrapped(one_line(f"{one.id} {one.name}: {one.needs or one.why}"), 2, 4)
    if result.findings or result.conditional:
        yield from ("", "`moedoctor explain ID` tells one in full.")
    yield from ("", summary_line(result))


def _finding(one: Finding) -> Iterator[tuple[str, str]]:
    yield "why", one.why
    if one.needs:
        yield "needs", one.needs
    yield "seen", seen(one.evidence)
    yield "next", one.next_step


def _problem(one: Problem) -> Iterator[tuple[str, str]]:
    yield "why", one.why
    if "error" in one.evidence:
        yield "seen", str(one.evidence["error"])
    yield "next", one.next_step
