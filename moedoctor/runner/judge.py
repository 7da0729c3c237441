"""Verdicts: of each case and claim from what its children measured, and of the scenario from its cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moedoctor.interfaces import Fault, Measurement
from moedoctor.processes.pool import Finished
from moedoctor.results import (
    CaseResult,
    CaseVerdict,
    ClaimResult,
    ClaimVerdict,
    Crash,
    Observation,
    ScenarioResult,
    ScenarioVerdict,
    Skip,
    Summary,
)
from moedoctor.runner.plan import Plan, PlannedCase, PlannedClaim

CONTROL = "faulty"
FIX = "fixed"
INSTALLED = "installed"
_NOT_RUN = Skip("interrupted before it finished")

_Ended = Mapping[PlannedCase | PlannedClaim, Finished]
"""What each case and claim unit came back with; what did not run is not in it."""


def judge(plan: Plan, ended: _Ended) -> ScenarioResult:
    """Return the verdicts of one scenario, its cases and its claims."""
    scenario, fault = plan.scenario, plan.fault
    cases = [_judge_case(fault, planned, ended.get(planned)) for planned in plan.cases]
    verdict, reason = decide(fault, cases, scenario.expect)
    cut_short = any(planned.skip is None and planned not in ended for planned in plan.cases)
    if cut_short and verdict in (ScenarioVerdict.PROVED, ScenarioVerdict.ABSENT):
        verdict, reason = ScenarioVerdict.SKIPPED, "interrupted before every case had run"
    return ScenarioResult(
        id=scenario.id,
        name=scenario.name,
        title=scenario.title,
        verdict=verdict,
        file=scenario.file,
        line=scenario.line,
        reason=reason,
        cases=tuple(cases),
        claims=tuple(_judge_claims(plan, cases, ended)),
        conclusions=fault.conclude(cases),
    )


def _judge_case(fault: Fault, planned: PlannedCase, ended: Finished | None) -> CaseResult:
    case = planned.case
    result = CaseResult(case.subject, case.tier, case.parameters, CaseVerdict.SKIPPED, device=case.device)
    if planned.skip or ended is None:
        return replace(result, reason=planned.skip or _NOT_RUN.reason)
    result = replace(result, seconds=round(ended.seconds, 4))
    outcome = ended.outcome
    if isinstance(outcome, Skip):
        return replace(result, reason=outcome.reason)
    if isinstance(outcome, Crash):
        judgement = fault.judge_crash(case, outcome)
        evidence = outcome.to_evidence()
    else:
        judgement = fault.judge(case, outcome)
        evidence = dict(outcome.evidence)
    return replace(
        result, verdict=judgement.verdict, evidence=evidence, figure=judgement.figure, reason=judgement.reason
    )


def _judge_claims(plan: Plan, cases: Sequence[CaseResult], ended: _Ended) -> list[ClaimResult]:
    measured: dict[str, list[Measurement]] = {}
    for planned in plan.claims:
        done = ended.get(planned)
        outcome = Skip(planned.skip) if planned.skip else (done.outcome if done else _NOT_RUN)
        measurement = Measurement(planned.unit, outcome, done.seconds if done else 0.0)
        measured.setdefault(planned.test.key, []).append(measurement)
    tests = {test.key: test for test in plan.fault.claims}
    results = []
    for claim in plan.scenario.claims:
        test, units = tests[claim.key], measured.get(claim.key, ())
        result = ClaimResult(claim.text, claim.source, ClaimVerdict.UNTESTED)
        blocked = _blocked(units) if test.measure is not None else None
        if blocked is not None:
            results.append(replace(result, reason=blocked[0], evidence=blocked[1]))
            continue
        judgement = test.judge(cases, units, claim.thresholds)
        evidence = dict(judgement.evidence)
        results.append(replace(result, verdict=judgement.verdict, evidence=evidence, reason=judgement.reason))
    return results


def _blocked(units: Sequence[Measurement]) -> tuple[str, dict[str, Any]] | None:
    """Why nothing was measured for a claim, with a crash as evidence; None if something was."""
    if not units:
        return "not measured in this run", {}
    if any(isinstance(unit.outcome, Observation) for unit in units):
        return None
    first = units[0].outcome
    if isinstance(first, Skip):
        return first.reason, {}
    assert isinstance(first, Crash)
    return f"the measurement ended: {first.message}", first.to_evidence()


def decide(
    fault: Fault, results: Sequence[CaseResult], expect: Mapping[str, CaseVerdict]
) -> tuple[ScenarioVerdict, str | None]:
    """Return the scenario's verdict, and in one line why it is not simply `proved`.

    A proof needs, for every point of the matrix that ran, the failure in the control and its absence
    in the fix. An error hides what it would have shown, so it outranks every verdict but `failed`.
    """
    ran = [case for case in results if case.verdict is not CaseVerdict.SKIPPED]
    misbehaved = [case for case in ran if _misbehaves(case, expect)]
    errors = [case for case in ran if case.verdict is CaseVerdict.ERROR]
    if misbehaved:
        why = fault.absent(results) if all(case.subject == CONTROL for case in misbehaved) else None
        if why is not None and not errors:
            return ScenarioVerdict.ABSENT, why
        first = misbehaved[0]
        expected = expect[first.subject].value
        point = fault.describe(first.parameters)
        return ScenarioVerdict.FAILED, (
            f"{first.subject} was {first.verdict.value}, expected {expected}: {point}: {first.figure}"
            + (f" (and {len(misbehaved) - 1} more)" if len(misbehaved) > 1 else "")
        )
    if errors:
        first = errors[0]
        return ScenarioVerdict.ERROR, f"{first.subject}, {fault.describe(first.parameters)}: {first.reason}"
    missing = [name for name in (CONTROL, FIX) if not any(case.subject == name for case in ran)]
    if missing:
        return ScenarioVerdict.SKIPPED, _why_missing(missing, results)
    unpaired = _points(ran, CONTROL) ^ _points(ran, FIX)
    if unpaired:
        return ScenarioVerdict.SKIPPED, f"{len(unpaired)} points ran with only one of {CONTROL} and {FIX}"
    shown = [case for case in ran if case.subject == INSTALLED and case.verdict is CaseVerdict.REPRODUCED]
    if shown:
        reason = f"the installed release shows it in {len(shown)} cases: {shown[0].figure}"
        return ScenarioVerdict.FOUND, reason
    return ScenarioVerdict.PROVED, None


def summarise(scenarios: Sequence[ScenarioResult], *, interrupted: bool = False) -> Summary:
    """Count scenarios and cases by verdict; the exit code is the gate's to fill in."""
    verdicts = Counter(scenario.verdict for scenario in scenarios)
    cases = Counter(case.verdict for scenario in scenarios for case in scenario.cases)
    return Summary(
        **{verdict.value: verdicts[verdict] for verdict in ScenarioVerdict},
        cases={verdict.value: cases[verdict] for verdict in CaseVerdict},
        interrupted=interrupted,
    )


def _misbehaves(case: CaseResult, expect: Mapping[str, CaseVerdict]) -> bool:
    expected = expect.get(case.subject)
    return expected is not None and case.verdict not in (expected, CaseVerdict.ERROR)


def _points(results: Sequence[CaseResult], subject: str) -> set[tuple[object, ...]]:
    return {(case.tier, *sorted(case.parameters.items())) for case in results if case.subject == subject}


def _why_missing(missing: Sequence[str], results: Sequence[CaseResult]) -> str:
    reasons = (case.reason for case in results if case.subject == missing[0] and case.reason)
    return next(reasons, f"nothing is proved without {' and '.join(missing)}, which did not run")
