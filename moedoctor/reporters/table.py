"""`table`: the report for a person at a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from moedoctor.interfaces import Reporter
from moedoctor.reporters.evidence_rows import evidence_tables, lines, without_records
from moedoctor.reporters.rows import CrashNote, Group, Row, crash_notes, group_cases, shared_parameters
from moedoctor.reporters.text import (
    clean,
    environment_line,
    figures,
    one_line,
    short_evidence,
    short_parameters,
    summary_line,
)
from moedoctor.results import ClaimResult, Report, ScenarioResult

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

DEFAULT_WIDTH = 120
"""For a file or a log."""
MIN_WIDTH = 50
"""Narrower terminals wrap our lines by themselves; words would have to be broken to fit."""

_VERDICT_WIDTH = len("reproduced")
_GAP = 2
_INDENT = 2
_FIGURE_WIDTH = 24
"""Parameters may squeeze the figures so far, and no further."""
_NOTHING = "-"
_STYLES = {
    "proved": "green",
    "clean": "green",
    "confirmed": "green",
    "found": "bold red",
    "reproduced": "yellow",
    "failed": "bold red",
    "error": "bold red",
    "refuted": "magenta",
    "absent": "cyan",
    "skipped": "dim",
    "untested": "dim",
}


class TableReporter(Reporter):
    """Tables drawn by rich. Everything from the report is passed as plain text, never as markup."""

    name = "table"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        from rich.console import Console

        out = io.StringIO()
        # Nothing is left to the surroundings: the same report gives the same text everywhere.
        columns = max(width or DEFAULT_WIDTH, MIN_WIDTH)
        console = Console(
            file=out,
            width=columns,
            height=25,
            force_terminal=colour,
            force_jupyter=False,
            color_system="standard" if colour else None,
            no_color=not colour,
            legacy_windows=False,
            markup=False,
            emoji=False,
            highlight=False,
        )
        for part in _parts(report, columns):
            console.print(part)
        lines = (line.rstrip() for line in out.getvalue().split("\n"))
        return "\n".join(lines) + summary_line(report) + "\n"


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    yield _text(environment_line(report), "dim")
    yield ""
    for scenario in report.scenarios:
        yield from _scenario(scenario, width)
    if report.findings:
        yield _text("Against the baseline", "bold")
        yield _pairs(("regression", "bold red", finding) for finding in report.findings)
        yield ""
    if report.summary.interrupted:
        yield _text("Interrupted: not every case ran.", "bold red")


def _scenario(scenario: ScenarioResult, width: int) -> Iterator[RenderableType]:
    verdict = scenario.verdict.value
    heading = _text(f"{scenario.id} {scenario.name}", "bold")
    heading.append(" · ")
    heading.append(verdict, _STYLES[verdict])
    yield heading
    yield _text(scenario.title)
    if scenario.reason:
        yield _text(scenario.reason)
    yield _text(f"{scenario.file}:{scenario.line}", "dim")
    shared = shared_parameters(scenario.cases)
    if shared:
        yield _text(f"all cases: {short_parameters(shared)}", "dim")
    yield ""
    groups = group_cases(scenario.cases)
    if groups:
        yield _cases(groups, width)
        yield ""
    for note in crash_notes(scenario.cases):
        yield from _crash(note)
    if scenario.claims:
        yield _text("Claims", "bold")
        yield _pairs(
            (claim.verdict.value, _STYLES[claim.verdict.value], _claim(claim)) for claim in scenario.claims
        )
        yield ""
    if scenario.conclusions:
        yield _text("Conclusions", "bold")
        for name, value in figures(without_records(scenario.conclusions)):
            yield _indented(_text(f"{name.replace('_', ' ')}: {value}"), _INDENT)
        for table in evidence_tables(scenario.conclusions):
            yield _indented(_text("\n".join([f"{table.name}:", *lines(table)]), lines=True), _INDENT)
        yield ""


def _cases(groups: tuple[Group, ...], width: int) -> Table:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    rows = [row for group in groups for row in group.rows]
    room = width - _VERDICT_WIDTH - 2 * _GAP
    figure = max(len("figure"), *(cell_len(row.figure) for row in rows))
    most = room - min(figure, _FIGURE_WIDTH)
    header, labels = _columns(rows)
    if max(map(cell_len, (header, *labels))) + _INDENT > most:
        header, labels = "", [row.label for row in rows]
    wanted = max(cell_len(text) + _INDENT for text in (header, *labels))
    first = min(most, max(wanted, *(cell_len(group.title) for group in groups)))

    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column(
        _text(" " * _INDENT + header if header else "case", lines=True), width=first, overflow="fold"
    )
    table.add_column("verdict", width=_VERDICT_WIDTH, no_wrap=True)
    table.add_column("figure", width=min(figure, room - first), overflow="fold")
    remaining = iter(labels)
    for group in groups:
        title = _text(group.title, "bold")
        single = len(group.rows) == 1 and not group.rows[0].label
        if not single:
            table.add_row(title)
        for row in group.rows:
            place = _indented(_text(next(remaining), lines=True), _INDENT)
            verdict = row.verdict.value
            table.add_row(title if single else place, _text(verdict, _STYLES[verdict]), _text(row.figure))
    return table


def _columns(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """The names of the parameters as a header line, and each row's values below them."""
    from rich.cells import cell_len, set_cell_size

    keys = list(dict.fromkeys(key for row in rows for key in row.parameters))
    texts = [[row.parameters.get(key, _NOTHING) for key in keys] for row in rows if row.cases == 1]
    widths = [max(map(cell_len, column)) for column in zip(keys, *texts, strict=True)]

    def line(cells: Iterable[str]) -> str:
        return "  ".join(set_cell_size(cell, size) for cell, size in zip(cells, widths, strict=True)).rstrip()

    lines = iter(texts)
    return line(keys), [row.label if row.cases > 1 else line(next(lines)) for row in rows]


def _crash(note: CrashNote) -> Iterator[RenderableType]:
    more = f" (and {note.others} more the same way)" if note.others else ""
    yield _text(f"died: {note.where}{more}", "bold")
    yield _indented(_text(f"{note.death}: {note.message}"), _INDENT)
    if note.stderr_tail:
        yield _indented(_text("last lines of its stderr:", "dim"), _INDENT)
        yield _indented(_text("\n".join(note.stderr_tail), lines=True), 2 * _INDENT)
    yield ""


def _indented(text: Text, columns: int) -> RenderableType:
    """Also the lines that it wraps into."""
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, columns))


def _claim(claim: ClaimResult) -> str:
    parts = (
        f"{one_line(claim.text)} ({one_line(claim.source)})",
        one_line(claim.reason or ""),
        short_evidence(without_records(claim.evidence)),  # the records are in the JSON and the Markdown
    )
    return "\n".join(part for part in parts if part)


def _pairs(rows: Iterable[tuple[str, str, str]]) -> Table:
    """A word that never breaks, and beside it text that wraps."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_VERDICT_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for word, style, text in rows:
        grid.add_row(_text(word, style), _text(text, lines=True))
    return grid


def _text(text: str, style: str = "", *, lines: bool = False) -> Text:
    """Cleaned text that rich takes as it is; on one line, unless it is to keep its `lines` and spaces."""
    from rich.text import Text

    return Text(clean(text) if lines else one_line(text), style=style, overflow="fold")
