"""Cases and measurements of known failures, for their tests."""

from collections.abc import Mapping
from typing import Any

import torch

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Fault, Judgement, Measurement
from moedoctor.results import Case, CaseResult, Observation, Tier

# The layers of cases are small, and threads that wait for one another cost more than they compute.
torch.set_num_threads(1)


def case(
    fault: Fault, subject: str = "faulty", tier: Tier = Tier.MODEL, device: str = "cpu", **parameters: Any
) -> Case:
    values = fault.parameters.model_validate(parameters).model_dump()
    return Case(fault.id, subject, tier, values, device)


def run(
    fault: Fault, subject: str = "faulty", tier: Tier = Tier.MODEL, code: Any = None, **parameters: Any
) -> CaseResult:
    """Run one case in this process; tier kernel runs on the GPU. `code`: that of a named release."""
    point = case(fault, subject, tier, "cuda:0" if tier is Tier.KERNEL else "cpu", **parameters)
    observation = fault.observe(point, code)
    judged = fault.judge(point, observation)
    outcome = judged.verdict, observation.evidence, judged.reason
    return CaseResult(subject, tier, point.parameters, *outcome, figure=judged.figure)


def judge(fault: Fault, evidence: Mapping[str, Any], subject: str = "faulty", **parameters: Any) -> Judgement:
    """Judge the evidence of a case of the tier `model`."""
    return fault.judge(case(fault, subject, **parameters), Observation(evidence))


def claim_of(fault: Fault, key: str) -> ClaimTest:
    return next(test for test in fault.claims if test.key == key)


def by_figures(
    claim: ClaimTest, limits: Mapping[str, float], figures: Mapping[str, Any], unit: str = ""
) -> ClaimJudgement:
    """Judge a claim by the figures of one unit."""
    return claim.judge((), [Measurement(unit, Observation(figures))], limits)


def by_rows(
    claim: ClaimTest, limits: Mapping[str, float], *rows: Mapping[str, Any], unit: str = "", **figures: Any
) -> ClaimJudgement:
    """Judge a claim by the rows and figures of one unit."""
    return by_figures(claim, limits, {"rows": list(rows), **figures}, unit)
