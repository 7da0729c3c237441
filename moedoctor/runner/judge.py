"""Verdicts: of each case and claim from what its children measured, and of the scenario from its cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from moedoctor.interfaces import Fault, Measurement
from moedoctor.processes.deaths import find_first_line
from moedoctor.results import (
    CaseResult,
    CaseVerdict,
    ClaimResult,
    ClaimVerdict,
    Crash,
    Death,
    Observation,
    Outcome,
    ScenarioResult,
    ScenarioVerdict,
    Skip,
    Summary,
    Unfinished,
)
from moedoctor.runner.plan import Plan, Planned
from moedoctor.runner.pool import Finished

CONTROL = "faulty"
FIX = "fixed"


def judge(
    plan: Plan,
    ended: Mapping[Planned, Finished],
    stop: str = "interrupted",
    parallel: int = 1,
    gpu: str | None = None,
) -> ScenarioResult:
    """Return the verdicts of one scenario, its cases and its claims.

    What did not finish is not in `ended`, and `stop` says what ended the run before it. `gpu` is the name of
    this machine's GPU.
    """
    scenario, fault = plan.scenario, plan.fault
    cases = [
        replace(_judge_case(fault, planned, ended, stop), expected=scenario.expect.get(planned.case.subject))
        for planned in plan.cases
    ]
    conclusions: Mapping[str, Any] = {}
    try:
        if plan.problem is not None:
            raise plan.problem
        verdict, reason = decide(fault, cases, scenario.expect)
        conclusions = fault.conclude(cases)
    except Exception as error:
        verdict, reason = ScenarioVerdict.ERROR, _describe_exception("verdict", error)
    cut_short = any(planned.skip is None and planned not in ended for planned in plan.cases)
    if cut_short and verdict in (ScenarioVerdict.PROVED, ScenarioVerdict.ABSENT):
        verdict, reason = ScenarioVerdict.SKIPPED, f"{stop} before every case had run"
    return ScenarioResult(
        id=scenario.id,
        name=scenario.name,
        title=scenario.title,
        verdict=verdict,
        file=scenario.file,
        line=scenario.line,
        reason=reason,
        cases=tuple(cases),
        claims=tuple(_judge_claims(plan, cases, ended, stop, gpu)),
        conclusions=conclusions,
        unfinished=_find_unfinished(plan, ended, stop, parallel),
    )


def _find_unfinished(
    plan: Plan, ended: Mapping[Planned, Finished], stop: str, parallel: int
) -> Unfinished | None:
    """Return what a run left of a plan, with the time that it would take; None if it left nothing."""
    left = [unit for unit in plan.runs if unit.skip is None and unit not in ended]
    if not left:
        return None
    took: dict[tuple[str, int], list[float]] = {}
    for unit, finished in ended.items():
        for kind in (unit.kind, ("", unit.kind[1])):  # without a case of its own, the tier's
            took.setdefault(kind, []).append(finished.seconds)
    seconds = 0.0
    for unit in left:
        at_once = parallel if unit.request.device == "cpu" else unit.request.together
        seconds += (
            fmean(took.get(unit.kind) or took.get(("", unit.kind[1])) or [unit.request.timeout]) / at_once
        )
    cases = [unit.case.subject for unit in left if unit.request.case]
    measured = all(("", unit.kind[1]) in took for unit in left)
    return Unfinished(stop, dict(Counter(cases)), len(left) - len(cases), round(seconds, 4), measured)


def _read_outcome(planned: Planned, ended: Mapping[Planned, Finished], stop: str) -> tuple[Outcome, float]:
    """Return what a case or a unit of a claim came back with, and its seconds."""
    if planned.skip:
        return Skip(planned.skip), 0.0
    finished = ended.get(planned)
    if finished is None:
        return Skip(f"{stop} before it finished"), 0.0
    return finished.outcome, finished.seconds


def _judge_case(fault: Fault, planned: Planned, ended: Mapping[Planned, Finished], stop: str) -> CaseResult:
    case = planned.case
    outcome, seconds = _read_outcome(planned, ended, stop)
    result = CaseResult(
        case.subject,
        case.tier,
        case.parameters,
        CaseVerdict.SKIPPED,
        device=case.device,
        seconds=round(seconds, 4),
    )
    if isinstance(outcome, Skip):
        return replace(result, reason=outcome.reason)
    evidence = outcome.to_evidence() if isinstance(outcome, Crash) else dict(outcome.evidence)
    try:
        if isinstance(outcome, Crash):
            judgement = fault.judge_crash(case, outcome)
        else:
            judgement = fault.judge(case, outcome)
    except Exception as error:
        return replace(
            result, verdict=CaseVerdict.ERROR, evidence=evidence, reason=_describe_exception("judge", error)
        )
    hung = isinstance(outcome, Crash) and outcome.death is Death.HANG
    if hung and planned.short and judgement.verdict is CaseVerdict.ERROR:
        return replace(result, reason=f"no answer within --timeout {planned.request.timeout:g} s")
    return replace(
        result, verdict=judgement.verdict, evidence=evidence, figure=judgement.figure, reason=judgement.reason
    )


def _describe_exception(what: str, error: Exception) -> str:
    return f"the {what} of this failure raised {find_first_line(f'{type(error).__name__}: {error}')}"


def _judge_claims(
    plan: Plan, cases: Sequence[CaseResult], ended: Mapping[Planned, Finished], stop: str, gpu: str | None
) -> Iterator[ClaimResult]:
    tests = {test.key: test for test in plan.fault.claims}
    for claim in plan.scenario.claims:
        test = tests[claim.key]
        units = [
            Measurement(planned.request.unit, *_read_outcome(planned, ended, stop))
            for planned in plan.claims.get(claim.key, ())
        ]
        result = ClaimResult(
            claim.text,
            claim.source,
            ClaimVerdict.UNTESTED,
            subject=claim.subject or None,
            conditions=claim.conditions or None,
        )
        blocked = _explain_blocked(units) if test.measure is not None else None
        if blocked is not None:
            yield replace(result, reason=blocked[0], evidence=blocked[1])
            continue
        try:
            judgement = test.judge(cases, units, claim.thresholds)
        except Exception as error:
            yield replace(result, reason=_describe_exception("judge", error))
            continue
        verdict, reason = claim.qualify(judgement.verdict, judgement.reason, gpu)
        yield replace(result, verdict=verdict, evidence=dict(judgement.evidence), reason=reason)


def _explain_blocked(units: Sequence[Measurement]) -> tuple[str, dict[str, Any]] | None:
    """Return why nothing was measured for a claim, with a crash as evidence; None if something was."""
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
    in the fix. An error hides what it would have shown, so it outranks every verdict but `failed`. A release
    that shows the failure is an answer even if nothing was proved.
    """
    ran = [case for case in results if case.verdict is not CaseVerdict.SKIPPED]
    misbehaved = [
        case
        for case in ran
        if case.subject in expect and case.verdict not in (expect[case.subject], CaseVerdict.ERROR)
    ]
    errors = [case for case in ran if case.verdict is CaseVerdict.ERROR]
    only_control = bool(misbehaved) and all(case.subject == CONTROL for case in misbehaved)
    absent = fault.absent(ran) if only_control else None
    if misbehaved and (absent is None or errors):
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
    unproved = absent or _explain_unproved(results, ran)
    affected = [case for case in ran if replace(case, expected=expect.get(case.subject)).affected]
    if affected:
        return ScenarioVerdict.FOUND, _name_affected(affected) + (
            f"; not proved here: {unproved}" if unproved else ""
        )
    if unproved is not None:
        return (ScenarioVerdict.ABSENT if absent else ScenarioVerdict.SKIPPED), unproved
    return ScenarioVerdict.PROVED, None


def _explain_unproved(results: Sequence[CaseResult], ran: Sequence[CaseResult]) -> str | None:
    """Return why the control and the fix prove nothing together; None if they do."""
    missing = [name for name in (CONTROL, FIX) if not any(case.subject == name for case in ran)]
    if missing:
        reasons = (case.reason for case in results if case.subject == missing[0] and case.reason)
        return next(reasons, f"nothing is proved without {' and '.join(missing)}, which did not run")
    unpaired = _list_points(ran, CONTROL) ^ _list_points(ran, FIX)
    return f"{len(unpaired)} points ran with only one of {CONTROL} and {FIX}" if unpaired else None


def _name_affected(affected: Sequence[CaseResult]) -> str:
    """Return which releases show the failure: ``vllm@0.19.1 shows it in 35 cases: 13 of 128 rows``."""
    first: dict[str, CaseResult] = {}
    for case in affected:
        first.setdefault(case.subject, case)
    counts = Counter(case.subject for case in affected)
    return "; ".join(
        f"{'the installed release' if name == 'installed' else name} shows it in {counts[name]} "
        f"case{'' if counts[name] == 1 else 's'}: {case.figure}"
        for name, case in first.items()
    )


def summarize(scenarios: Sequence[ScenarioResult], *, interrupted: bool = False) -> Summary:
    """Count scenarios and cases by verdict; the exit code is the gate's to fill in."""
    verdicts = Counter(scenario.verdict for scenario in scenarios)
    cases = Counter(case.verdict for scenario in scenarios for case in scenario.cases)
    return Summary(
        **{verdict.value: verdicts[verdict] for verdict in ScenarioVerdict},
        cases={verdict.value: cases[verdict] for verdict in CaseVerdict},
        interrupted=interrupted,
        reasons=None,
    )


def _list_points(results: Sequence[CaseResult], subject: str) -> set[tuple[object, ...]]:
    return {(case.tier, *sorted(case.parameters.items())) for case in results if case.subject == subject}
