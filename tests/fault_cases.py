"""Cases and measurements of known failures, for their tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Fault, Judgement, Measurement
from moedoctor.results import Case, CaseResult, Observation, Tier


def case(
    fault: Fault, subject: str = "faulty", tier: Tier = Tier.MODEL, device: str = "cpu", **parameters: Any
) -> Case:
    values = fault.parameters.model_validate(parameters).model_dump()
    return Case(fault.id, subject, tier, values, device)


def run(fault: Fault, subject: str = "faulty", **parameters: Any) -> tuple[Judgement, Mapping[str, Any]]:
    """Run one case at the tier `model` in this process: the judgement, and its evidence."""
    point = case(fault, subject, **parameters)
    observation = fault.observe(point, None)
    return fault.judge(point, observation), observation.evidence


def claim_of(fault: Fault, key: str) -> ClaimTest:
    return next(test for test in fault.claims if test.key == key)


def by_rows(
    claim: ClaimTest, limits: Mapping[str, float], *rows: Mapping[str, Any], unit: str = "", **figures: Any
) -> ClaimJudgement:
    """Judge a claim by the rows and figures of one unit."""
    evidence = {"rows": list(rows), **figures}
    return claim.judge((), [Measurement(unit, Observation(evidence))], limits)


def by_cases(claim: ClaimTest, limits: Mapping[str, float], cases: Sequence[CaseResult]) -> ClaimJudgement:
    """Judge a claim that the cases decide."""
    return claim.judge(cases, (), limits)
