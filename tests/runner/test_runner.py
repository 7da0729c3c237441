"""Scenarios in real child processes: every verdict of a case, a claim and a scenario."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moedoctor import catalogue
from moedoctor.results import ClaimVerdict, Report, ScenarioResult, ScenarioVerdict, Tier
from moedoctor.runner.plan import Options, order_by_cost, plan
from moedoctor.runner.run import run
from moedoctor.scenario.file import load
from moedoctor.scenario.targets import load_targets

pytestmark = pytest.mark.usefixtures("dying_plugin", "server_without_torch")

NO_GPU: dict[str, Any] = {"gpu": None, "torch": "2.13.0", "vllm": None}


def report(tmp_path: Path, text: str, options: Options | None = None, **arguments: Any) -> Report:
    file = tmp_path / "dying.yaml"
    file.write_text(f"id: MD901\ntiers: [model, kernel]\n{text}")
    scenario = load(file, faults=catalogue.load_faults(), subject_kind=catalogue.find_subject_kind)
    return run(plan([scenario], options or Options(), NO_GPU), NO_GPU, **arguments)


def result(tmp_path: Path, text: str, options: Options | None = None) -> ScenarioResult:
    return report(tmp_path, text, options).scenarios[0]


def test_proved_when_the_control_shows_it_and_the_fix_does_not(tmp_path: Path) -> None:
    ended = report(tmp_path, "")
    scenario = ended.scenarios[0]
    assert scenario.verdict is ScenarioVerdict.PROVED
    assert scenario.reason is None
    assert [case.subject for case in scenario.cases] == ["faulty", "fixed", "installed"]
    assert [case.verdict.value for case in scenario.cases] == ["reproduced", "clean", "skipped"]
    assert scenario.cases[0].figure == "symptom True"
    assert scenario.cases[2].reason == "vllm is not installed here"
    assert (ended.summary.proved, ended.summary.cases["skipped"]) == (1, 1)


@pytest.mark.parametrize(
    ("parameters", "verdict", "reason"),
    [
        ("{symptom_fixed: true}", ScenarioVerdict.FAILED, "fixed was reproduced, expected clean"),
        ("{symptom_faulty: false, absent: true}", ScenarioVerdict.ABSENT, "told to be absent"),
        # A fix that misbehaves is never absent.
        ("{symptom_faulty: false, symptom_fixed: true, absent: true}", ScenarioVerdict.FAILED, "was"),
        ("{fixed: skip}", ScenarioVerdict.SKIPPED, "no such thing here"),
        ("{fixed: [answers, skip]}", ScenarioVerdict.SKIPPED, "1 points ran with only one of"),
    ],
)
def test_verdict_and_reason(tmp_path: Path, parameters: str, verdict: ScenarioVerdict, reason: str) -> None:
    scenario = result(tmp_path, f"parameters: {parameters}\n")
    assert scenario.verdict is verdict
    assert reason in str(scenario.reason)


def test_timeout_of_the_options_overrides_the_scenario(tmp_path: Path) -> None:
    scenario = result(tmp_path, "timeout: 600\nparameters: {fixed: hang}\n", Options(timeout=0.5))
    assert scenario.verdict is ScenarioVerdict.SKIPPED
    assert scenario.cases[1].reason == "no answer within --timeout 0.5 s"


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("judge", ""),
        ("judge_crash", "parameters: {faulty: signal}"),
        ("absent", "parameters: {symptom_faulty: false}"),
        ("conclude", ""),
        ("has_point", ""),
    ],
)
def test_what_a_plug_in_raises_is_an_error_of_its_scenario_alone(tmp_path, method, text, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("its own mistake")

    monkeypatch.setattr(type(catalogue.load_faults()["MD901"]), method, fail)
    scenario = result(tmp_path, text, Options())
    assert scenario.verdict is ScenarioVerdict.ERROR
    assert "raised KeyError: 'its own mistake'" in str(scenario.reason)


def test_only_keeps_the_cases_that_show_every_pair(tmp_path: Path) -> None:
    text = "parameters: {fixed: [answers, skip]}\n"
    scenario = result(tmp_path, text, Options(only=(("fixed", "answers"), ("tier", "model"))))
    assert [case.subject for case in scenario.cases] == ["faulty", "fixed"]
    assert {case.parameters["fixed"] for case in scenario.cases} == {"answers"}
    assert scenario.verdict is ScenarioVerdict.PROVED


CLAIMS = """claims:
  - {key: measured, text: three is enough, source: nowhere,
     thresholds: {at_least: LIMIT}, subject: a, conditions: b}
  - {key: needs_gpu, text: costs nothing, source: nowhere}
  - {key: dies, text: never works, source: nowhere}
"""


@pytest.mark.parametrize(("limit", "verdict"), [("3", ClaimVerdict.CONFIRMED), ("4", ClaimVerdict.REFUTED)])
def test_claims_are_measured_against_their_thresholds(tmp_path, limit, verdict):
    measured, gpu, dead = result(tmp_path, CLAIMS.replace("LIMIT", limit)).claims
    assert (measured.verdict, measured.evidence) == (verdict, {"value": 3})
    assert (gpu.verdict, gpu.reason) == (ClaimVerdict.UNTESTED, "needs an NVIDIA GPU, none is visible")
    assert (dead.verdict, dead.evidence["message"]) == (ClaimVerdict.UNTESTED, "KeyError: 'boom'")


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ("", "the scenario does not name the claim's subject and conditions"),
        (", subject: a", "the scenario does not name the claim's conditions"),
        (", subject: a, conditions: b, stand_in: a toy", "only a stand-in ran, a toy"),
        (", subject: a, conditions: b, gpu: B200", "the claim is about B200, and no GPU was measured"),
    ],
)
def test_a_claim_without_its_subject_and_conditions_is_untested(tmp_path: Path, known: str, why: str) -> None:
    line = "{key: measured, text: a, source: b, thresholds: {at_least: 3}" + known + "}"
    (claim,) = result(tmp_path, f"claims: [{line}]\n").claims
    assert (claim.verdict, claim.reason) == (ClaimVerdict.UNTESTED, why)
    assert claim.evidence == {"value": 3}, "what was measured stays"


def test_claims_share_one_measurement(tmp_path: Path) -> None:
    text = """claims:
  - {key: measured, text: three is enough, source: nowhere,
     thresholds: {at_least: 3}, subject: a, conditions: b}
  - {key: measured_too, text: three is too much, source: nowhere, subject: a, conditions: b}
"""
    steps: list[tuple[int, int, str]] = []
    ended = report(tmp_path, text, progress=lambda done, total, what: steps.append((done, total, what)))
    first, second = ended.scenarios[0].claims
    assert (first.verdict, second.verdict) == (ClaimVerdict.CONFIRMED, ClaimVerdict.REFUTED)
    assert first.evidence == second.evidence == {"value": 3}
    assert steps[-1][:2] == (3, 3), "two cases and one measurement"
    (scenario,) = plan(load_targets(["MD010"]), Options(), NO_GPU)
    assert len(scenario.claims) == 4
    assert len(scenario.runs) == len(scenario.cases) + 1
    sources = dict.fromkeys(("vllm@0.19.1", "vllm@0.20.0"), "x")
    gpu = {**NO_GPU, "gpu": "a GPU", "gpus": [{}], "torch_cuda": "13.0"}
    (scenario,) = plan(load_targets(["MD001"]), Options(sources=sources), gpu)
    timed = scenario.claims["fused_is_free"]
    assert [each.request.unit for each in timed] == ["vllm@0.19.1", "vllm@0.20.0"] * 3
    assert len({id(each) for each in timed}) == 6, "each release is timed three times, in turn"


def test_a_time_budget_ends_a_run_and_leaves_the_rest_with_its_cost(tmp_path: Path) -> None:
    report(tmp_path, "")  # starts the server, which is no part of the budget here
    text = "subjects: [faulty, fixed, third]\nparameters: {third: hang}\ntimeout: 40\n"
    ended = report(tmp_path, text, time_budget=1)
    (scenario,) = ended.scenarios
    assert [case.verdict.value for case in scenario.cases] == ["reproduced", "clean", "skipped"]
    assert (scenario.verdict, ended.summary.interrupted) == (ScenarioVerdict.SKIPPED, False)
    assert scenario.reason == "--time-budget 1 s ended before every case had run"
    left = scenario.unfinished
    assert (left.cases, left.claims, left.measured) == ({"third": 1}, 0, True)
    assert 0 < left.seconds < 40, "from the cases of the same tier that ran"
    (untried,) = report(tmp_path, text, time_budget=0).scenarios
    assert (untried.unfinished.measured, untried.unfinished.seconds) == (False, 3 * 40)


def test_cheap_tiers_of_all_failures_run_first_and_claims_last() -> None:
    facts = {**NO_GPU, "gpu": "a GPU", "gpus": [{}], "torch_cuda": "13.0", "vllm": "0.33.0"}
    plans = plan(load_targets(["MD008", "MD001", "PARITY"]), Options(), facts)
    units = order_by_cost(plans)
    assert len(units) == sum(unit.skip is None for each in plans for unit in each.runs)
    tiers = [unit.case.tier if unit.request.case else None for unit in units]
    assert list(dict.fromkeys(tiers)) == [Tier.MODEL, Tier.KERNEL, Tier.ENGINE, None]
    kernels = [unit.request.fault for unit in units if unit.kind[1] == list(Tier).index(Tier.KERNEL)]
    assert list(dict.fromkeys(kernels)) == ["MD001", "PARITY", "MD008"], "the least to do first"
    begin = [(unit.request.fault, unit.case.subject) for unit in units[:6]]
    assert len(set(begin)) == 6, "control and fix of every failure before a second case of one"


@pytest.mark.slow
@pytest.mark.parametrize("name", [id_ for id_ in catalogue.load_faults() if not id_.startswith("MD9")])
def test_a_restated_algorithm_uses_a_device_unless_it_is_said_to_stay_on_the_cpu(name: str) -> None:
    (scenario,) = plan(load_targets([name]), Options(), NO_GPU)
    case = next(unit.case for unit in scenario.cases if unit.case.tier is Tier.MODEL)
    assert case.device == "cpu"
    nowhere, fault = replace(case, device="nowhere"), scenario.fault
    if fault.restated_on_cpu:
        fault.observe(nowhere, fault.faulty(nowhere))
    else:
        with pytest.raises(RuntimeError, match="nowhere"):
            fault.observe(nowhere, fault.faulty(nowhere))


def test_engines_have_a_gpu_of_their_own_and_cheap_cases_share_one() -> None:
    facts = {**NO_GPU, "gpu": "a GPU", "gpus": [{}], "torch_cuda": "13.0", "vllm": "0.33.0"}
    plans = plan(load_targets(["MD001", "MD018"]), Options(), facts)
    together = {
        (planned.request.fault, planned.request.case.tier, planned.request.together)
        for scenario in plans
        for planned in scenario.cases
        if planned.request.case is not None and planned.request.device != "cpu"
    }
    assert {("MD001", Tier.MODEL, 4), ("MD001", Tier.KERNEL, 4), ("MD018", Tier.ENGINE, 1)} <= together
    assert all(count == 1 for _, tier, count in together if tier is Tier.ENGINE)
    claims = [planned.request for scenario in plans for planned in scenario.runs if planned.request.claim]
    assert {claim.together for claim in claims} == {1}, "claims measure times"
