"""Cases of the offload failures, run here and judged."""

from typing import Any

from moedoctor.interfaces import Fault
from moedoctor.results import Case, CaseResult, Tier


def run_case(
    fault: Fault, subject: str, tier: Tier = Tier.MODEL, release: Any = None, **given: Any
) -> CaseResult:
    """Run the case in this process; tier kernel runs on the GPU. `release`: the code of a named release."""
    parameters = fault.parameters(**given).model_dump(mode="json")
    case = Case(fault.id, subject, tier, parameters, "cuda:0" if tier is Tier.KERNEL else "cpu")
    observation = fault.observe(case, release)
    judgement = fault.judge(case, observation)
    outcome = judgement.verdict, observation.evidence
    return CaseResult(subject, tier, parameters, *outcome, figure=judgement.figure)
