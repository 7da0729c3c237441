"""Runs scenarios: plans the cases, sends each to a child, has the fault judge what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import moedoctor
from moedoctor import catalogue
from moedoctor.interfaces import Fault, Measurement
from moedoctor.processes.child import Request
from moedoctor.processes.pool import Finished, Job, RunInterruptedError, run_jobs
from moedoctor.results import (
    CaseResult,
    CaseVerdict,
    ClaimResult,
    ClaimVerdict,
    Crash,
    Observation,
    Report,
    ScenarioResult,
    ScenarioVerdict,
    Skip,
)
from moedoctor.runner.plan import Options, PlannedCase, PlannedClaim, plan_cases, plan_claims
from moedoctor.runner.verdicts import decide, summarise
from moedoctor.scenario.file import Scenario

Progress = Callable[[int, int, str], None]
"""(finished, total, what finished) -> None."""

_NOT_RUN = Skip("interrupted before it finished")


@dataclass(frozen=True)
class _Planned:
    """One scenario with its cases and claim units, which take consecutive places among the jobs."""

    scenario: Scenario
    fault: Fault
    cases: Sequence[PlannedCase]
    claims: Sequence[PlannedClaim]


def run(
    scenarios: Sequence[Scenario],
    options: Options,
    environment: Mapping[str, Any],
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Run `scenarios` and report. On Ctrl-C the children are killed and what finished is reported,
    with `summary.interrupted` set. The exit code is left to `moedoctor.gate`.
    """
    planned = [_plan(scenario, options, environment) for scenario in scenarios]
    requests = [one for plan in planned for one in _requests(plan, options)]
    jobs = [job for _, job in requests if job is not None]
    places = [place for place, (_, job) in enumerate(requests) if job is not None]
    done = 0

    def finished(one: Finished) -> None:
        nonlocal done
        done += 1
        progress(done, len(jobs), requests[places[one.index]][0])

    progress(0, len(jobs), "starting")
    interrupted = False
    try:
        ended = run_jobs(jobs, parallel=options.jobs, on_finished=finished) if jobs else []
    except RunInterruptedError as stop:
        ended, interrupted = list(stop.finished), True
    by_place = {places[one.index]: one for one in ended}
    results, start = [], 0
    for plan in planned:
        size = len(plan.cases) + len(plan.claims)
        results.append(_assemble(plan, [by_place.get(place) for place in range(start, start + size)]))
        start += size
    summary = summarise(results, interrupted=interrupted)
    return Report("run", environment, tuple(results), summary, version=moedoctor.__version__)


def _plan(scenario: Scenario, options: Options, environment: Mapping[str, Any]) -> _Planned:
    fault = catalogue.faults()[scenario.id]
    return _Planned(
        scenario,
        fault,
        plan_cases(scenario, fault, options, environment),
        plan_claims(scenario, fault, options, environment),
    )


def _requests(plan: _Planned, options: Options) -> list[tuple[str, Job | None]]:
    """What each case and claim unit is called, and its job where it can run."""
    timeout = options.timeout or plan.scenario.timeout
    device = next((one.case.device for one in plan.cases if one.case.device != "cpu"), "cuda:0")
    found: list[tuple[str, Job | None]] = []
    for planned in plan.cases:
        case = planned.case
        request = Request(plan.fault.id, options.sources, case=case, device=case.device)
        found.append((f"{plan.fault.name} {case.subject}", None if planned.skip else Job(request, timeout)))
    for claim in plan.claims:
        where = device if claim.test.needs_gpu else "cpu"
        request = Request(plan.fault.id, options.sources, claim=claim.test.key, unit=claim.unit, device=where)
        found.append(
            (f"{plan.fault.name} claim {claim.test.key}", None if claim.skip else Job(request, timeout))
        )
    return found


def _assemble(plan: _Planned, ended: Sequence[Finished | None]) -> ScenarioResult:
    cases = [_judge(plan.fault, one, done) for one, done in zip(plan.cases, ended, strict=False)]
    measured: dict[str, list[Measurement]] = {}
    for claim, finished in zip(plan.claims, ended[len(plan.cases) :], strict=True):
        outcome = Skip(claim.skip) if claim.skip else (finished.outcome if finished else _NOT_RUN)
        seconds = finished.seconds if finished else 0.0
        measured.setdefault(claim.test.key, []).append(Measurement(claim.unit, outcome, seconds))
    scenario = plan.scenario
    verdict, reason = decide(plan.fault, cases, scenario.expect)
    cut_short = any(
        done is None and not planned.skip for planned, done in zip(plan.cases, ended, strict=False)
    )
    if cut_short and verdict in (ScenarioVerdict.PROVED, ScenarioVerdict.ABSENT):
        verdict, reason = ScenarioVerdict.SKIPPED, "interrupted before every case had run"
    return ScenarioResult(
        id=scenario.id,
        name=scenario.name,
        title=scenario.title,
        verdict=verdict,
        file=scenario.file,
        cases=tuple(cases),
        claims=tuple(_claims(plan, cases, measured)),
        reason=reason,
        conclusions=plan.fault.conclude(cases),
        line=scenario.line,
    )


def _judge(fault: Fault, planned: PlannedCase, ended: Finished | None) -> CaseResult:
    case = planned.case
    base = CaseResult(case.subject, case.tier, case.parameters, CaseVerdict.SKIPPED, device=case.device)
    if planned.skip or ended is None:
        return replace(base, reason=planned.skip or _NOT_RUN.reason)
    base = replace(base, seconds=round(ended.seconds, 4))
    outcome = ended.outcome
    if isinstance(outcome, Skip):
        return replace(base, reason=outcome.reason)
    if isinstance(outcome, Crash):
        judgement = fault.judge_crash(case, outcome)
        evidence = outcome.to_evidence()
    else:
        judgement = fault.judge(case, outcome)
        evidence = dict(outcome.evidence)
    return replace(
        base, verdict=judgement.verdict, evidence=evidence, figure=judgement.figure, reason=judgement.reason
    )


def _claims(
    plan: _Planned, cases: Sequence[CaseResult], measured: Mapping[str, Sequence[Measurement]]
) -> list[ClaimResult]:
    tests = {test.key: test for test in plan.fault.claims}
    results = []
    for claim in plan.scenario.claims:
        test, units = tests[claim.key], measured.get(claim.key, ())
        blocked = _blocked(units) if test.measure is not None else None
        if blocked is not None:
            results.append(
                ClaimResult(claim.text, claim.source, ClaimVerdict.UNTESTED, blocked[1], blocked[0])
            )
            continue
        judgement = test.judge(cases, units, claim.thresholds)
        results.append(
            ClaimResult(
                claim.text, claim.source, judgement.verdict, dict(judgement.evidence), judgement.reason
            )
        )
    return results


def _blocked(units: Sequence[Measurement]) -> tuple[str, dict[str, Any]] | None:
    """Why nothing was measured for a claim, with a crash as evidence; None where something was."""
    if not units:
        return "not measured in this run", {}
    if any(isinstance(one.outcome, Observation) for one in units):
        return None
    first = units[0].outcome
    if isinstance(first, Skip):
        return first.reason, {}
    assert isinstance(first, Crash)
    return f"the measurement ended: {first.message}", first.to_evidence()
