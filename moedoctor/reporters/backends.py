"""A backend selection as a table, JSON or Markdown."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.diagnose.settings.tables import SettingFinding
from moedoctor.fixes.backends import Selection
from moedoctor.fixes.backends.requests import Request
from moedoctor.reporters.markdown import escape
from moedoctor.reporters.text import one_line
from moedoctor.results import SCHEMA_VERSION, plain

FORMATS = ("table", "json", "markdown")


@dataclass(frozen=True)
class BackendsReport:
    """What `moedoctor backends` found."""

    selection: Selection
    request: Request | None
    """The backend that --backend asked about."""
    settings: tuple[SettingFinding, ...]
    disagreements: tuple[str, ...]
    """Where the installed vLLM says other than the tables."""
    notes: tuple[str, ...]
    exit_code: int
    version: str = ""
    """moedoctor's own."""


def render(report: BackendsReport, format: str, *, width: int | None = None) -> str:
    """The report in one of `FORMATS`; the table wraps at `width` columns where that is given."""
    if format == "json":
        return backends_json(report)
    return _markdown(report) if format == "markdown" else _table(report, width)


def backends_json(report: BackendsReport) -> str:
    """The report as JSON, its only machine-readable form."""
    fields: dict[str, Any] = dataclasses.asdict(report)
    selection: Mapping[str, Any] = fields.pop("selection")
    head = {"schema_version": SCHEMA_VERSION, "moedoctor": fields.pop("version"), "command": "backends"}
    data = plain({**head, **selection, **fields})
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def heading(selection: Selection) -> str:
    """Which question this answers, in one line."""
    return (
        f"vLLM {selection.release} · compute capability {selection.capability} · {selection.scheme} · "
        f"{selection.parallel} · {selection.activation}"
    )


def outcome(selection: Selection) -> str:
    """What comes of it, in one line."""
    if selection.chosen is None:
        return selection.error or "no backend"
    return f"{selection.chosen} is selected ({selection.decided_by})"


def rows(selection: Selection) -> list[tuple[str, str, str, str]]:
    """(mark, backend, how to ask for it, reason), one row a candidate."""
    return [
        (
            "*" if one.chosen else ("+" if one.supported else "-"),
            one.backend,
            f"--moe-backend {one.flag}" if one.flag else "",
            one.reason,
        )
        for one in selection.candidates
    ]


def _table(report: BackendsReport, columns: int | None) -> str:
    head = ("", "backend", "ask for it with", "why")
    body = rows(report.selection)
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(3)]
    lines = _wrapped(heading(report.selection), columns, 4)
    lines += [*_wrapped(one_line(outcome(report.selection)), columns, 4), ""]
    for row in [head, *body]:
        cells = [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
        lines += _wrapped("  ".join(cells).rstrip(), columns, sum(widths) + 2 * len(widths))
    lines += ["", "* selected   + would work   - would not"]
    lines += [f"order: {report.selection.source}"]
    for title, entries in _sections(report):
        lines += ["", f"{title}:"]
        lines += [line for entry in entries for line in _wrapped(f"  {one_line(entry)}", columns, 4)]
    return "\n".join(lines) + "\n"


def _wrapped(line: str, columns: int | None, hang: int) -> list[str]:
    """`line` in lines of at most `columns`, the further ones from column `hang` on."""
    if columns is None or len(line) <= columns:
        return [line]
    indent = " " * (hang if hang < columns - 20 else 4)
    first = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        max(columns, 40),
        initial_indent=first if line.startswith(" ") else "",
        subsequent_indent=indent,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def _markdown(report: BackendsReport) -> str:
    lines = [f"## {escape(heading(report.selection))}", "", f"**{escape(outcome(report.selection))}**", ""]
    lines += ["| | backend | ask for it with | why |", "|---|---|---|---|"]
    for mark, backend, flag, reason in rows(report.selection):
        asked = f"`{flag}`" if flag else ""
        lines.append(f"| {escape(mark)} | {escape(backend)} | {asked} | {escape(reason)} |")
    lines += ["", "`*` selected, `+` would work, `-` would not. Order: " + escape(report.selection.source)]
    for title, entries in _sections(report):
        lines += ["", f"### {title}", "", *(f"- {escape(entry)}" for entry in entries)]
    return "\n".join(lines) + "\n"


def _sections(report: BackendsReport) -> list[tuple[str, Sequence[str]]]:
    found: list[tuple[str, Sequence[str]]] = []
    if report.request is not None:
        asked = report.request
        works = "would work" if asked.works else "would not work"
        how = (
            f"; ask for it with {asked.how}" if asked.how else "; this release has no flag or variable for it"
        )
        found.append(("Asked about", (f"{asked.backend} {works}: {asked.reason}{how}",)))
    if report.settings:
        found.append(("Settings", [setting_line(one) for one in report.settings]))
    if report.disagreements:
        found.append(("The installed vLLM disagrees with the tables", report.disagreements))
    if report.notes:
        found.append(("Notes", report.notes))
    return found


def setting_line(finding: SettingFinding) -> str:
    """One finding in one line."""
    kind = finding.problem.replace("_", " ")
    better = f"; use {finding.instead}" if finding.instead else ""
    where = f" [{finding.source}]" if finding.source else ""
    return one_line(f"{finding.setting}: {kind}: {finding.message}{better}{where}")
