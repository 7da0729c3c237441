"""The page of a run in HTML: the answer, a row for each failure, then every case with its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from moedoctor.reporters.page import (
    Answer,
    Block,
    Bullets,
    Fold,
    Heading,
    Page,
    Paragraph,
    Preformatted,
    Span,
    Table,
    evidence_tables,
    without_records,
)
from moedoctor.reporters.pages.machine import environment_table, origin_table
from moedoctor.reporters.pages.run import (
    claim_item,
    conclusion_lines,
    deaths,
    notes,
    place,
    shared_parameters,
)
from moedoctor.reporters.pages.run_summary import next_steps, overview, rank, three_answers
from moedoctor.reporters.text import (
    count_of,
    deciding_figure,
    environment_line,
    figures,
    short_parameters,
    summary_line,
)
from moedoctor.results import CaseResult, Report, Scalar, ScenarioResult, plain

_WRONG = ("found", "failed", "error")


def html_page(report: Report) -> list[Block]:
    """Return the whole page; scenarios where something is wrong come first, and are open."""
    scenarios = sorted(report.scenarios, key=rank)
    cases = sum(len(scenario.cases) for scenario in scenarios)
    counts = f"{count_of(len(scenarios), 'scenario')}, {count_of(cases, 'case')}"
    looked_at = [environment_line(report), counts]
    found = [summary_line(report), *three_answers(scenarios), *(report.summary.reasons or ())]
    return [
        Heading(f"moedoctor {report.version}: {report.command}", 1),
        Answer(looked_at, found, list(next_steps(report, short=False))),
        *notes(report),
        *([overview(scenarios)] if scenarios else []),
        *(_scenario(scenario, alone=len(scenarios) == 1) for scenario in scenarios),
        *origin_table(report.origin),
        *environment_table(report.environment),
    ]


def _scenario(scenario: ScenarioResult, *, alone: bool) -> Fold:
    verdict = Span(scenario.verdict.value, scenario.verdict.value)
    title = (Span(f"{scenario.id} {scenario.name}"), " ", verdict)
    return Fold(title, list(_blocks(scenario)), open=alone or scenario.verdict.value in _WRONG)


def _blocks(scenario: ScenarioResult) -> Iterator[Block]:
    yield Paragraph(scenario.title)
    if scenario.reason:
        yield Paragraph((Span("Why: ", "bold"), scenario.reason))
    yield Paragraph(Span(f"{scenario.file}, line {scenario.line}", "dim"))
    shared = shared_parameters(scenario.cases)
    if shared:
        yield Paragraph(Span(f"all cases: {short_parameters(shared)}", "dim"))
    if scenario.cases:
        yield _cases(scenario.cases, shared)
    yield from deaths(scenario.cases)
    if scenario.claims:
        yield Heading("Claims", 3)
        yield from map(claim_item, scenario.claims)
        for claim in scenario.claims:
            for table in evidence_tables(claim.evidence).values():
                yield Fold(claim.text, [table])
    if scenario.conclusions:
        yield Heading("Conclusions", 3)
        if lines := conclusion_lines(scenario):
            yield Bullets(lines)
        yield from evidence_tables(scenario.conclusions).values()


def _cases(cases: Sequence[CaseResult], shared: Mapping[str, Scalar]) -> Table:
    """Return one row for cases of one subject that show the same, with their evidence behind a click."""
    groups: dict[str, list[CaseResult]] = {}
    for case in cases:
        same = (place(case), case.verdict, case.figure, case.reason, case.evidence)
        groups.setdefault(json.dumps(plain(same), sort_keys=True), []).append(case)
    rows, behind = [], []
    for members in groups.values():
        first = members[0]
        labels = [
            short_parameters({key: value for key, value in case.parameters.items() if key not in shared})
            for case in members
        ]
        label = labels[0]
        if len(members) > 1:
            label = f"{len(members)} cases" + (f", such as {labels[0]}" if any(labels) else "")
        verdict = Span(first.verdict.value, first.verdict.value)
        rows.append((place(first), label, verdict, deciding_figure(first)))
        behind.append(_evidence(first, labels))
    return Table(("subject", "parameters", "verdict", "figure"), rows, behind=behind)


def _evidence(case: CaseResult, labels: Sequence[str]) -> Page:
    """Return what is behind a row; `labels` are the parameters of the cases that share it."""
    blocks: list[Block] = []
    if case.reason and case.reason != deciding_figure(case):
        blocks.append(Paragraph(case.reason))
    evidence = {name: value for name, value in plain(case.evidence).items() if name != "stderr_tail"}
    if lines := list(figures(without_records(evidence))):
        blocks.append(Table(("evidence", "value"), lines))
    blocks += evidence_tables(evidence).values()
    if tail := case.evidence.get("stderr_tail"):
        blocks.append(Preformatted(tail if isinstance(tail, str) else "\n".join(map(str, tail))))
    if len(labels) > 1 and any(labels):
        blocks.append(Bullets([label or "no parameters" for label in labels]))
    return blocks
