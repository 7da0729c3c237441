"""The page of `moedoctor backends`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moedoctor.diagnose.settings.tables import SettingFinding
from moedoctor.fixes.backends import Selection
from moedoctor.fixes.backends.requests import Request
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Span, Table, Text


@dataclass(frozen=True)
class BackendsReport:
    """Everything that `moedoctor backends` answers."""

    selection: Selection
    request: Request | None
    """The backend that --backend asked about."""
    settings: tuple[SettingFinding, ...]
    disagreements: tuple[str, ...]
    """Differences between the installed vLLM and the tables."""
    notes: tuple[str, ...]
    exit_code: int
    version: str = ""
    """moedoctor's own."""


def backends_document(report: BackendsReport) -> dict[str, Any]:
    """Return the JSON document."""
    fields = asdict(report)
    head = {"moedoctor": fields.pop("version"), "command": "backends"}
    return {**head, **fields.pop("selection"), **fields}


def backends_page(report: BackendsReport) -> list[Block]:
    """Return the selection, a row for each candidate, and what was found about settings."""
    selection = report.selection
    question = (
        f"vLLM {selection.release}",
        f"compute capability {selection.capability}",
        selection.scheme,
        selection.parallel,
        selection.activation,
    )
    rows: list[tuple[Text, ...]] = [
        (
            "*" if candidate.chosen else "+" if candidate.supported else "-",
            candidate.backend,
            Span(f"--moe-backend {candidate.flag}" if candidate.flag else "", "code"),
            candidate.reason,
        )
        for candidate in selection.candidates
    ]
    page: list[Block] = [
        Heading(" · ".join(question)),
        Paragraph(Span(outcome(selection), "bold")),
        Table(("", "backend", "ask for it with", "why"), rows),
        Paragraph("Signs: * is selected, + would work, - would not work."),
        Paragraph(f"Order: {selection.source}"),
    ]
    for title, lines in _sections(report):
        page += [Heading(title, 3), Bullets(lines)]
    return page


def outcome(selection: Selection) -> str:
    """Return the result of a selection in one line."""
    if selection.chosen is None:
        return selection.error or "no backend"
    return f"{selection.chosen} is selected ({selection.decided_by})"


def _sections(report: BackendsReport) -> list[tuple[str, Sequence[str]]]:
    sections: list[tuple[str, Sequence[str]]] = []
    if report.request is not None:
        asked = report.request
        works = "would work" if asked.works else "would not work"
        how = f"ask for it with {asked.how}" if asked.how else "this release has no flag or variable for it"
        sections.append(("Asked about", [f"{asked.backend} {works}: {asked.reason}; {how}"]))
    if report.settings:
        sections.append(("Settings", [setting_line(finding) for finding in report.settings]))
    if report.disagreements:
        sections.append(("The installed vLLM disagrees with the tables", report.disagreements))
    if report.notes:
        sections.append(("Notes", report.notes))
    return sections


def setting_line(finding: SettingFinding) -> str:
    """Return one finding in one line."""
    kind = finding.problem.replace("_", " ")
    better = f"; use {finding.instead}" if finding.instead else ""
    where = f" [{finding.source}]" if finding.source else ""
    return f"{finding.setting}: {kind}: {finding.message}{better}{where}"
