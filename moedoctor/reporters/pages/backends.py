"""The page of `moedoctor backends`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moedoctor.diagnose.settings.tables import SettingFinding
from moedoctor.fixes.backends import Selection
from moedoctor.fixes.backends.requests import Request
from moedoctor.reporters.page import Block, Heading, Paragraph, Span, Step, Table, Text, list_section
from moedoctor.reporters.text import count_of
from moedoctor.text import shorten


@dataclass(frozen=True)
class OneScheme(Selection):
    """The selection of vLLM for one scheme, and what else `moedoctor backends` was asked."""

    command: ClassVar[str] = "backends"
    request: Request | None
    """The backend that --backend asked about."""
    settings: tuple[SettingFinding, ...]
    disagreements: tuple[str, ...]
    """Differences between the installed vLLM and the tables."""
    notes: tuple[str, ...]
    exit_code: int
    instead_of: str = field(default="", metadata={"sparse": True})
    """The reason why the release is another than the one that was asked for or is installed."""


@dataclass(frozen=True)
class EachScheme:
    """The selection of vLLM for each scheme that the experts may have."""

    command: ClassVar[str] = "backends"
    release: str
    capability: str
    scheme: None
    schemes: tuple[Selection, ...]
    request: tuple[str, ...] | None
    """For each scheme, whether the backend that --backend names would work."""
    settings: tuple[SettingFinding, ...]
    notes: tuple[str, ...]
    exit_code: int
    instead_of: str = field(default="", metadata={"sparse": True})


BackendsDocument = OneScheme | EachScheme


def list_reasons(report: BackendsDocument) -> list[str]:
    """Return why the answer is not what was asked for; the exit code is 1 exactly if there is a reason."""
    if isinstance(report, EachScheme):
        return list_dead_settings(report.settings)
    asked = report.request
    return [
        *list_dead_settings(report.settings),
        *(f"the installed vLLM disagrees with the tables: {text}" for text in report.disagreements),
        *([describe_outcome(report)] if report.chosen is None else []),
        *([f"{asked.backend} would not work: {asked.reason}"] if asked and not asked.works else []),
    ]


def list_dead_settings(settings: Sequence[SettingFinding]) -> list[str]:
    """Return a line for each setting that does not take effect."""
    return [describe_setting(finding) for finding in settings if not finding.takes_effect]


def list_unconsidered(settings: Sequence[SettingFinding]) -> str:
    """Return the names of the settings that the answer does not consider, in one line."""
    return ", ".join(finding.name for finding in settings if finding.problem == "not_considered")


def make_backends_page(report: BackendsDocument) -> list[Block]:
    """Return what is selected, a row for each candidate or scheme, and then what was found about settings."""
    page = _show_each_scheme(report) if isinstance(report, EachScheme) else _show_one_scheme(report)
    return [*([Paragraph(Span(report.instead_of, "warning"))] if report.instead_of else []), *page]


def summarize(report: BackendsDocument) -> str:
    """Return what is selected, as ``nvfp4: MARLIN · fp8: none`` for several schemes, and what is left out."""
    if isinstance(report, EachScheme):
        outcome = " · ".join(f"{each.scheme}: {each.chosen or 'none'}" for each in report.schemes)
    else:
        outcome = describe_outcome(report)
    left_out = list_unconsidered(report.settings)
    return f"{outcome}; not considered: {left_out}" if left_out else outcome


def _show_one_scheme(report: OneScheme) -> list[Block]:
    asked, dead = report.request, list_dead_settings(report.settings)
    page = [_show_question(report, report.scheme), Paragraph(Span(summarize(report), "bold"))]
    if asked:
        works = "would work" if asked.works else "would not work"
        how = f"ask for it with {asked.how}" if asked.how else "this release has no flag or variable for it"
        page.append(Paragraph(f"{asked.backend} {works}: {asked.reason}; {how}"))
    if dead:
        page.append(Paragraph(f"{count_of(len(dead), 'setting')} without effect, see below"))
    rows: list[tuple[Text, ...]] = []
    for candidate in report.candidates:
        sign = "*" if candidate.chosen else "+" if candidate.supported else "-"
        flag = Span(f"--moe-backend {candidate.flag}" if candidate.flag else "", "code")
        rows.append((sign, candidate.backend, flag, candidate.reason))
    page += [
        Table(("sign", "backend", "ask for it with", "why"), rows),
        Paragraph("Signs: * is selected, + would work, - would not work."),
        Paragraph(f"Order: {report.source}"),
        *_show_details(report.settings, report.notes, report.disagreements),
    ]
    if asked and asked.works and asked.how:
        page.append(Step(f"ask for {asked.backend} with {asked.how}"))
    return [*page, *_suggest_settings(report.settings), *_suggest_preflight(report)]


def _show_each_scheme(report: EachScheme) -> list[Block]:
    asked = report.request or ()
    rows = [
        (each.scheme, each.chosen or "none", _explain_scheme(each), *((answer,) if asked else ()))
        for each, answer in zip(report.schemes, asked or [""] * len(report.schemes), strict=True)
    ]
    return [
        _show_question(report.schemes[0]),
        Paragraph(Span("it depends on how the experts are quantized, which is not known here", "bold")),
        Paragraph(summarize(report)),
        Table(("if they are", "vLLM selects", "why", *(("asked about",) if asked else ())), rows),
        *_show_details(report.settings, report.notes),
        *_suggest_settings(report.settings),
        *_suggest_preflight(report),
        Step("say how the experts are quantized: --scheme, or a server's command line after --"),
    ]


def _show_question(selection: Selection, scheme: str = "") -> Block:
    gpu = f"compute capability {selection.capability}"
    parts = (f"vLLM {selection.release}", gpu, scheme, selection.parallel, selection.activation)
    return Heading(" · ".join(filter(None, parts)), 1)


def _show_details(
    settings: Sequence[SettingFinding], notes: Sequence[str], disagreements: Sequence[str] = ()
) -> Iterator[Block]:
    yield from list_section("Settings", list(map(describe_setting, settings)), 3)
    yield from list_section("The installed vLLM disagrees with the tables", disagreements, 3)
    yield from list_section("Notes", notes, 3)


def _suggest_settings(settings: Sequence[SettingFinding]) -> list[Step]:
    return [Step(f"use {each.instead} instead of {each.setting}") for each in settings if each.instead]


def _suggest_preflight(report: BackendsDocument) -> Iterator[Step]:
    if left_out := list_unconsidered(report.settings):
        command = Span(f"moedoctor preflight --sm {report.capability} -- vllm serve …", "code")
        more = f" with the same command line: it asks the code of vLLM itself, which considers {left_out}"
        yield Step(("run ", command, f"{more}; without vLLM here, name its wheel with --wheel"))


def _explain_scheme(selection: Selection) -> str:
    """Return why, for a scheme that the experts may not have: nothing is said of a server that stops."""
    if selection.chosen is not None:
        return selection.decided_by
    return (selection.error or "").partition(": ")[2] or "no backend of this release computes such layers"


def describe_outcome(selection: Selection) -> str:
    """Return the result of a selection in one line."""
    if selection.chosen is None:
        return selection.error or "no backend"
    return f"{selection.chosen} is selected ({selection.decided_by})"


def describe_setting(finding: SettingFinding) -> str:
    """Return one finding in one line."""
    kind = finding.problem.replace("_", " ")
    better = f"; use {finding.instead}" if finding.instead else ""
    where = f" [{finding.source}]" if finding.source else ""
    return f"{shorten(finding.setting, 120)}: {kind}: {finding.message}{better}{where}"
