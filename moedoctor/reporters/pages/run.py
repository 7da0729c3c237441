"""The page of a run, which every format renders: the answer first, then each failure, the worst first.

A run answers three questions, and they are kept apart: did our restatement show the failure (the control),
does our fix remove it, and is the installed vLLM or FlashInfer affected, clean, or not tested.
"""

from __future__ import annotations

import enum
import json
import re
import shlex
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moedoctor.entries import load_entries
from moedoctor.reporters.page import (
    Block,
    Bullets,
    Fold,
    Heading,
    Item,
    Page,
    Paragraph,
    Preformatted,
    Span,
    Step,
    Table,
    make_evidence_tables,
    omit_records,
)
from moedoctor.reporters.pages.replay import replay_page
from moedoctor.reporters.text import (
    count_of,
    explain_case,
    format_evidence,
    format_parameters,
    list_figures,
    summarize,
)
from moedoctor.results import (
    UNKNOWN_CAUSE,
    VERDICTS,
    CaseResult,
    CaseVerdict,
    ClaimResult,
    ClaimVerdict,
    Report,
    Scalar,
    ScenarioResult,
    ScenarioVerdict,
    to_plain,
)
from moedoctor.text import clean, join_lines

AFFECTED, CLEAN, NOT_TESTED = "affected", "clean", "not tested"

_ROLES = {"faulty": "control", "fixed": "our fix"}
_LISTED = 8
_REGRESSIONS = 20
_OTHER_COMMANDS = ("moedoctor lint CHECKPOINT", "moedoctor check")
"""The commands that look for a failure without running it; the last looks for every one."""
_NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
_REGRESSION = "worse than the baseline: "
"""The beginning of the gate's reason for a regression, which the page lists by itself."""
_NO_CASE = "the scenario has no case for it"


class Detail(enum.IntEnum):
    """The amount of each scenario that a page has."""

    SHORT = 0
    """Cases that differ in numbers only share a row; claims that were tested."""
    CASES = 1
    """Every case and every claim."""
    RECORDS = 2
    """The records that claims are based on, too: too much for a terminal."""
    EVIDENCE = 3
    """The evidence of each case behind its row, too: only for HTML. Cases with the same evidence share it."""


def run_page(report: Report, detail: Detail, *, items: int | None = None) -> list[Block]:
    """Return the page of `report`. With `items`, so many scenarios have a few lines each, the others none."""
    ordered = sorted(report.scenarios, key=_order)
    left = [scenario for scenario in ordered if scenario.unfinished]
    scenarios = [scenario for scenario in ordered if scenario not in left or _has_run(scenario)]
    page: list[Block] = [
        Heading(f"moedoctor {report.version}: {report.command}", 1),
        Bullets(list_answers(report)),
        *map(Step, _suggest_steps(report, ordered)),
        *_show_regressions(report, _REGRESSIONS if detail is Detail.SHORT else None),
        *([_show_overview(scenarios)] if scenarios else []),
        *([] if report.summary.interrupted else _show_unfinished(left)),
        *([] if report.capsule is None else replay_page(report.capsule, 2)),
    ]
    if items is None:
        alone = len(scenarios) == 1
        return [*page, *(_show_scenario(scenario, detail, alone=alone) for scenario in scenarios)]
    page += map(_make_item, scenarios[:items])
    if more := len(scenarios[items:]):
        page.append(Paragraph(Span(f"{count_of(more, 'failure')} more without details here", "dim")))
    return page


def list_answers(report: Report) -> list[str]:
    """Return what was found: the counts, the three answers, each named release, and why the run failed."""
    reasons = [text for text in report.summary.reasons or () if not text.startswith(_REGRESSION)]
    more = len(reasons) - _LISTED
    found = [summarize(report)]
    if report.scenarios:
        found += _give_three_answers(sorted(report.scenarios, key=_order))
    if left := [scenario for scenario in report.scenarios if scenario.unfinished]:
        found.append(_summarize_unfinished(left))
    found += [f"exit code {report.summary.exit_code}: {join_lines(text)}" for text in reasons[:_LISTED]]
    return [*found, *([f"{count_of(more, 'more reason')} for the exit code"] if more > 0 else [])]


def _give_three_answers(scenarios: Sequence[ScenarioResult]) -> Iterator[str]:
    """Give what control, fix and the installed release show, then each named release."""
    controls = [scenario for scenario in scenarios if _list_run_cases(scenario, "faulty")]
    shown = [scenario for scenario in controls if _shows(scenario, "faulty")]
    yield (
        f"The control, our restatement of the failure, shows it in {len(shown)} of "
        f"{count_of(len(controls), 'scenario')}" + _name_exceptions(controls, shown)
    )
    fixes = [each for each in shown if _list_run_cases(each, "fixed") and not _is_unfinished(each, "fixed")]
    removed = [scenario for scenario in fixes if _is_clean(scenario, "fixed")]
    doubts = [
        f"; {each.id}: {each.conclusions[UNKNOWN_CAUSE]}"
        for each in removed
        if UNKNOWN_CAUSE in each.conclusions
    ]
    exceptions = _name_exceptions(fixes, removed)
    yield f"Our fix removes it in {len(removed)} of {len(fixes)}{exceptions}{''.join(doubts)}"
    places: dict[str, list[ScenarioResult]] = {AFFECTED: [], CLEAN: [], NOT_TESTED: []}
    for scenario in scenarios:
        places[find_installed_answer(scenario)].append(scenario)
    affected, unaffected, unseen = places.values()
    if len(unseen) == len(scenarios):
        yield f"Your vLLM was not tested{_explain_untested(unseen)}"
    else:
        left = f"; not tested for {len(unseen)}{_explain_untested(unseen)}" if unseen else ""
        yield f"Your vLLM, with its FlashInfer: {_count('affected by', affected)}, " + (
            f"{_count('clean of', unaffected)}{left}"
        )
    subjects = dict.fromkeys(case.subject for each in scenarios for case in each.cases if "@" in case.subject)
    for subject in list(subjects)[:_LISTED]:
        shows = [scenario for scenario in scenarios if _shows(scenario, subject)]
        unaffected = [scenario for scenario in scenarios if _is_clean(scenario, subject)]
        yield f"{subject}: {_count('affected by', shows)}, {_count('clean of', unaffected)}"
    if len(subjects) > _LISTED:
        yield f"{len(subjects) - _LISTED} more releases, below"


def find_installed_answer(scenario: ScenarioResult) -> str:
    """Return whether the installed release is `AFFECTED`, `CLEAN` or `NOT_TESTED`.

    It is clean only if every case that can run here ran and is clean: any other hides its answer.
    """
    verdicts = Counter(case.verdict for case in scenario.cases if case.subject == "installed")
    if verdicts[CaseVerdict.REPRODUCED]:
        return AFFECTED
    hidden = verdicts[CaseVerdict.ERROR] or _is_unfinished(scenario, "installed")
    return CLEAN if verdicts[CaseVerdict.CLEAN] and not hidden else NOT_TESTED


def _order(scenario: ScenarioResult) -> tuple[bool, int, str, str]:
    """Return what sorts the worst scenarios first."""
    affected = any(case.affected for case in scenario.cases)
    return not affected, -VERDICTS[scenario.verdict].rank, scenario.id, scenario.name


def _is_unfinished(scenario: ScenarioResult, subject: str) -> bool:
    return scenario.unfinished is not None and subject in scenario.unfinished.cases


def _has_run(scenario: ScenarioResult) -> bool:
    """Return True if anything of a scenario ran, so that there is something to show."""
    cases = any(case.verdict is not CaseVerdict.SKIPPED for case in scenario.cases)
    return cases or any(map(_is_tested, scenario.claims))


def _list_run_cases(scenario: ScenarioResult, subject: str) -> list[CaseResult]:
    skipped = CaseVerdict.SKIPPED
    return [case for case in scenario.cases if case.subject == subject and case.verdict is not skipped]


def _shows(scenario: ScenarioResult, subject: str) -> bool:
    return any(case.verdict is CaseVerdict.REPRODUCED for case in _list_run_cases(scenario, subject))


def _is_clean(scenario: ScenarioResult, subject: str) -> bool:
    clean = {case.verdict for case in _list_run_cases(scenario, subject)} == {CaseVerdict.CLEAN}
    return clean and not _is_unfinished(scenario, subject)


def _name_exceptions(scenarios: Sequence[ScenarioResult], right: Sequence[ScenarioResult]) -> str:
    left = [scenario for scenario in scenarios if scenario not in right]
    return f"; not in {_join_ids(left)}" if left else ""


def _count(words: str, scenarios: Sequence[ScenarioResult]) -> str:
    return f"{words} {len(scenarios)}" + (f" ({_join_ids(scenarios)})" if scenarios else "")


def _join_ids(scenarios: Sequence[ScenarioResult]) -> str:
    ids = list(dict.fromkeys(join_lines(scenario.id) for scenario in scenarios))
    return ", ".join(ids[:_LISTED]) + (f", … {len(ids)} in all" if len(ids) > _LISTED else "")


def _explain_untested(scenarios: Sequence[ScenarioResult]) -> str:
    """Return the two most frequent reasons why the installed release was not tested."""

    def find_reason(scenario: ScenarioResult) -> str:
        cases = [case for case in scenario.cases if case.subject == "installed"]
        given = (join_lines(case.reason) for case in cases if case.reason)
        return next(given, "no reason" if cases else _NO_CASE)

    reasons = Counter(map(find_reason, scenarios))
    common = [f"{reason} ({number})" for reason, number in reasons.most_common(2)]
    more = [count_of(len(reasons) - 2, "other reason")] if len(reasons) > 2 else []
    return f": {'; '.join((*common, *more))}"


def _suggest_steps(report: Report, scenarios: Sequence[ScenarioResult]) -> Iterator[str]:
    affected = [scenario for scenario in scenarios if any(case.affected for case in scenario.cases)]
    if affected:
        id = join_lines(affected[0].id)
        yield f"`moedoctor explain {id}` says what to do today about the first failure"
    broken = [
        scenario
        for scenario in scenarios
        if VERDICTS[scenario.verdict].wrong and scenario.verdict is not ScenarioVerdict.FOUND
    ]
    if broken:
        # Another file of a known failure has other cases than the one that comes with moedoctor.
        ours = broken[0].file == f"scenarios/{broken[0].name}.yaml"
        name = broken[0].id if ours else shlex.quote(broken[0].file)
        yield f"`moedoctor run {join_lines(name)} -v` shows the cases of the first scenario that went wrong"
    if report.findings:
        yield "`moedoctor compare BASELINE REPORT` compares the two reports figure by figure"
    if any(scenario.unfinished for scenario in scenarios):
        yield "`moedoctor run --thorough` runs everything, and `moedoctor run ID` everything of one failure"
    yield from _suggest_other_commands(scenarios)
    if scenarios and all(find_installed_answer(scenario) == NOT_TESTED for scenario in scenarios):
        yield "to test your own vLLM, install moedoctor in the Python that has it, and run it on its GPU"


def _suggest_other_commands(scenarios: Sequence[ScenarioResult]) -> Iterator[str]:
    """Give the commands that look for failures whose scenario has no case for the installed release."""
    others: dict[str, list[ScenarioResult]] = {}
    for scenario in scenarios:
        entry = load_entries().get(scenario.id)
        if entry is not None and not any(case.subject == "installed" for case in scenario.cases):
            command = next((name for name in _OTHER_COMMANDS if name in entry.next), _OTHER_COMMANDS[-1])
            others.setdefault(command, []).append(scenario)
    for command, members in others.items():
        yield f"`{command}` looks for {_join_ids(members)}, which a run does not test in your vLLM"


def _summarize_unfinished(left: Sequence[ScenarioResult]) -> str:
    """Return in one line what ended the run, and what it left."""
    parts = [scenario.unfinished for scenario in left if scenario.unfinished]
    cases = count_of(sum(sum(part.cases.values()) for part in parts), "case")
    claims = count_of(sum(part.claims for part in parts), "claim")
    failures = f"{count_of(len(left), 'failure')} did not run ({_join_ids(left)})"
    return f"{parts[0].why}: {cases} and {claims} of {failures}"


def _show_unfinished(left: Sequence[ScenarioResult]) -> Iterator[Block]:
    """Give a row for each failure that a time budget left, with what the rest would take."""
    parts = [(scenario, scenario.unfinished) for scenario in left if scenario.unfinished]
    if parts:
        yield Heading("Left for another run")
        rows = []
        for scenario, part in sorted(parts, key=lambda pair: pair[1].seconds):
            cases = ", ".join(f"{number} {name}" for name, number in part.cases.items()) or "0"
            time = f"{part.seconds:.0f} s" if part.seconds < 100 else f"{part.seconds / 60:.0f} min"
            time = f"{'about' if part.measured else 'at most'} {time}"
            rows.append((f"{scenario.id} {scenario.name}", cases, str(part.claims), time))
        yield Table(("failure", "cases", "claims", "would take"), rows, "llrl")
        yield Paragraph(
            "about: as long as cases of these tiers took; at most: with the time limits, if none ran"
        )


def _show_regressions(report: Report, most: int | None) -> Iterator[Block]:
    """Give what is worse than the baseline, at most `most` of it, and whether the run was interrupted."""
    if report.findings:
        yield Heading("Worse than the baseline")
        yield from (Item("regression", text) for text in report.findings[:most])
    if left := len(report.findings[most:]) if most is not None else 0:
        yield Paragraph(f"{left} more in the whole report")
    if report.summary.interrupted:
        yield Paragraph(Span("Interrupted: not every case ran.", "error"))


def _show_overview(scenarios: Sequence[ScenarioResult]) -> Table:
    """Return a row for each failure: what control, fix and the installed release show."""
    rows = []
    for scenario in scenarios:
        answer = find_installed_answer(scenario)
        wanted = CaseVerdict.REPRODUCED if answer == AFFECTED else CaseVerdict.CLEAN
        share = "" if answer == NOT_TESTED else f" {_share(scenario, 'installed', wanted)}"
        # Without the failure in the control, a clean fix proves nothing.
        proves = _shows(scenario, "faulty") or not _list_run_cases(scenario, "fixed")
        control = _share(scenario, "faulty", CaseVerdict.REPRODUCED)
        fix = _share(scenario, "fixed", CaseVerdict.CLEAN) if proves else "not shown"
        verdict, name = _show_verdict(scenario.verdict), Span(f"{scenario.id} {scenario.name}", "section")
        rows.append((verdict, name, control, fix, Span(answer + share, answer)))
    return Table(("verdict", "failure", "control", "our fix", "your vLLM"), rows)


def _share(scenario: ScenarioResult, subject: str, wanted: CaseVerdict) -> str:
    """Return ``3/4``: the cases of a subject that show what is wanted, of those that ran."""
    ran = _list_run_cases(scenario, subject)
    return f"{sum(case.verdict is wanted for case in ran)}/{len(ran)}" if ran else "not run"


def _show_verdict(verdict: enum.Enum) -> Span:
    return Span(verdict.value, verdict.value)


def _make_item(scenario: ScenarioResult) -> Item:
    """Return the title, and for each subject and verdict the figure of its first case."""
    claims = Counter(claim.verdict for claim in scenario.claims if _is_tested(claim))
    tested = ", ".join(f"{number} {verdict.value}" for verdict, number in claims.items())
    title = f"{scenario.id} {scenario.title}" + (f" · claims: {tested}" if tested else "")
    groups: dict[tuple[str, CaseVerdict], list[CaseResult]] = {}
    for case in scenario.cases:
        if case.verdict is not CaseVerdict.SKIPPED:
            groups.setdefault((case.subject, case.verdict), []).append(case)
    lines = []
    if scenario.reason and scenario.verdict is not ScenarioVerdict.FOUND:
        lines.append(("why", join_lines(scenario.reason)))
    for (subject, verdict), members in groups.items():
        cases = f" ({count_of(len(members), 'case')})" if len(members) > 1 else ""
        lines.append((_ROLES.get(subject, subject), f"{verdict.value}: {explain_case(members[0])}{cases}"))
    return Item(scenario.verdict.value, title, lines)


def _show_scenario(scenario: ScenarioResult, detail: Detail, *, alone: bool) -> Fold:
    """Return a scenario; it is open if something in it is not as it should be."""
    refuted = any(claim.verdict is ClaimVerdict.REFUTED for claim in scenario.claims)
    title = (Span(f"{scenario.id} {scenario.name}"), ": ", _show_verdict(scenario.verdict))
    opened = alone or refuted or VERDICTS[scenario.verdict].wrong
    return Fold(title, list(_make_blocks(scenario, detail)), open=opened)


def _make_blocks(scenario: ScenarioResult, detail: Detail) -> Iterator[Block]:
    yield Paragraph(scenario.title)
    if scenario.reason:
        yield Paragraph((Span("Why: ", "bold"), scenario.reason))
    shared = find_shared_parameters(scenario.cases)
    same = f" · all cases: {format_parameters(shared)}" if shared else ""
    yield Paragraph(Span(f"{scenario.file}:{scenario.line}{same}", "dim"))
    if scenario.cases:
        yield _show_cases(scenario.cases, detail, shared)
    for note in crash_notes(scenario.cases):
        more = f" (and {note.others} more the same way)" if note.others else ""
        yield Paragraph((Span("Died: ", "bold"), f"{note.where}{more}: {note.death}: {note.message}"))
        if note.stderr_tail:
            yield Preformatted("\n".join(note.stderr_tail))
    claims = [claim for claim in scenario.claims if detail is not Detail.SHORT or _is_tested(claim)]
    if claims:
        yield Heading("Claims", 3)
        yield from map(_show_claim, claims)
    for claim in claims if detail >= Detail.RECORDS else ():
        yield from (Fold(claim.text, [table]) for table in make_evidence_tables(claim.evidence).values())
    words = [
        f"{name.replace('_', ' ')}: {text}" for name, text in list_figures(omit_records(scenario.conclusions))
    ]
    tables = make_evidence_tables(scenario.conclusions).values() if detail is not Detail.SHORT else ()
    if words or tables:
        yield Heading("Conclusions", 3)
        yield from ([Bullets(words)] if words else [])
        yield from tables


def _is_tested(claim: ClaimResult) -> bool:
    return claim.verdict is not ClaimVerdict.UNTESTED


def _show_claim(claim: ClaimResult) -> Item:
    title = (claim.text + " (", Span(claim.source, "source"), ")")
    lines = (claim.reason or "", format_evidence(omit_records(claim.evidence)))
    return Item(claim.verdict.value, title, [("", line) for line in lines if line])


def _show_cases(cases: Sequence[CaseResult], detail: Detail, shared: Mapping[str, Scalar]) -> Table:
    """Return the table of the cases, by subject, tier and device; cases that are alike share a row."""
    groups: dict[str, dict[Hashable, list[CaseResult]]] = {}
    for number, case in enumerate(cases):
        place = " · ".join((case.subject, case.tier.value, *(() if case.device == "cpu" else (case.device,))))
        groups.setdefault(place, {}).setdefault(_find_likeness(case, number, detail), []).append(case)
    rows, behind = [], []
    for place, members in ((place, each) for place, alike in groups.items() for each in alike.values()):
        labels = [
            format_parameters({key: value for key, value in case.parameters.items() if key not in shared})
            for case in members
        ]
        first, label = members[0], labels[0]
        if len(members) > 1:
            such = f", such as {label}" if label and first.verdict is not CaseVerdict.SKIPPED else ""
            label = f"{len(members)} cases{such}"
        rows.append((place, label, _show_verdict(first.verdict), explain_case(first)))
        behind.append(_show_evidence(first, labels) if detail is Detail.EVIDENCE else ())
    return Table(("subject", "parameters", "verdict", "figure"), rows, grouped=True, behind=behind)


def _find_likeness(case: CaseResult, number: int, detail: Detail) -> Hashable:
    """Return what is equal for cases that share a row; `number` is the place of the case."""
    if detail is Detail.EVIDENCE:
        return json.dumps(to_plain((case.verdict, case.figure, case.reason, case.evidence)), sort_keys=True)
    figure = explain_case(case)
    if detail is Detail.SHORT:
        return case.verdict, _NUMBER.sub("#", figure)
    return figure if case.verdict is CaseVerdict.SKIPPED else number


def find_shared_parameters(cases: Sequence[CaseResult]) -> dict[str, Scalar]:
    """Return the parameters that have the same value in every case."""

    def has(case: CaseResult, key: str, value: Scalar) -> bool:
        # In Python True equals 1 and 1 equals 1.0; a reader tells them apart.
        return key in case.parameters and repr(case.parameters[key]) == repr(value)

    first = cases[0].parameters if cases else {}
    return {key: value for key, value in first.items() if all(has(case, key, value) for case in cases)}


def _show_evidence(case: CaseResult, labels: Sequence[str]) -> Page:
    """Return what is behind a row; `labels` are the parameters of the cases that share it."""
    blocks: list[Block] = []
    if case.reason and case.reason != explain_case(case):
        blocks.append(Paragraph(case.reason))
    evidence = {name: value for name, value in to_plain(case.evidence).items() if name != "stderr_tail"}
    if lines := list(list_figures(omit_records(evidence))):
        blocks.append(Table(("evidence", "value"), lines))
    blocks += make_evidence_tables(evidence).values()
    if tail := case.evidence.get("stderr_tail"):
        blocks.append(Preformatted(tail if isinstance(tail, str) else "\n".join(map(str, tail))))
    if len(labels) > 1 and any(labels):
        blocks.append(Bullets([label or "no parameters" for label in labels]))
    return blocks


@dataclass(frozen=True)
class CrashNote:
    """The death of a child, and which cases died the same way."""

    where: str
    """The first of the cases."""
    others: int
    death: str
    message: str
    stderr_tail: tuple[str, ...]


def crash_notes(cases: Iterable[CaseResult]) -> tuple[CrashNote, ...]:
    """Return the deaths among the cases; those that look the same appear once, with their number."""
    deaths: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for case in cases:
        if "death" in case.evidence:
            tail = case.evidence.get("stderr_tail") or ()
            lines = [tail] if isinstance(tail, str) else [str(line) for line in tail]
            cleaned = tuple(part for line in lines for part in clean(line).split("\n"))
            death = join_lines(str(case.evidence["death"])).replace("_", " ")
            message = join_lines(str(case.evidence.get("message", "")))
            words = (join_lines(case.subject), case.tier.value, format_parameters(case.parameters))
            deaths.setdefault((death, message, cleaned), []).append(" ".join(filter(None, words)))
    return tuple(
        CrashNote(places[0], len(places) - 1, death, message, tail)
        for (death, message, tail), places in deaths.items()
    )
