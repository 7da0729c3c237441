"""The gate: the exit code that a report means.

| code | when |
|---|---|
| 0 | nothing found |
| 1 | a scenario is `found` or `failed`, or the report has findings (regressions against its baseline) |
| 1 | a case of `installed` reproduced the failure, even if nothing was proved because only it ran |
| 1 | with `strict` or ``fail_on="warning"``: also if a scenario or a case was skipped |
| 1 | with ``fail_on="warning"``: also if a scenario is `absent` |
| 1 | a scenario is `error` through another project's plug-in, a full memory or disk, or a broken torch |
| 3 | a scenario is `error` for another reason, and nothing above gives 1 |

``fail_on="never"`` turns 1 into 0 and leaves 3: an error of moedoctor itself is never a pass. 2 (bad input)
and 130 (interrupted) are the command line's. `moedoctor.comparison` decides what a regression is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from moedoctor.results import CaseVerdict, Report, ScenarioResult, ScenarioVerdict

FailOn = Literal["error", "warning", "never"]

_FOUND = frozenset({ScenarioVerdict.FOUND, ScenarioVerdict.FAILED})


def exit_code(report: Report, *, strict: bool, fail_on: FailOn, others: Collection[str] = ()) -> int:
    """Return the exit code that `report` means: 0, 1 or 3; see the table above.

    `others` are the ids of failures that another project answers for.
    """
    verdicts = {scenario.verdict for scenario in report.scenarios}
    errors = {scenario.id for scenario in report.scenarios if scenario.verdict is ScenarioVerdict.ERROR}
    others = {*others, *(scenario.id for scenario in report.scenarios if _is_the_machines(scenario))}
    skipped = ScenarioVerdict.SKIPPED in verdicts or any(
        case.verdict is CaseVerdict.SKIPPED for scenario in report.scenarios for case in scenario.cases
    )
    found = bool(report.findings) or not verdicts.isdisjoint(_FOUND) or _installed_fails(report)
    found |= not errors.isdisjoint(others)
    found |= skipped and (strict or fail_on == "warning")
    found |= ScenarioVerdict.ABSENT in verdicts and fail_on == "warning"
    if found and fail_on != "never":
        return 1
    return 3 if errors - set(others) else 0


def _is_the_machines(scenario: ScenarioResult) -> bool:
    """Whether every error of the scenario comes from this machine: no memory, no space, a broken library."""
    deaths = [case.evidence.get("death") for case in scenario.cases if case.verdict is CaseVerdict.ERROR]
    return bool(deaths) and {*deaths} <= {"out_of_memory", "disk_full", "broken_library"}


def _installed_fails(report: Report) -> bool:
    return any(
        case.subject == "installed" and case.verdict is CaseVerdict.REPRODUCED
        for scenario in report.scenarios
        for case in scenario.cases
    )
