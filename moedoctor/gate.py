"""The gate: the exit code that a report means, and the reasons for it.

| code | when |
|---|---|
| 0 | nothing found |
| 1 | a scenario is `found` or `failed`, or the report has findings (regressions against its baseline) |
| 1 | a release shows the failure, even if an error or a failed control decides the scenario's verdict |
| 1 | with `strict` or ``fail_on="warning"``: also if a scenario or a case was skipped |
| 1 | with ``fail_on="warning"``: also if a scenario is `absent` |
| 1 | a scenario is `error` through another project's plug-in, a full memory or disk, or a broken torch |
| 3 | a scenario is `error` for another reason, and nothing above gives 1 |

What named releases show counts only if the baseline does not hold it. ``fail_on="never"`` turns 1 into 0 and
leaves 3: an error of moedoctor itself is never a pass. 2 (bad input) and 130 (interrupted) are the command
line's. `moedoctor.comparison` decides what a regression is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from moedoctor import comparison
from moedoctor.results import CaseVerdict, Report, ScenarioResult, ScenarioVerdict

FailOn = Literal["error", "warning", "never"]


@dataclass(frozen=True)
class Decision:
    """An exit code and why it is not 0."""

    exit_code: int
    reasons: tuple[str, ...]
    """One line each; empty exactly if the code is 0."""


def decide(
    report: Report,
    *,
    strict: bool,
    fail_on: FailOn,
    others: Collection[str] = (),
    baseline: Report | None = None,
) -> Decision:
    """Return the exit code that `report` means, 0, 1 or 3 by the table above, with its reasons.

    `others` are the ids of failures that another project answers for.
    """
    errors = [scenario for scenario in report.scenarios if scenario.verdict is ScenarioVerdict.ERROR]
    ours = [scenario for scenario in errors if scenario.id not in others and not _is_the_machines(scenario)]
    found = [*(f"worse than the baseline: {finding}" for finding in report.findings)]
    found += _list_failures(report, comparison.list_held(baseline, report) if baseline else ())
    found += [_give_reason(scenario) for scenario in errors if scenario not in ours]
    if strict or fail_on == "warning":
        found += _list_skips(report, "--strict" if strict else "--fail-on warning")
    if fail_on == "warning":
        found += [_give_reason(each) for each in report.scenarios if each.verdict is ScenarioVerdict.ABSENT]
    if fail_on == "never":
        found = []
    reasons = (*found, *map(_give_reason, ours))
    return Decision(1 if found else 3 if ours else 0, reasons)


def _list_failures(report: Report, held: Collection[ScenarioResult]) -> Iterator[str]:
    """Give a reason for each scenario in which something fails that is not held by the baseline."""
    for scenario in report.scenarios:
        affected = [case for case in scenario.cases if case.affected]
        known = scenario in held
        if scenario.verdict is ScenarioVerdict.FAILED or (
            scenario.verdict is ScenarioVerdict.FOUND and not known
        ):
            yield _give_reason(scenario)
        elif affected and not known:
            subjects = ", ".join(dict.fromkeys(case.subject for case in affected))
            yield f"{scenario.id} {scenario.name}: {subjects} shows the failure: {affected[0].figure}"


def _list_skips(report: Report, option: str) -> Iterator[str]:
    left = [scenario.id for scenario in report.scenarios if scenario.unfinished]
    if left:
        yield f"{option}: the run ended before every case of {', '.join(left)} had run"
    for scenario in report.scenarios:
        if scenario.unfinished:
            continue
        skipped = [case for case in scenario.cases if case.verdict is CaseVerdict.SKIPPED]
        if skipped or scenario.verdict is ScenarioVerdict.SKIPPED:
            what = f"{len(skipped)} of {len(scenario.cases)} cases were skipped" if skipped else "skipped"
            why = next((case.reason for case in skipped if case.reason), scenario.reason)
            yield f"{option}: {scenario.id} {scenario.name}: {what}" + (f": {why}" if why else "")


def _give_reason(scenario: ScenarioResult) -> str:
    why = scenario.reason or f"the verdict is {scenario.verdict.value}"
    return f"{scenario.id} {scenario.name}: {why}"


def _is_the_machines(scenario: ScenarioResult) -> bool:
    """Return True if every error of the scenario is this machine's: no memory, no space, a broken library."""
    deaths = [case.evidence.get("death") for case in scenario.cases if case.verdict is CaseVerdict.ERROR]
    return bool(deaths) and {*deaths} <= {"out_of_memory", "disk_full", "broken_library"}
