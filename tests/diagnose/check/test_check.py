"""Which known failures `check` finds on made-up machines, which it does not, and with which facts."""

from typing import Any

import pytest
from machine_fakes import PINNED, Nvml, probes, sources

from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.pinning import Pinning
from moedoctor.diagnose.check.records import CheckResult
from moedoctor.diagnose.cuda.jit_cache import JitCache, JitFolder
from moedoctor.processes.cuda_tools import Tool
from tests.cases import load_cases

H200 = ("NVIDIA H200", "9.0")
RTX_5090 = ("NVIDIA GeForce RTX 5090", "12.0")
B200 = ("NVIDIA B200", "10.0")
GB10 = ("NVIDIA GB10", "12.1")
VLLM_018 = {"vllm": "0.18.0", "torch": "2.10.0+cu129", "flashinfer-python": "0.6.6"}
VLLM_033 = {"vllm": "0.33.0", "torch": "2.14.0+cu130", "flashinfer-python": "0.7.2.post1"}


def found(result: CheckResult) -> dict[str, str]:
    return {finding.id: finding.severity for finding in result.findings}


def evidence(result: CheckResult, id: str) -> dict[str, Any]:
    return dict(
        next(finding.evidence for finding in (*result.findings, *result.conditional) if finding.id == id)
    )


def test_wsl_with_vllm_018() -> None:
    result = check(sources(VLLM_018, gpu=H200, wsl=True, torch_cuda="12.9"), probes())
    assert found(result) == {
        "MD001": "error",  # 0.20.0 has the NaN check
        "MD011": "error",  # MD001 makes duplicates, FlashInfer 0.6.6 cannot take them
        # These need --cpu-offload-gb, which is off by default.
        "MD003": "warning",  # no UVA on WSL before 0.24.0, and by choice after it
        "MD005": "warning",
        "MD020": "warning",
    }
    conditional = {finding.id for finding in result.conditional}
    assert {"MD002", "MD008", "MD009"} <= conditional
    # This release does not use the V2 model runner, and MD004 and MD016 do not affect an H200.
    assert {"MD013", "MD004", "MD016"}.isdisjoint(conditional)
    assert evidence(result, "MD003") == {"vllm": "0.18.0", "uva": "no: vLLM 0.18.0 never pins memory on WSL"}
    assert result.exit_code == 1


def test_clean_h200_with_vllm_033() -> None:
    result = check(sources(VLLM_033, gpu=H200), probes())
    assert found(result) == {}
    assert not result.problems
    assert result.exit_code == 0
    # No machine can rule these out; MD006 and MD007 need a build that no release is.
    depends = {finding.id for finding in result.conditional}
    assert {"MD001", "MD012", "MD014", "MD015"} <= depends
    assert {"MD002", "MD003", "MD005", "MD006", "MD007", "MD009", "MD010"}.isdisjoint(depends)
    assert all(finding.severity == "note" and finding.needs for finding in result.conditional)


def test_no_packages() -> None:
    result = check(sources({}), probes())
    assert (result.findings, result.conditional, result.problems, result.exit_code) == ((), (), (), 2)
    assert result.reasons == (result.without_vllm,)
    assert result.environment["collectors"] == {}


GPUS = {"H200": H200, "RTX_5090": RTX_5090, "B200": B200}
CASES = load_cases(__file__)


@pytest.mark.parametrize(
    ("id", "packages", "gpu", "system", "environ", "severity"), CASES["the_severity_of_an_entry_on_a_machine"]
)
def test_the_severity_of_an_entry_on_a_machine(
    id: str,
    packages: dict[str, str],
    gpu: str,
    system: str,
    environ: dict[str, str],
    severity: str | None,
) -> None:
    machine = {"gpu": GPUS[gpu], "wsl": system == "WSL"}
    result = check(sources(packages, **machine, environ=environ), probes())
    findings = {finding.id: finding for finding in (*result.findings, *result.conditional)}
    assert (findings[id].severity if id in findings else None) == severity
    if id == "MD010" and severity:
        assert findings[id].evidence["variables"] == environ


def test_without_a_gpu_the_confidence_is_half_and_says_so() -> None:
    here = check(sources(VLLM_018, gpu=H200, torch_cuda="12.9"), probes())
    away = check(sources(VLLM_018, torch_cuda="12.9"), probes())
    with_gpu, without = (
        next(finding for finding in result.findings if finding.id == "MD001") for result in (here, away)
    )
    assert without.confidence == pytest.approx(with_gpu.confidence / 2)
    assert "none here" in without.evidence["gpu"]
    assert "gpu" not in with_gpu.evidence
    # A setting has no effect with or without a GPU.
    setting = sources(VLLM_033, environ={"VLLM_NVFP4_MOE_BACKEND": "MARLIN"})
    (ignored,) = check(setting, probes()).findings
    assert (ignored.id, ignored.confidence) == ("MD010", 0.9)
    # A rule about a capability does not apply without a GPU.
    assert "MD011" not in found(away)


def test_the_expert_cache_is_recognised_by_its_file() -> None:
    file = "vllm/model_executor/layers/fused_moe/expert_weight_provider.py"
    result = check(sources(VLLM_033, gpu=H200, files=(file,)), probes())
    assert found(result) == {"MD006": "warning"}
    assert evidence(result, "MD006")["file"] == file


@pytest.mark.parametrize(
    ("release", "gpu", "cuda", "setting", "reason"),
    CASES["what_flashinfer_would_build_is_judged_for_this_gpu"],
)
def test_what_flashinfer_would_build_is_judged_for_this_gpu(
    release: str, gpu: tuple[str, str], cuda: tuple[int, int], setting: str | None, reason: str | None
) -> None:
    environ = {} if setting is None else {"FLASHINFER_CUDA_ARCH_LIST": setting}
    tool = Tool("nvcc", "/nvcc", cuda, ".".join(map(str, cuda)))
    made = sources({"flashinfer-python": release}, gpu=gpu, environ=environ)
    result = check(made, probes(nvcc=lambda environ: tool))
    finding = next((item for item in result.findings if item.id == "MD004"), None)
    if reason is None or finding is None:
        assert finding is reason
        return
    assert reason in finding.why
    if setting is not None:
        assert finding.evidence["variables"] == {"FLASHINFER_CUDA_ARCH_LIST": setting}
        assert "FLASHINFER_CUDA_ARCH_LIST=" in finding.next_step


def test_a_cache_of_plain_kernels_is_found_for_the_installed_release_only() -> None:
    def cached(release: str) -> JitCache:
        return JitCache("/x", (JitFolder(release, ("120",), 3, ("fused_moe_120",)),))

    made = sources({"flashinfer-python": "0.7.2"}, gpu=RTX_5090)
    result = check(made, probes(jit_cache=lambda environ: cached("0.7.2")))
    assert found(result) == {"MD004": "warning"}
    assert evidence(result, "MD004")["jit_cache"] == {"0.7.2/120": ["fused_moe_120"]}
    assert found(check(made, probes(jit_cache=lambda environ: cached("0.6.6")))) == {}


def test_findings_of_one_entry_are_merged_into_the_worst() -> None:
    environ = {"FLASHINFER_CUDA_ARCH_LIST": "12.0"}
    made = sources({"flashinfer-python": "0.6.6"}, gpu=RTX_5090, environ=environ)
    result = check(made, probes())
    (finding,) = [item for item in result.findings if item.id == "MD004"]
    assert finding.confidence == 0.9
    assert "plain 120" in finding.why
    assert "known to crash" in finding.why
    assert finding.evidence["builds_for"] == ["120"]
    assert finding.evidence["flashinfer-python"] == "0.6.6"


def test_each_visible_gpu_is_judged() -> None:
    made = sources({"flashinfer-python": "0.6.4"}, gpu=H200)
    two_gpus = type(made)(**{**vars(made), "nvml": lambda: Nvml([H200, RTX_5090])})
    assert evidence(check(two_gpus, probes()), "MD004")["capability"] == "12.0"
    hidden = {**made.environ, "CUDA_VISIBLE_DEVICES": "0"}
    only = type(made)(**{**vars(two_gpus), "environ": hidden})
    assert found(check(only, probes())) == {}


# Problems: faults of the installation that are not in the catalogue.


def what(result: CheckResult) -> dict[str, str]:
    return {problem.what: problem.severity for problem in result.problems}


def test_packages_and_drivers_that_do_not_fit_are_problems() -> None:
    old = check(sources({"torch": "2.13.0+cu130"}, gpu=H200, driver_cuda=12080), probes())
    assert what(old) == {"the driver's CUDA 12.8 with torch 2.13.0+cu130": "error"}
    packages = {"vllm": "0.33.0", "torch": "2.11.0+cu130", "flashinfer-python": "0.6.8.post1"}
    result = check(sources(packages, gpu=H200), probes())
    assert what(result) == {
        "torch 2.11.0+cu130 with vllm 0.33.0": "warning",
        "flashinfer-python 0.6.8.post1 with vllm 0.33.0": "warning",
    }
    assert result.exit_code == 1
    assert result.problems[0].next_step == "pip install 'torch==2.14.0'"


@pytest.mark.parametrize(
    ("release", "variables", "severity"),
    [
        ("0.6.6", {}, "error"),
        ("0.6.6", {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}, "warning"),
        ("0.7.2", {}, "warning"),
    ],
)
def test_kernels_of_another_release(release: str, variables: dict[str, str], severity: str) -> None:
    packages = {"flashinfer-python": release, "flashinfer-cubin": "0.6.4"}
    result = check(sources(packages, gpu=H200, environ=variables), probes())
    assert what(result) == {f"flashinfer-cubin 0.6.4 with flashinfer-python {release}": severity}


def test_pinning_that_fails_is_a_problem_and_pinning_that_works_is_a_fact() -> None:
    broken = Pinning(tried=True, works=False, reason="CUDA error: out of memory")
    result = check(sources({"torch": "2.13.0+cu130"}, gpu=H200), probes(pinning=lambda: broken))
    assert what(result) == {"pinned memory cannot be had": "error"}
    assert result.problems[0].evidence == {"error": "CUDA error: out of memory"}
    works = check(sources({"torch": "2.13.0+cu130"}, gpu=H200), probes())
    assert works.environment["pinned_memory"] == vars(PINNED)
    assert not works.problems


def test_pinning_is_not_tried_without_a_gpu_or_without_cuda() -> None:
    def never() -> Pinning:
        raise AssertionError

    for made in (sources({"torch": "2.13.0"}), sources({"torch": "2.13.0"}, gpu=H200, torch_cuda="")):
        result = check(made, probes(pinning=never))
        assert result.environment["collector_errors"] == {}
        pinned = result.environment["pinned_memory"]
        assert (pinned["tried"], pinned["works"]) == (False, None)
        assert "GPU" in pinned["reason"] or "without CUDA" in pinned["reason"]


def test_flashinfer_without_a_compiler_and_without_kernels() -> None:
    made = sources({"flashinfer-python": "0.7.2"}, gpu=H200)
    assert what(check(made, probes(nvcc=lambda environ: None))) == {"FlashInfer cannot compile": "warning"}
    assert what(check(made, probes())) == {}
    with_kernels = sources({"flashinfer-python": "0.7.2", "flashinfer-jit-cache": "0.7.2+cu130"}, gpu=H200)
    assert what(check(with_kernels, probes(nvcc=lambda environ: None))) == {}
    assert what(check(sources({"flashinfer-python": "0.7.2"}), probes(nvcc=lambda environ: None))) == {}
