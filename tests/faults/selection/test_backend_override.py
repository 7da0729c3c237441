"""MD010: the control loses settings, the fix answers each, and only a real package decides claims."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fault_cases import by_figures, claim_of, judge, run
from vllm_stub import forget, write

from moedoctor.faults.selection.backend_override import BackendOverride
from moedoctor.fixes.backends.release_tables import load_releases
from moedoctor.results import CaseVerdict, ClaimVerdict, Tier, UnavailableError

FAULT = BackendOverride()
CUTLASS, MARLIN = "FLASHINFER_CUTLASS", "--moe-backend marlin"
FP4 = "VLLM_USE_FLASHINFER_MOE_FP4"
SEED = {"setting": "VLLM_NVFP4_MOE_BACKEND=MARLIN", "wants": "MARLIN", "activation": "relu2_no_mul"}


@pytest.mark.parametrize("release", load_releases())
def test_in_every_release_the_variable_is_lost_and_the_fix_honors_it(release: str) -> None:
    judged = run(FAULT, "faulty", **SEED, release=release)
    assert judged.verdict is CaseVerdict.REPRODUCED
    assert judged.evidence["selected"] == judged.evidence["without"] == "FLASHINFER_CUTLASS"
    assert judged.figure == "FLASHINFER_CUTLASS all the same, one warning in the log names it"
    judged = run(FAULT, "fixed", **SEED, release=release)
    assert (judged.verdict, judged.figure) == (CaseVerdict.CLEAN, "MARLIN selected, as asked for")


@pytest.mark.parametrize(
    ("release", "setting", "others", "selected", "warned", "advice"),
    [
        ("0.18.0", "VLLM_NVFP4_GEMM_BACKEND=marlin", {}, CUTLASS, False, MARLIN),
        ("0.33.0", f"{FP4}=0", {"wants": "VLLM_CUTLASS"}, CUTLASS, True, "--moe-backend cutlass"),
        ("0.18.0", MARLIN, {"scheme": "mxfp4"}, "TRITON", False, "VLLM_MXFP4_USE_MARLIN=1"),
        ("0.21.0", "vllm_test_force_fp8_marlin=1", {"scheme": "fp8"}, CUTLASS, False, MARLIN),
    ],
)
def test_selection_warning_and_advice(release, setting, others, selected, warned, advice):
    point = {"release": release, "setting": setting, "wants": "MARLIN", **others}
    point |= {"capability": "9.0"} if "scheme" in others else {}
    judged = run(FAULT, "faulty", **point)
    assert judged.verdict is CaseVerdict.REPRODUCED
    answers = [judged.evidence[name] for name in ("selected", "warned", "advice")]
    assert answers == [selected, warned, ""]
    assert judged.figure.endswith("one warning in the log names it" if warned else "no warning")
    judged = run(FAULT, "fixed", **point)
    assert (judged.verdict, judged.evidence["advice"]) == (CaseVerdict.CLEAN, advice)
    assert judged.figure == f"no effect, and a message: use {advice}"


@pytest.mark.parametrize(
    ("setting", "wants", "figure"),
    [
        ("VLLM_TEST_FORCE_FP8_MARLIN=1", "MARLIN", "MARLIN selected, as asked for"),
        ("--moe-backend MARLIN", "MARLIN", "MARLIN selected, as asked for"),
        ("VLLM_USE_FLASHINFER_MOE_FP4=true", "VLLM_CUTLASS", "refused: "),
        ("VLLM_NVFP4_GEMM_BACKEND=MARLIN", "MARLIN", "refused: the choices are case sensitive"),
    ],
)
def test_an_obeyed_or_refused_setting_is_no_failure(setting: str, wants: str, figure: str) -> None:
    judged = run(FAULT, "faulty", release="0.23.0", setting=setting, wants=wants)
    assert judged.verdict is CaseVerdict.CLEAN
    assert judged.figure.startswith(figure)


def test_a_setting_that_silently_selects_another_backend_is_reproduced() -> None:
    selected = {"selected": "VLLM_CUTLASS", "without": "FLASHINFER_CUTLASS"}
    evidence = {**selected, "refused": "", "warned": False, "advice": ""}
    judged = judge(FAULT, evidence, "installed", **SEED, release="0.21.0")
    assert (judged.verdict, judged.figure) == (CaseVerdict.REPRODUCED, "VLLM_CUTLASS, not MARLIN, no warning")


REAL = {
    "vllm": "0.17.1",
    "flashinfer_usable": True,
    "automatic": "FLASHINFER_CUTLASS",
    "with_flag_marlin": "MARLIN",
    "with_flag_cutlass": "VLLM_CUTLASS",
    "variable_declared": False,
    "with_variable_MARLIN": "FLASHINFER_CUTLASS",
    "with_variable_VLLM_CUTLASS": "FLASHINFER_CUTLASS",
    "gemm_declared": True,
    "with_gemm_variable": "FLASHINFER_CUTLASS",
    "gemm_capitals": "ValueError: Invalid value 'MARLIN'",
    "gemm_small": "",
}
"""The answers of a release, as `InstalledSelection.list_overrides` returns them."""


def judge_claim(key: str, answers: Mapping[str, Any]) -> tuple[ClaimVerdict, str]:
    judged = by_figures(claim_of(FAULT, key), {}, answers)
    return judged.verdict, str(judged.reason)


@pytest.mark.parametrize(
    ("key", "changed", "verdict", "why"),
    [
        ("no_override", {}, "refuted", "--moe-backend marlin selects MARLIN"),
        ("no_override", {"with_flag_marlin": "VLLM_CUTLASS"}, "confirmed", "marlin selects VLLM_CUTLASS"),
        ("no_variable", {}, "confirmed", "does not declare it; VLLM_NVFP4_MOE_BACKEND changes nothing"),
        ("no_variable", {"variable_declared": True}, "refuted", "0.17.1: declares it"),
        ("no_variable", {"with_variable_MARLIN": "MARLIN"}, "refuted", "changes the selection"),
        ("gemm_crashes", {}, "confirmed", "MARLIN: ValueError: Invalid value 'MARLIN'; marlin: taken"),
        ("gemm_crashes", {"gemm_capitals": ""}, "refuted", "MARLIN: taken"),
        ("gemm_crashes", {"gemm_declared": False}, "untested", "does not read it any more"),
        ("marlin_by_default", {}, "refuted", "selects FLASHINFER_CUTLASS on SM120"),
        ("marlin_by_default", {"automatic": "MARLIN"}, "confirmed", "selects MARLIN on SM120"),
        ("marlin_by_default", {"vllm": "0.21.0"}, "untested", "the claim is about 0.17.1"),
        ("marlin_by_default", {"flashinfer_usable": False}, "untested", "with FlashInfer"),
    ],
)
def test_the_claims_of_38971_are_decided_by_what_a_release_answers(key, changed, verdict, why):
    judged, reason = judge_claim(key, {**REAL, **changed})
    assert judged.value == verdict
    assert why in reason


@pytest.mark.parametrize(
    ("key", "recorded"),
    [
        ("no_override", "--moe-backend marlin selects MARLIN in 24 of 24 releases"),
        ("no_variable", "0 of 24 releases read it"),
        ("gemm_crashes", "12 of the 12 releases that read it (to 0.23.0) refuse MARLIN"),
        ("marlin_by_default", "FLASHINFER_CUTLASS on SM120 if FlashInfer is usable, and MARLIN if it"),
    ],
)
def test_without_a_vllm_nothing_is_confirmed_or_refuted(key: str, recorded: str) -> None:
    verdict, reason = judge_claim(key, {"not_asked": "vllm is not installed here"})
    assert verdict is ClaimVerdict.UNTESTED
    assert reason.startswith("vllm is not installed here; recorded from the releases' own code: ")
    assert recorded in reason


def test_the_claims_are_put_to_the_installed_package(stub: Path) -> None:
    measure = claim_of(FAULT, "no_override").measure
    answers = measure("", "cpu", {}).evidence
    assert answers["vllm"] == "0.21.0"
    assert answers["automatic"] == "MARLIN", "the stub's VLLM_CUTLASS wants a gate"
    assert (answers["with_flag_marlin"], answers["with_flag_cutlass"]) == ("MARLIN", "VLLM_CUTLASS")
    assert (answers["gemm_declared"], answers["variable_declared"]) == (False, False)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with forget():
        monkeypatch.syspath_prepend(str(write(tmp_path)))
        yield tmp_path


def test_an_installed_package_is_asked_with_the_setting_in_its_environment(stub: Path) -> None:
    evidence = run(FAULT, "installed", Tier.LIBRARY, **SEED, release="0.21.0").evidence
    same = {"selected": "MARLIN", "without": "MARLIN"}
    assert evidence == {**same, "refused": "", "warned": True, "advice": ""}
    assert "VLLM_NVFP4_MOE_BACKEND" not in os.environ
    asked = {"release": "0.21.0", "setting": MARLIN, "wants": "MARLIN"}
    evidence = run(FAULT, "installed", Tier.LIBRARY, **asked).evidence
    other = {"selected": "MARLIN", "without": "VLLM_CUTLASS"}
    assert evidence == {**other, "refused": "", "warned": False, "advice": ""}


def test_a_point_about_another_release_is_skipped(stub: Path) -> None:
    with pytest.raises(UnavailableError, match=r"is about vLLM 0\.33\.0, and 0\.21\.0 is installed"):
        run(FAULT, "installed", Tier.LIBRARY, **SEED, release="0.33.0")
