"""The short page of a run: a line for each failure, the worst first, then details, then what to do next.

A run answers three questions, and they are kept apart: did our restatement show the failure (the control),
does our fix remove it, and is the installed vLLM or FlashInfer affected, clean, or not looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from moedoctor.reporters.page import Block, Bullets, Heading, Item, Paragraph, Span, Step, Table
from moedoctor.reporters.pages.run import (
    claim_item,
    conclusion_lines,
    deaths,
    notes,
    place,
    shared_parameters,
)
from moedoctor.reporters.text import count_of, deciding_figure, short_parameters, summary_line
from moedoctor.results import (
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Report,
    Scalar,
    ScenarioResult,
    ScenarioVerdict,
)
from moedoctor.text import one_line, shorten

AFFECTED, CLEAN, NOT_LOOKED_AT = "affected", "clean", "not looked at"

_WORST_FIRST = ("found", "failed", "error", "skipped", "absent", "proved")
_ROLES = {"faulty": "control", "fixed": "our fix"}
_FIGURE = 54
"""Characters of a figure in the list of all failures."""
_LISTED = 8
_NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
_TESTED = (ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED)
_NO_CASE = "the scenario has no case for it"


def short_page(report: Report, *, detailed: bool, blocks: int | None = None) -> list[Block]:
    """Return the page with a line for each failure, details of the worst, and what to do next.

    With `detailed`, each failure has a table of its own, its reason and the claims that were tested. Without
    it, each has a row for each answer. `blocks` is how many failures get details; None for all of them.
    """
    scenarios = sorted(report.scenarios, key=rank)
    page = list(notes(report, _LISTED))
    if scenarios:
        page.append(overview(scenarios))
    shown = scenarios[:blocks]
    if detailed:
        page += [block for scenario in shown for block in _details(scenario)]
    else:
        page += [_answers(scenario) for scenario in shown]
    if left := len(scenarios) - len(shown):
        page.append(Paragraph(Span(f"{count_of(left, 'failure')} more without details here: add -v", "dim")))
    return [*page, *closing(report, short=True)]


def closing(report: Report, *, short: bool = False) -> Iterator[Block]:
    """Give the answers of all failures together, the counts, and what to do next."""
    if report.scenarios:
        yield Bullets([*three_answers(report.scenarios), summary_line(report)])
    else:
        yield Paragraph(summary_line(report))
    for text in next_steps(report, short=short):
        yield Step(text)


def installed_answer(scenario: ScenarioResult) -> str:
    """Return whether the installed release is `AFFECTED`, `CLEAN` or `NOT_LOOKED_AT`.

    It is clean only if every case that ran is clean: a case that failed to run hides its answer.
    """
    verdicts = Counter(case.verdict for case in scenario.cases if case.subject == "installed")
    if verdicts[CaseVerdict.REPRODUCED]:
        return AFFECTED
    return CLEAN if verdicts[CaseVerdict.CLEAN] and not verdicts[CaseVerdict.ERROR] else NOT_LOOKED_AT


def collapsed(cases: Sequence[CaseResult], shared: Mapping[str, Scalar]) -> Iterator[tuple[str, str, str]]:
    """Give (parameters, verdict, figure) for cases whose figures differ only in their numbers."""
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for case in cases:
        groups.setdefault((case.verdict.value, _NUMBER.sub("#", deciding_figure(case))), []).append(case)
    for (verdict, _), members in groups.items():
        first = members[0]
        varying = {key: value for key, value in first.parameters.items() if key not in shared}
        label = short_parameters(varying)
        if len(members) > 1:
            alike = verdict == CaseVerdict.SKIPPED.value or not label
            label = f"{len(members)} cases" + ("" if alike else f", such as {label}")
        yield label, verdict, deciding_figure(first)


def rank(scenario: ScenarioResult) -> tuple[bool, int, str, str]:
    """Return what sorts the worst scenarios first."""
    affected = any(case.affected for case in scenario.cases)
    return not affected, _WORST_FIRST.index(scenario.verdict.value), scenario.id, scenario.name


def overview(scenarios: Sequence[ScenarioResult]) -> Table:
    """Return a row for each failure: what control, fix and the installed release show."""
    rows = []
    for scenario in scenarios:
        verdict, answer = scenario.verdict.value, installed_answer(scenario)
        installed = Span(answer + _share(scenario, "installed", answer), answer)
        rows.append(
            (
                Span(verdict, verdict),
                Span(f"{scenario.id} {scenario.name}", "section"),
                _share(scenario, "faulty", CaseVerdict.REPRODUCED.value).strip() or "not run",
                _fix(scenario),
                installed,
            )
        )
    return Table(("verdict", "failure", "control", "our fix", "your vLLM"), rows)


def _ran(scenario: ScenarioResult, subject: str) -> list[CaseResult]:
    skipped = CaseVerdict.SKIPPED
    return [case for case in scenario.cases if case.subject == subject and case.verdict is not skipped]


def _share(scenario: ScenarioResult, subject: str, answer: str) -> str:
    """Return `` 3/4``: the cases of a subject with an answer; empty if none ran."""
    wanted = CaseVerdict.REPRODUCED if answer in (AFFECTED, "reproduced") else CaseVerdict.CLEAN
    ran = _ran(scenario, subject)
    if not ran or answer == NOT_LOOKED_AT:
        return ""
    return f" {sum(case.verdict is wanted for case in ran)}/{len(ran)}"


def _fix(scenario: ScenarioResult) -> str:
    """Return in how many cases the fix is clean. Without the failure in the control, that proves nothing."""
    share = _share(scenario, "fixed", CLEAN).strip()
    if not share:
        return "not run"
    control = any(case.verdict is CaseVerdict.REPRODUCED for case in _ran(scenario, "faulty"))
    return share if control else "not shown"


def _answers(scenario: ScenarioResult) -> Item:
    """Return the title, and for each subject and verdict the figure of its first case."""
    claims = Counter(claim.verdict for claim in scenario.claims)
    tested = [f"{claims[verdict]} {verdict.value}" for verdict in _TESTED if claims[verdict]]
    title = f"{scenario.id} {scenario.title}" + (f" · claims: {', '.join(tested)}" if tested else "")
    groups: dict[tuple[str, CaseVerdict], list[CaseResult]] = {}
    for case in scenario.cases:
        if case.verdict is not CaseVerdict.SKIPPED:
            groups.setdefault((case.subject, case.verdict), []).append(case)
    lines = []
    if scenario.reason and scenario.verdict is not ScenarioVerdict.FOUND:
        lines.append(("why", _cut(scenario.reason, 2 * _FIGURE)))
    for (subject, verdict), members in groups.items():
        cases = f" ({count_of(len(members), 'case')})" if len(members) > 1 else ""
        figure = _cut(deciding_figure(members[0]), _FIGURE)
        lines.append((_ROLES.get(subject, subject), f"{verdict.value}: {figure}{cases}"))
    return Item(scenario.verdict.value, title, lines)


def _cut(text: str, limit: int) -> str:
    line = one_line(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _details(scenario: ScenarioResult) -> Iterator[Block]:
    verdict = Span(scenario.verdict.value, scenario.verdict.value)
    yield Heading((Span(f"{scenario.id} {scenario.name}"), " · ", verdict))
    yield Paragraph(scenario.title)
    if scenario.reason:
        yield Paragraph(scenario.reason)
    shared = shared_parameters(scenario.cases)
    if shared:
        yield Paragraph(Span(f"all cases: {short_parameters(shared)}", "dim"))
    places: dict[str, list[CaseResult]] = {}
    for case in scenario.cases:
        places.setdefault(place(case), []).append(case)
    rows = [
        (subject, label, Span(verdict_word, verdict_word), figure)
        for subject, members in places.items()
        for label, verdict_word, figure in collapsed(members, shared)
    ]
    if rows:
        yield Table(("subject", "parameters", "verdict", "figure"), rows, grouped=True)
    yield from deaths(scenario.cases)
    yield from (claim_item(claim) for claim in scenario.claims if claim.verdict in _TESTED)
    if lines := conclusion_lines(scenario):
        yield Bullets(lines)


def three_answers(scenarios: Sequence[ScenarioResult]) -> Iterator[str]:
    """Give what control, fix and the installed release show, then each named release."""
    shown = [scenario for scenario in scenarios if _reproduced(scenario)]
    controls = [scenario for scenario in scenarios if _ran(scenario, "faulty")]
    yield (
        f"The control, our restatement, shows the failure: {len(shown)} of {len(controls)} that ran"
        + _except(controls, shown)
    )
    fixes = [scenario for scenario in shown if _ran(scenario, "fixed")]
    clean = [scenario for scenario in fixes if _all_clean(scenario)]
    yield f"Our fix removes it: {len(clean)} of {len(fixes)} that could prove it" + _except(fixes, clean)
    answers = {
        answer: [scenario for scenario in scenarios if installed_answer(scenario) == answer]
        for answer in (AFFECTED, CLEAN, NOT_LOOKED_AT)
    }
    affected, unseen = answers[AFFECTED], answers[NOT_LOOKED_AT]
    yield (
        f"Your installed vLLM, with its FlashInfer: affected by {len(affected)}{_ids(affected)}, clean of "
        f"{len(answers[CLEAN])}{_ids(answers[CLEAN])}, not looked at for {len(unseen)}{_why(unseen)}"
    )
    yield from _releases(scenarios)


def _releases(scenarios: Sequence[ScenarioResult]) -> Iterator[str]:
    """Give a line for each named release: which failures it shows, and how many it does not."""
    subjects = dict.fromkeys(
        case.subject for scenario in scenarios for case in scenario.cases if "@" in case.subject
    )
    for subject in list(subjects)[:_LISTED]:
        looked_at = [scenario for scenario in scenarios if _ran(scenario, subject)]
        shows = [scenario for scenario in looked_at if _reproduced(scenario, subject)]
        clean = [scenario for scenario in looked_at if _all_clean(scenario, subject)]
        yield f"{subject}: affected by {len(shows)}{_ids(shows)}, clean of {len(clean)}{_ids(clean)}"
    if len(subjects) > _LISTED:
        yield f"{len(subjects) - _LISTED} more releases: add -v"


def _reproduced(scenario: ScenarioResult, subject: str = "faulty") -> bool:
    return any(case.verdict is CaseVerdict.REPRODUCED for case in _ran(scenario, subject))


def _all_clean(scenario: ScenarioResult, subject: str = "fixed") -> bool:
    return all(case.verdict is CaseVerdict.CLEAN for case in _ran(scenario, subject)) and bool(
        _ran(scenario, subject)
    )


def _except(scenarios: Sequence[ScenarioResult], right: Sequence[ScenarioResult]) -> str:
    left = [scenario for scenario in scenarios if scenario not in right]
    return f"; not{_ids(left)}" if left else ""


def _ids(scenarios: Sequence[ScenarioResult]) -> str:
    ids = list(dict.fromkeys(one_line(scenario.id) for scenario in scenarios))
    more = f", … {len(ids)} in all" if len(ids) > _LISTED else ""
    return f" ({', '.join(ids[:_LISTED])}{more})" if ids else ""


def _why(scenarios: Sequence[ScenarioResult]) -> str:
    """Return the two most frequent reasons why the installed release was not looked at."""
    reasons = Counter(
        next(
            (one_line(case.reason or "") for case in scenario.cases if case.subject == "installed"), _NO_CASE
        )
        for scenario in scenarios
    )
    common = [f"{shorten(reason or 'no reason', 80)} ({number})" for reason, number in reasons.most_common(2)]
    more = len(reasons) - len(common)
    return (
        f": {'; '.join(common)}" + (f"; {count_of(more, 'other reason')}" if more else "") if common else ""
    )


def next_steps(report: Report, *, short: bool) -> Iterator[str]:
    """Give what to do next; `short` is for a page without every case."""
    scenarios = sorted(report.scenarios, key=rank)
    affected = [scenario for scenario in scenarios if any(case.affected for case in scenario.cases)]
    if affected:
        yield f"`moedoctor explain {one_line(affected[0].id)}` says what to do today about the first failure"
    wrong = [scenario for scenario in scenarios if scenario.verdict.value in ("failed", "error")]
    if wrong:
        name = one_line(wrong[0].id)
        yield f"`moedoctor run {name} -v` shows the cases of the first scenario that went wrong"
    if report.findings:
        yield "`moedoctor compare BASELINE REPORT` compares the two reports figure by figure"
    unseen = [scenario for scenario in scenarios if installed_answer(scenario) == NOT_LOOKED_AT]
    if unseen and len(unseen) == len(scenarios):
        yield "to test your own vLLM, install moedoctor in the Python that has it, and run it on its GPU"
    if short:
        yield "add -v for every case and every claim, or `moedoctor explain ID` for one failure"
