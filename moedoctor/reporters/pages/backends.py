"""The page of `moedoctor backends`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import moedoctor
from moedoctor.diagnose.settings.tables import SettingFinding
from moedoctor.fixes.backends import Selection
from moedoctor.fixes.backends.requests import Request
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Span, Step, Table, Text

_SELECTION = tuple(field.name for field in fields(Selection))


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
    values = asdict(report)
    head = {"moedoctor": values.pop("version"), "command": "backends"}
    return {**head, **values.pop("selection"), **values}


def shown(document: Mapping[str, Any]) -> tuple[list[Block], str]:
    """Return the page and the summary of what `backends_document` or `schemes_document` wrote.

    Its selections, candidates, settings and its request are records.
    """
    settings, notes = tuple(document["settings"]), tuple(document["notes"])
    if schemes := document.get("schemes"):
        return schemes_page(schemes, settings, notes, document["request"] or ()), schemes_line(schemes)
    selection = Selection(**{name: document[name] for name in _SELECTION})
    disagreements = tuple(document.get("disagreements", ()))
    report = BackendsReport(selection, document["request"], settings, disagreements, notes, 0)
    return backends_page(report), outcome(selection)


def reasons(report: BackendsReport) -> list[str]:
    """Return why the answer is not what was asked for; the exit code is 1 exactly if there is a reason."""
    asked = report.request
    return [
        *dead_settings(report.settings),
        *(f"the installed vLLM disagrees with the tables: {text}" for text in report.disagreements),
        *([outcome(report.selection)] if report.selection.chosen is None else []),
        *([f"{asked.backend} would not work: {asked.reason}"] if asked and not asked.works else []),
    ]


def dead_settings(settings: Sequence[SettingFinding]) -> list[str]:
    """Return a line for each setting that does not take effect."""
    return [setting_line(finding) for finding in settings if not finding.takes_effect]


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
        Heading(" · ".join(question), 1),
        Paragraph(Span(outcome(selection), "bold")),
        Table(("sign", "backend", "ask for it with", "why"), rows),
        Paragraph("Signs: * is selected, + would work, - would not work."),
        Paragraph(f"Order: {selection.source}"),
    ]
    for title, lines in _sections(report):
        page += [Heading(title, 3), Bullets(lines)]
    asked = report.request
    if asked and asked.works and asked.how:
        page.append(Step(f"ask for {asked.backend} with {asked.how}"))
    return [*page, *_better_settings(report.settings)]


def _better_settings(settings: Sequence[SettingFinding]) -> list[Step]:
    return [Step(f"use {each.instead} instead of {each.setting}") for each in settings if each.instead]


def schemes_page(
    selections: Sequence[Selection],
    settings: Sequence[SettingFinding],
    notes: Sequence[str],
    asked: Sequence[str] = (),
) -> list[Block]:
    """Return what is selected for each scheme that the experts may have.

    `asked` holds for each of them whether the backend that --backend names would work.
    """
    first = selections[0]
    question = (
        f"vLLM {first.release}",
        f"compute capability {first.capability}",
        first.parallel,
        first.activation,
    )
    more = asked or [""] * len(selections)
    rows = [
        (each.scheme, each.chosen or "none", _why(each), *((answer,) if asked else ()))
        for each, answer in zip(selections, more, strict=True)
    ]
    page: list[Block] = [
        Heading(" · ".join(question), 1),
        Paragraph(Span("it depends on how the experts are quantized, which is not known here", "bold")),
        Table(("if they are", "vLLM selects", "why", *(("asked about",) if asked else ())), rows),
    ]
    if settings:
        page += [Heading("Settings", 3), Bullets([setting_line(finding) for finding in settings])]
    page += [Heading("Notes", 3), Bullets(list(notes)), *_better_settings(settings)]
    return [*page, Step("say how the experts are quantized: --scheme, or a server's command line after --")]


def schemes_line(selections: Sequence[Selection]) -> str:
    """Return ``nvfp4: MARLIN · fp8: none``."""
    return " · ".join(f"{each.scheme}: {each.chosen or 'none'}" for each in selections)


def _why(selection: Selection) -> str:
    """Return why, for a scheme that the experts may not have: nothing is said of a server that stops."""
    if selection.chosen is not None:
        return selection.decided_by
    return (selection.error or "").partition(": ")[2] or "no backend of this release computes such layers"


def schemes_document(
    selections: Sequence[Selection],
    settings: Sequence[SettingFinding],
    notes: Sequence[str],
    code: int,
    asked: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON document of an answer for several schemes."""
    return {
        "moedoctor": moedoctor.__version__,
        "command": "backends",
        "release": selections[0].release,
        "capability": selections[0].capability,
        "scheme": None,
        "schemes": [asdict(selection) for selection in selections],
        "request": list(asked) or None,
        "settings": [asdict(finding) for finding in settings],
        "notes": list(notes),
        "exit_code": code,
    }


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
