"""The verdict of a scenario from its cases, and the counts of the summary."""

import pytest

from moedoctor.faults.routing.nan_routing import NanRouting
from moedoctor.results import CaseResult, CaseVerdict, ScenarioResult, ScenarioVerdict, Tier
from moedoctor.runner.judge import decide, summarize

R, C, S, E = CaseVerdict.REPRODUCED, CaseVerdict.CLEAN, CaseVerdict.SKIPPED, CaseVerdict.ERROR
EXPECT = {"faulty": R, "fixed": C, "vllm@0.19.1": R}
"""0.19.1 is a positive control."""


def case(subject: str, verdict: CaseVerdict, tier: Tier = Tier.MODEL) -> CaseResult:
    parameters = {"router": "softmax", "experts": 8, "top_k": 2, "dtype": "float32", "bias": "none"}
    return CaseResult(subject, tier, parameters, verdict, reason="why" if verdict in (S, E) else None)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"faulty": R, "fixed": C}, ScenarioVerdict.PROVED),
        ({"faulty": R, "fixed": C, "installed": C}, ScenarioVerdict.PROVED),
        ({"faulty": R, "fixed": C, "installed": R}, ScenarioVerdict.FOUND),
        ({"faulty": R, "fixed": C, "vllm@0.19.1": R}, ScenarioVerdict.PROVED),
        ({"faulty": R, "fixed": C, "vllm@0.19.1": R, "vllm@0.21.0": C}, ScenarioVerdict.PROVED),
        ({"faulty": R, "fixed": C, "vllm@0.19.1": C}, ScenarioVerdict.FAILED),
        ({"faulty": R, "fixed": C, "vllm@0.21.0": R}, ScenarioVerdict.FOUND),
        ({"faulty": R, "fixed": C, "flashinfer@0.6.6": R}, ScenarioVerdict.FOUND),
        ({"vllm@0.21.0": R}, ScenarioVerdict.FOUND),
        ({"vllm@0.21.0": C}, ScenarioVerdict.SKIPPED),
        ({"faulty": R, "fixed": C, "vllm@0.19.1": E}, ScenarioVerdict.ERROR),
        ({"faulty": R, "fixed": R, "installed": R}, ScenarioVerdict.FAILED),
        ({"faulty": C, "fixed": C, "installed": R}, ScenarioVerdict.FAILED),
        ({"faulty": R, "fixed": E}, ScenarioVerdict.ERROR),
        ({"faulty": R, "fixed": S}, ScenarioVerdict.SKIPPED),
        ({"faulty": S, "fixed": S, "installed": S}, ScenarioVerdict.SKIPPED),
        ({"installed": R}, ScenarioVerdict.FOUND),
        ({}, ScenarioVerdict.SKIPPED),
    ],
)
def test_verdict_of_a_scenario(verdicts: dict[str, CaseVerdict], expected: ScenarioVerdict) -> None:
    results = [case(subject, verdict) for subject, verdict in verdicts.items()]
    verdict, reason = decide(NanRouting(), results, EXPECT)
    assert verdict is expected
    assert (reason is None) == (expected is ScenarioVerdict.PROVED)


def test_summary_counts_scenarios_and_cases() -> None:
    results = (case("faulty", R), case("fixed", C), case("installed", S))
    scenario = ScenarioResult("MD001", "n", "t", ScenarioVerdict.PROVED, "f", results)
    summary = summarize([scenario, scenario], interrupted=True)
    assert (summary.proved, summary.failed, summary.interrupted) == (2, 0, True)
    assert summary.cases == {"reproduced": 2, "clean": 2, "skipped": 2, "error": 0}
