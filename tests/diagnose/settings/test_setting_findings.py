"""Variables without effect: those about backends are MD010, and the others are problems."""

from typing import Any

import pytest
from machine_fakes import H200, VLLM_033, probes, sources

from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.records import CheckResult, Finding


def run_check(packages: dict[str, str], **environ: str) -> CheckResult:
    return check(sources(packages, gpu=H200, environ=environ), probes())


def backend_finding(result: CheckResult) -> Finding | None:
    return next((finding for finding in result.findings if finding.id == "MD010"), None)


def test_a_misspelt_backend_variable_that_no_rule_names() -> None:
    found = backend_finding(run_check(VLLM_033, VLLM_MOE_USE_DEEPGEMM="1", FLASHINFER_CUDA_ARCHLIST="12.0f"))
    assert (found.severity, found.confidence) == ("warning", 0.9)
    assert found.evidence["settings"] == {"VLLM_MOE_USE_DEEPGEMM": "1", "FLASHINFER_CUDA_ARCHLIST": "12.0f"}
    assert "in place of VLLM_MOE_USE_DEEPGEMM use VLLM_MOE_USE_DEEP_GEMM=1" in found.next_step
    assert "FLASHINFER_CUDA_ARCH_LIST=12.0f" in found.next_step


def test_a_value_that_stops_the_engine_is_an_error() -> None:
    found = backend_finding(run_check({"vllm": "0.18.0"}, VLLM_NVFP4_GEMM_BACKEND="MARLIN"))
    assert found.severity == "error"
    assert "case sensitive" in found.why
    assert "VLLM_NVFP4_GEMM_BACKEND=marlin" in found.next_step


def test_a_setting_that_a_rule_names_is_reported_once() -> None:
    found = backend_finding(run_check(VLLM_033, VLLM_NVFP4_MOE_BACKEND="MARLIN"))
    assert found.why == "no vLLM release knows this variable"
    assert "settings" not in found.evidence
    finding = backend_finding(run_check(VLLM_033, VLLM_NVFP4_MOE_BACKEND="MARLIN", VLLM_MXFP4_USE_MARLIN="1"))
    assert finding.evidence["variables"] == {"VLLM_MXFP4_USE_MARLIN": "1"}
    assert finding.evidence["settings"] == {"VLLM_NVFP4_MOE_BACKEND": "MARLIN"}


def test_other_settings_are_problems_and_secrets_stay() -> None:
    result = run_check(VLLM_033, VLLM_LOGING_LEVEL="DEBUG", VLLM_APIKEY_TOKEN="s3cret")
    assert backend_finding(result) is None
    problems = {problem.what: problem for problem in result.problems}
    misspelt = problems["VLLM_LOGING_LEVEL: misspelt"]
    assert misspelt.severity == "warning"
    assert misspelt.next_step == "in place of VLLM_LOGING_LEVEL use VLLM_LOGGING_LEVEL=DEBUG"
    assert "s3cret" not in repr(result)
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("packages", "environ", "struck"),
    [
        ({"vllm": "0.21.1rc1.dev5+gabc"}, {"VLLM_MOE_USE_DEEPGEMM": "1"}, True),
        ({"vllm": "0.16.0"}, {"VLLM_MOE_USE_DEEPGEMM": "1"}, False),  # older than the tables
        ({"vllm": "main"}, {"VLLM_MOE_USE_DEEPGEMM": "1"}, False),
        ({}, {"VLLM_MOE_USE_DEEPGEMM": "1"}, True),  # no release reads it
        ({}, {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}, False),  # some releases do
        ({}, {"FLASHINFER_CUDA_ARCHLIST": "9.0"}, True),
        ({"flashinfer-python": "0.6.6"}, {"FLASHINFER_CUDA_ARCHLIST": "9.0"}, True),
        ({"flashinfer-python": "0.5.3"}, {"FLASHINFER_CUDA_ARCHLIST": "9.0"}, False),
        (VLLM_033, {"VLLM_MOE_USE_DEEP_GEMM": "1", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}, False),
    ],
)
def test_which_releases_are_judged(packages: dict[str, str], environ: dict[str, Any], struck: bool) -> None:
    found = backend_finding(run_check(packages, **environ))
    assert (found is not None) is struck
    if found is not None:
        assert found.confidence == (0.5 if "dev" in packages.get("vllm", "") else 0.9)
