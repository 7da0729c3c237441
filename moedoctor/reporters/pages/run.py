"""The page of a run: scenarios with their cases, claims and conclusions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moedoctor.reporters.page import (
    Block,
    Bullets,
    Heading,
    Item,
    Paragraph,
    Preformatted,
    Span,
    Table,
    evidence_tables,
    without_records,
)
from moedoctor.reporters.pages.machine import environment_table
from moedoctor.reporters.pages.replay import replay_page
from moedoctor.reporters.text import deciding_figure, figures, short_evidence, short_parameters
from moedoctor.results import CaseResult, CaseVerdict, ClaimResult, Report, Scalar, ScenarioResult
from moedoctor.text import clean, one_line


def run_page(report: Report, *, full: bool) -> list[Block]:
    """Return the page of `report`.

    `full` adds the environment and the records that claims are based on: too much for a terminal.
    """
    scenarios = [block for scenario in report.scenarios for block in _scenario(scenario, full=full)]
    # What matters most comes where a reader looks first: at the top of a file, at the end in a terminal.
    capsule = [] if report.capsule is None else replay_page(report.capsule, 2)
    if full:
        return [*capsule, *notes(report), *environment_table(report.environment), *scenarios]
    return [*scenarios, *capsule, *notes(report)]


def notes(report: Report, most: int | None = None) -> Iterator[Block]:
    """Give what is worse than the baseline, at most `most` of it, and whether the run was interrupted."""
    if report.findings:
        yield Heading("Against the baseline")
        yield from (Item("regression", text) for text in report.findings[:most])
    if left := len(report.findings[most:]) if most is not None else 0:
        yield Paragraph(f"{left} more; add -v for all")
    if report.summary.interrupted:
        yield Paragraph(Span("Interrupted: not every case ran.", "error"))


def _scenario(scenario: ScenarioResult, *, full: bool) -> Iterator[Block]:
    verdict = Span(scenario.verdict.value, scenario.verdict.value)
    yield Heading((Span(f"{scenario.id} {scenario.name}"), ": " if full else " · ", verdict))
    yield Paragraph(scenario.title)
    if scenario.reason:
        yield Paragraph((Span("Why: ", "bold"), scenario.reason) if full else scenario.reason)
    if full:
        yield Paragraph(f"Scenario file: {scenario.file}, line {scenario.line}")
    else:
        yield Paragraph(Span(f"{scenario.file}:{scenario.line}", "dim"))
    shared = shared_parameters(scenario.cases)
    if shared:
        yield Paragraph(Span(f"all cases: {short_parameters(shared)}", "dim"))
    if scenario.cases:
        yield _cases(scenario.cases, shared)
    yield from deaths(scenario.cases)
    if scenario.claims:
        yield Heading("Claims", 3)
        for claim in scenario.claims:
            yield claim_item(claim)
            if full:
                yield from evidence_tables(claim.evidence).values()
    if scenario.conclusions:
        yield Heading("Conclusions", 3)
        if lines := conclusion_lines(scenario):
            yield Bullets(lines)
        yield from evidence_tables(scenario.conclusions).values()


def conclusion_lines(scenario: ScenarioResult) -> list[str]:
    """Return what the cases say together, a line for each conclusion that is not a table."""
    words = figures(without_records(scenario.conclusions))
    return [f"{name.replace('_', ' ')}: {text}" for name, text in words]


def claim_item(claim: ClaimResult) -> Item:
    """Return a claim with its verdict, the reason and the figures."""
    title = (claim.text + " (", Span(claim.source, "source"), ")")
    lines = (claim.reason or "", short_evidence(without_records(claim.evidence)))
    return Item(claim.verdict.value, title, [("", line) for line in lines if line])


def _cases(cases: Sequence[CaseResult], shared: Mapping[str, Scalar]) -> Table:
    """Return one row a case; cases that were skipped for the same reason share a row."""
    groups: dict[str, list[CaseResult]] = {}
    for case in cases:
        groups.setdefault(place(case), []).append(case)
    rows = [
        (subject, label, Span(verdict.value, verdict.value), figure)
        for subject, members in groups.items()
        for label, verdict, figure in _rows(members, shared)
    ]
    return Table(("subject", "parameters", "verdict", "figure"), rows, grouped=True)


def place(case: CaseResult) -> str:
    """Return ``installed · kernel · cuda:0``."""
    return " · ".join((case.subject, case.tier.value, *(() if case.device == "cpu" else (case.device,))))


def _rows(
    cases: Sequence[CaseResult], shared: Mapping[str, Scalar]
) -> Iterator[tuple[str, CaseVerdict, str]]:
    """Give the parameters that vary, the verdict and what decides it."""
    skips: dict[str, int] = {}
    for case in cases:
        if case.verdict is CaseVerdict.SKIPPED:
            skips[deciding_figure(case)] = skips.get(deciding_figure(case), 0) + 1
    for case in cases:
        figure = deciding_figure(case)
        number = skips.pop(figure, 0) if case.verdict is CaseVerdict.SKIPPED else 1
        if number == 1:
            varying = {key: value for key, value in case.parameters.items() if key not in shared}
            yield short_parameters(varying), case.verdict, figure
        elif number:
            yield f"{number} cases", case.verdict, figure


def shared_parameters(cases: Sequence[CaseResult]) -> dict[str, Scalar]:
    """Return the parameters that have the same value in every case."""

    def has(case: CaseResult, key: str, value: Scalar) -> bool:
        # In Python True equals 1 and 1 equals 1.0; a reader tells them apart.
        return key in case.parameters and repr(case.parameters[key]) == repr(value)

    first = cases[0].parameters if cases else {}
    return {key: value for key, value in first.items() if all(has(case, key, value) for case in cases)}


@dataclass(frozen=True)
class CrashNote:
    """How a child died, and which cases died the same way."""

    where: str
    """The first of the cases."""
    others: int
    death: str
    message: str
    stderr_tail: tuple[str, ...]


def crash_notes(cases: Iterable[CaseResult]) -> tuple[CrashNote, ...]:
    """Return the deaths among the cases; those that look the same appear once, with their number."""
    deaths: dict[tuple[str, str, tuple[str, ...]], list[CaseResult]] = {}
    for case in cases:
        if "death" in case.evidence:
            tail = case.evidence.get("stderr_tail") or ()
            lines = [tail] if isinstance(tail, str) else [str(line) for line in tail]
            cleaned = tuple(part for line in lines for part in clean(line).split("\n"))
            death = one_line(str(case.evidence["death"])).replace("_", " ")
            message = one_line(str(case.evidence.get("message", "")))
            deaths.setdefault((death, message, cleaned), []).append(case)
    return tuple(
        CrashNote(_where(members[0]), len(members) - 1, death, message, tail)
        for (death, message, tail), members in deaths.items()
    )


def _where(case: CaseResult) -> str:
    words = (one_line(case.subject), case.tier.value, short_parameters(case.parameters))
    return " ".join(filter(None, words))


def deaths(cases: Iterable[CaseResult]) -> Iterator[Block]:
    """Give how children died, with their last words."""
    for note in crash_notes(cases):
        yield from _crash(note)


def _crash(note: CrashNote) -> Iterator[Block]:
    more = f" (and {note.others} more the same way)" if note.others else ""
    yield Paragraph((Span("Died: ", "bold"), f"{note.where}{more}: {note.death}: {note.message}"))
    if note.stderr_tail:
        yield Preformatted("\n".join(note.stderr_tail))
