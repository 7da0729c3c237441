"""What the cases of one scenario add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from moedoctor.interfaces import Fault
from moedoctor.results import CaseResult, CaseVerdict, ScenarioResult, ScenarioVerdict, Summary

Decision = tuple[ScenarioVerdict, str | None]

CONTROL = "faulty"
FIX = "fixed"
INSTALLED = "installed"


def decide(fault: Fault, results: Sequence[CaseResult], expect: Mapping[str, CaseVerdict]) -> Decision:
    """The scenario's verdict, and in one line why it is not plainly `proved`.

    A proof needs, for every point of the matrix that ran, the failure in the control and its absence
    in the fix. An error hides what it would have shown, so it outranks every verdict but `failed`.
    """
    ran = [one for one in results if one.verdict is not CaseVerdict.SKIPPED]
    misbehaved = [one for one in ran if _misbehaves(one, expect)]
    errors = [one for one in ran if one.verdict is CaseVerdict.ERROR]
    silent_controls = [one for one in misbehaved if one.subject == CONTROL]
    if misbehaved:
        why = fault.absent(results) if len(silent_controls) == len(misbehaved) else None
        if why is not None and not errors:
            return ScenarioVerdict.ABSENT, why
        first = misbehaved[0]
        expected = expect[first.subject].value
        where = fault.describe(first.parameters)
        return ScenarioVerdict.FAILED, (
            f"{first.subject} was {first.verdict.value}, expected {expected}: {where}: {first.figure}"
            + (f" (and {len(misbehaved) - 1} more)" if len(misbehaved) > 1 else "")
        )
    if errors:
        first = errors[0]
        return ScenarioVerdict.ERROR, f"{first.subject}, {fault.describe(first.parameters)}: {first.reason}"
    missing = [name for name in (CONTROL, FIX) if not any(one.subject == name for one in ran)]
    if missing:
        return ScenarioVerdict.SKIPPED, _why_missing(missing, results)
    unpaired = _points(ran, CONTROL) ^ _points(ran, FIX)
    if unpaired:
        return ScenarioVerdict.SKIPPED, f"{len(unpaired)} points ran with only one of {CONTROL} and {FIX}"
    found = [one for one in ran if one.subject == INSTALLED and one.verdict is CaseVerdict.REPRODUCED]
    if found:
        return (
            ScenarioVerdict.FOUND,
            f"the installed release shows it in {len(found)} cases: {found[0].figure}",
        )
    return ScenarioVerdict.PROVED, None


def summarise(scenarios: Sequence[ScenarioResult], *, interrupted: bool = False) -> Summary:
    """Scenarios and cases counted by verdict; the exit code is the gate's to fill in."""
    verdicts = Counter(one.verdict.value for one in scenarios)
    cases = Counter(case.verdict.value for one in scenarios for case in one.cases)
    counts = {verdict.value: verdicts[verdict.value] for verdict in ScenarioVerdict}
    return Summary(
        **counts, cases={one.value: cases[one.value] for one in CaseVerdict}, interrupted=interrupted
    )


def _misbehaves(case: CaseResult, expect: Mapping[str, CaseVerdict]) -> bool:
    expected = expect.get(case.subject)
    return expected is not None and case.verdict not in (expected, CaseVerdict.ERROR)


def _points(results: Sequence[CaseResult], subject: str) -> set[tuple[object, ...]]:
    return {(one.tier, *sorted(one.parameters.items())) for one in results if one.subject == subject}


def _why_missing(missing: Sequence[str], results: Sequence[CaseResult]) -> str:
    for one in results:
        if one.subject == missing[0] and one.reason:
            return one.reason
    return f"nothing is proved without {' and '.join(missing)}, which did not run"
