"""MD004: the control shows every symptom, our resolver none, wrong resolvers are noticed, and claims."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moedoctor.diagnose.cuda.instructions import find_compilers
from moedoctor.faults.selection import arch_suffix_lab as lab
from moedoctor.faults.selection.arch_suffix import ArchSuffix, ArchSuffixParameters
from moedoctor.fixes.arch.flashinfer import ArchReading
from moedoctor.interfaces import Measurement
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    ClaimVerdict,
    Observation,
    ScenarioVerdict,
    Tier,
    UnavailableError,
)
from moedoctor.runner.plan import Options, plan
from moedoctor.runner.run import run
from moedoctor.scenario.file import Scenario, load

FAULT = ArchSuffix()
SCENARIO = Path(__file__).parents[3] / "scenarios" / "arch_suffix.yaml"
LIMITS: Mapping[str, Mapping[str, float]] = {
    "a_lacks_instructions": {"min_lacking": 1},
    "f_needs_cuda": {"claimed_major": 13, "claimed_minor": 2},
    "list_is_workaround": {"min_share": 1.0},
}


def answers(*targets: str, error: str | None = None) -> lab.Resolver:
    """A resolver that always gives the same answer."""
    return lambda capability, cuda, arch_list: ArchReading(targets, error)


def scenario() -> Scenario:
    return load(SCENARIO, faults={"MD004": FAULT}, subject_kind=lambda name: name)


def judged(resolve: lab.Resolver, **parameters: Any) -> tuple[CaseVerdict, str, Mapping[str, Any]]:
    point = ArchSuffixParameters(**parameters)
    observation = lab.observe(point, resolve)
    judgement = FAULT.judge(Case("MD004", "faulty", Tier.MODEL, point.model_dump(mode="json")), observation)
    return judgement.verdict, judgement.figure, observation.evidence


@pytest.fixture(params=["compilers", "facts"])
def decided_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs with the compilers of this machine, and again without compilers."""
    if request.param == "facts":
        monkeypatch.setattr(lab, "find_compilers", lambda: ())
    elif not find_compilers():
        pytest.skip("needs ptxas: pip install triton, or CUDA on PATH")
    return str(request.param)


@pytest.mark.parametrize("point", scenario().points, ids=FAULT.describe)
def test_the_control_fails_and_the_fix_does_not(point: Mapping[str, Any], decided_by: str) -> None:
    for subject, verdict in (("faulty", CaseVerdict.REPRODUCED), ("fixed", CaseVerdict.CLEAN)):
        case = Case("MD004", subject, Tier.MODEL, dict(point))
        assert FAULT.judge(case, FAULT.observe(case, None)).verdict is verdict


def test_the_verdict_does_not_depend_on_who_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if a compiler disagrees with the recorded table."""
    compilers = find_compilers()
    for point in scenario().points:
        monkeypatch.setattr(lab, "find_compilers", lambda: compilers)
        by_compiler = judged(lab.faulty, **point)
        monkeypatch.setattr(lab, "find_compilers", lambda: ())
        by_facts = judged(lab.faulty, **point)
        assert by_compiler[:2] == by_facts[:2]


@pytest.mark.parametrize(
    ("answer", "parameters", "figure"),
    [
        (answers("120"), {}, "120 lacks tensormap_replace, setmaxnreg, mma_mxf4nvf4, cvt_e2m1x2"),
        (
            answers("100"),
            {"capability": "10.0"},
            "100 lacks tensormap_replace, setmaxnreg, tcgen05, cvt_e2m1x2",
        ),
        (answers("120f"), {"cuda": "12.8"}, "120f is unknown to CUDA 12.8"),
        (answers("120f", "130"), {}, "130 is unknown to CUDA 13.0"),
        (answers("120+PTX"), {}, "120+PTX is unknown to CUDA 13.0"),
        (answers("120a"), {"capability": "12.1"}, "120a does not load on 12.1"),
        (answers("90a", "100a"), {}, "90a 100a does not load on 12.0"),
        (answers(error="ValueError: no"), {}, "no target, although 120a or 120f would do"),
        (answers(error="RuntimeError: no"), {"cuda": "12.8"}, "no target, although 120a would do"),
    ],
)
def test_each_symptom(answer: lab.Resolver, parameters: dict[str, str], figure: str, decided_by: str) -> None:
    assert judged(answer, **parameters)[:2] == (CaseVerdict.REPRODUCED, figure)


@pytest.mark.parametrize(
    ("answer", "parameters"),
    [
        (answers("120a"), {}),
        (answers("120f"), {}),
        (answers("120f"), {"capability": "12.1"}),
        (answers("90a", "120f", "121a"), {}),
        (answers("120", "120a"), {}),
        (answers("100f"), {"capability": "10.3"}),
        (answers("120a"), {"cuda": "12.8"}),
        (answers(error="too old"), {"cuda": "12.6"}),
        (answers(error="too old"), {"cuda": "12.8", "capability": "12.1"}),
    ],
)
def test_right_answers_are_no_symptom(
    answer: lab.Resolver, parameters: dict[str, str], decided_by: str
) -> None:
    assert judged(answer, **parameters)[0] is CaseVerdict.CLEAN


def test_the_compiler_is_quoted() -> None:
    compiler = next(reversed(find_compilers()), None)
    if compiler is None:
        pytest.skip("needs ptxas: pip install triton, or CUDA on PATH")
    cuda = f"{compiler.cuda[0]}.{compiler.cuda[1]}"
    _, _, evidence = judged(lab.faulty, arch_list="12.0", cuda=cuda)
    assert evidence["decided_by"] == str(compiler)
    assert "not supported on .target 'sm_120'" in evidence["checked"][0]["said"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"capability": "9.0"}, "capability"),
        ({"cuda": "11.8"}, "must be a release from 12.0 to 13.x"),
        ({"cuda": "13.0.88"}, "must be a release"),
        ({"cuda": "14.0"}, "must be a release"),
        ({"arch_list": "x" * 201}, "arch_list"),
        ({"gpu": "12.0"}, "gpu"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ArchSuffixParameters(**parameters)  # type: ignore[arg-type]


def test_conclusions_count_the_symptoms() -> None:
    def result(subject: str, answer: lab.Resolver, **parameters: str) -> CaseResult:
        verdict, figure, evidence = judged(answer, **parameters)
        return CaseResult(subject, Tier.MODEL, parameters, verdict, evidence, figure=figure)

    results = [
        result("faulty", answers("120")),
        result("faulty", answers("120+PTX")),
        result("faulty", answers(error="no")),
        result("faulty", answers("120a"), capability="12.1"),
        result("faulty", answers("120")),
        result("fixed", answers("120f")),
    ]
    assert FAULT.conclude(results) == {
        "symptoms": {
            "faulty": {"does not load": 1, "missing instructions": 2, "no target": 1, "unknown target": 1}
        }
    }
    assert FAULT.conclude(results[-1:]) == {}


def claim(key: str) -> tuple[ClaimVerdict, str, Mapping[str, Any]]:
    test = next(test for test in FAULT.claims if test.key == key)
    assert test.measure is not None
    measurements = [Measurement("", test.measure("", "cpu", {}))]
    judgement = test.judge([], measurements, LIMITS[key])
    return judgement.verdict, str(judgement.reason), judgement.evidence


def decide(key: str, evidence: Mapping[str, Any], **limits: float) -> tuple[ClaimVerdict, str]:
    test = next(test for test in FAULT.claims if test.key == key)
    units = [Measurement("", Observation(evidence))]
    judgement = test.judge([], units, {**LIMITS[key], **limits})
    return judgement.verdict, str(judgement.reason)


@pytest.mark.skipif(len(find_compilers()) < 2, reason="needs several compilers: pip install triton")
def test_the_claims_on_this_machine() -> None:
    verdict, reason, evidence = claim("a_lacks_instructions")
    assert verdict is ClaimVerdict.REFUTED
    assert "120a takes all 6 instructions" in reason
    assert all(by["120a"] == [] for by in evidence["refused"].values() if "120a" in by)
    assert any("tensormap_replace" in by["120"] for by in evidence["refused"].values() if "120" in by)
    verdict, reason, _ = claim("f_needs_cuda")
    assert verdict is ClaimVerdict.REFUTED
    assert "accepted by ptxas 12.9" in reason
    verdict, reason, _ = claim("list_is_workaround")
    assert verdict is ClaimVerdict.CONFIRMED
    assert "42 of 42 releases" in reason
    assert "up to 0.6.6" in reason


def test_without_a_compiler_every_claim_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "find_compilers", lambda: ())
    for test in FAULT.claims:
        assert test.measure is not None
        with pytest.raises(UnavailableError, match="needs ptxas or nvcc"):
            test.measure("", "cpu", {})


def test_what_decides_that_120a_lacks_something() -> None:
    table = {"needed": ["wgmma", "cvt"], "compilers": {}, "refused": {"ptxas 13": {"120a": [], "120f": []}}}
    assert decide("a_lacks_instructions", table)[0] is ClaimVerdict.REFUTED
    table["refused"] = {"ptxas 13": {"120a": ["cvt"], "120f": []}}
    verdict, reason = decide("a_lacks_instructions", table)
    assert verdict is ClaimVerdict.CONFIRMED
    assert "1 of 2 or more" in reason
    assert "120f takes others in ptxas 13" in reason
    table["refused"] = {"ptxas 12.6": {}}
    assert decide("a_lacks_instructions", table)[0] is ClaimVerdict.UNTESTED


def test_what_decides_which_cuda_the_family_target_needs() -> None:
    def rows(*accepted: tuple[int, int, bool]) -> dict[str, Any]:
        return {
            "rows": [
                {"compiler": f"ptxas {a}.{b}", "cuda": [a, b], "accepted": yes, "said": "" if yes else "no"}
                for a, b, yes in accepted
            ]
        }

    assert decide("f_needs_cuda", rows((12, 8, False), (12, 9, True)))[0] is ClaimVerdict.REFUTED
    assert (
        decide("f_needs_cuda", rows((12, 8, False), (13, 1, False), (13, 2, True)))[0]
        is ClaimVerdict.CONFIRMED
    )
    assert decide("f_needs_cuda", rows((13, 2, True)))[0] is ClaimVerdict.UNTESTED
    claimed_129 = {"claimed_major": 12, "claimed_minor": 9}
    assert (
        decide("f_needs_cuda", rows((12, 8, False), (12, 9, True)), **claimed_129)[0]
        is ClaimVerdict.CONFIRMED
    )


def test_what_decides_whether_the_list_is_honoured() -> None:
    figures: dict[str, Any] = {
        "readings": {"120a -> 120f": ["0.6.6"], "120f -> 120f": ["0.6.7"]},
        "installed": None,
        "accepting": ["ptxas 13"],
        "refusing": {},
    }
    assert decide("list_is_workaround", figures)[0] is ClaimVerdict.CONFIRMED
    figures["installed"] = {"release": "9.9", "targets": ["120"]}
    verdict, reason = decide("list_is_workaround", figures)
    assert verdict is ClaimVerdict.REFUTED
    assert "the installed 9.9 for 120" in reason
    figures |= {"installed": None, "readings": {"120a -> 120f": ["0.6.6"], "120f -> 120": ["0.6.7"]}}
    assert decide("list_is_workaround", figures)[0] is ClaimVerdict.REFUTED


def test_the_workaround_is_untested_where_no_compiler_knows_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"compiler": "ptxas 12.8", "cuda": [12, 8], "accepted": False, "said": "no"}
    monkeypatch.setattr(lab, "measure_family_target", lambda *_: {"rows": [row]})
    with pytest.raises(UnavailableError, match="knows sm_120f"):
        lab.measure_workaround("", "cpu", {})


def test_a_run_proves_it() -> None:
    options = Options(subjects=("faulty", "fixed"), only=(("capability", "12.1"),))
    facts = {"gpu": None, "torch": None, "vllm": None, "flashinfer": None}
    (result,) = run(plan([scenario()], options, facts), facts, parallel=2).scenarios
    assert result.verdict is ScenarioVerdict.PROVED, result.reason
    assert {(case.subject, case.verdict) for case in result.cases} == {
        ("faulty", CaseVerdict.REPRODUCED),
        ("fixed", CaseVerdict.CLEAN),
    }
    assert result.cases[0].figure
