"""Known failures that `check` finds on made-up machines or does not find, and the facts that it gives."""

from typing import Any
from unittest.mock import Mock

import pytest
from machine_fakes import H200, PINNED, VLLM_018, VLLM_033, Nvml, probes, sources

from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.pinning import Pinning
from moedoctor.diagnose.check.records import CheckResult
from moedoctor.diagnose.cuda.jit_cache import JitCache, JitFolder
from moedoctor.processes.cuda_tools import Tool

RTX_5090 = ("NVIDIA GeForce RTX 5090", "12.0")
B200 = ("NVIDIA B200", "10.0")
GB10 = ("NVIDIA GB10", "12.1")


def found(result: CheckResult) -> dict[str, str]:
    return {finding.id: finding.severity for finding in result.findings}


def evidence(result: CheckResult, id: str) -> dict[str, Any]:
    known = {finding.id: finding.evidence for finding in (*result.conditional, *result.findings)}
    return dict(known[id])


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


V2, PADDING = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_MOE_SKIP_PADDING"
NO_UVA, NO_PIN = (f"VLLM_WEIGHT_OFFLOADING_DISABLE_{name}" for name in ("UVA", "PIN_MEMORY"))
AT_11 = {"torch": "2.11.0", "flashinfer-python": "0.6.8.post1"}
WSL, LINUX = True, False
STRUCK: list[tuple[str, dict[str, str], tuple[str, str], bool, dict[str, str], str | None]] = [
    # entry, packages, GPU, WSL, variables, severity
    ("MD001", {**AT_11, "vllm": "0.19.1"}, H200, WSL, {}, "error"),
    ("MD001", {**AT_11, "vllm": "0.20.0"}, H200, WSL, {}, "note"),
    ("MD001", {**VLLM_018, "vllm": "0.18.2rc1.dev25+gef53395e2"}, H200, LINUX, {}, "error"),
    ("MD001", {**AT_11, "vllm": "dev-build"}, H200, WSL, {}, None),
    ("MD002", {**AT_11, "vllm": "0.33.0"}, H200, WSL, {}, "note"),
    # Some models use the V2 model runner, which does not start in this case.
    ("MD002", {"vllm": "0.21.0"}, H200, WSL, {}, "note"),
    ("MD002", {"vllm": "0.22.0"}, H200, WSL, {}, "error"),
    ("MD002", {"vllm": "0.22.0"}, H200, WSL, {V2: "0"}, "note"),
    ("MD002", {"vllm": "0.29.0"}, H200, WSL, {}, "error"),
    ("MD002", {"vllm": "0.30.0"}, H200, WSL, {}, "note"),
    ("MD002", {"vllm": "0.25.1"}, H200, LINUX, {NO_PIN: "1"}, "note"),
    ("MD003", {**AT_11, "vllm": "0.33.0"}, H200, WSL, {}, "warning"),
    ("MD003", VLLM_018, H200, LINUX, {}, None),
    ("MD003", VLLM_018, H200, LINUX, {NO_UVA: "1"}, "warning"),  # memory is still pinned, so not MD002
    ("MD003", VLLM_033, H200, LINUX, {NO_UVA: "1", NO_PIN: "1"}, "warning"),
    ("MD004", {"flashinfer-python": "0.6.7"}, RTX_5090, LINUX, {}, "error"),
    ("MD005", VLLM_018, H200, LINUX, {}, None),
    ("MD005", {**AT_11, "vllm": "0.26.0"}, H200, WSL, {}, "warning"),
    # Dynamo of torch 2.13 can trace the offloader; a torch that was not run gets a warning.
    ("MD005", {"vllm": "0.18.0", "torch": "2.9.1"}, H200, WSL, {}, "note"),
    ("MD005", {"vllm": "0.18.0", "torch": "2.10.0"}, H200, WSL, {}, "warning"),
    ("MD005", {"vllm": "0.27.0", "torch": "2.12.1"}, H200, WSL, {}, "warning"),
    ("MD005", {"vllm": "0.27.0", "torch": "2.13.0"}, H200, WSL, {}, None),
    ("MD005", {"vllm": "0.33.0", "torch": "2.14.0"}, H200, WSL, {}, "warning"),
    ("MD005", {"vllm": "0.33.0", "torch": "2.15.1"}, H200, WSL, {}, "note"),
    ("MD008", {**AT_11, "vllm": "0.19.1"}, H200, WSL, {}, "note"),
    ("MD010", {"vllm": "0.23.0"}, H200, LINUX, {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}, None),
    ("MD010", {"vllm": "0.24.0"}, H200, LINUX, {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}, "warning"),
    ("MD010", {"vllm": "0.18.0"}, H200, LINUX, {"VLLM_NVFP4_MOE_BACKEND": "1"}, "warning"),
    ("MD010", {"vllm": "0.33.0"}, H200, LINUX, {"VLLM_LOGGING_LEVEL": "1"}, None),
    ("MD011", {**AT_11, "vllm": "0.19.1"}, H200, WSL, {}, "error"),
    ("MD011", {**AT_11, "vllm": "0.20.0"}, H200, WSL, {}, "note"),
    # The V2 runner ignores offload until 0.28.0.
    ("MD013", {"vllm": "0.18.0"}, H200, LINUX, {V2: "1"}, "warning"),
    ("MD013", {"vllm": "0.23.0"}, H200, LINUX, {}, "note"),
    ("MD013", {"vllm": "0.25.1"}, H200, LINUX, {V2: "0"}, None),
    ("MD013", {"vllm": "0.27.1"}, H200, LINUX, {V2: "1"}, "warning"),
    ("MD016", {"vllm": "0.33.0"}, RTX_5090, LINUX, {}, "note"),
    ("MD016", {"vllm": "0.33.0"}, RTX_5090, LINUX, {PADDING: "0"}, None),
    ("MD016", {"vllm": "0.33.0"}, H200, LINUX, {}, "note"),
    ("MD016", {"vllm": "0.26.0"}, RTX_5090, LINUX, {}, None),
    ("MD016", {"vllm": "0.26.0"}, RTX_5090, LINUX, {PADDING: "1"}, "note"),
    ("MD020", {**AT_11, "vllm": "0.33.0"}, H200, WSL, {}, "warning"),
    ("MD020", VLLM_018, H200, LINUX, {}, None),
    ("MD020", VLLM_018, H200, LINUX, {NO_UVA: "1"}, "warning"),
    # DeepGEMM is selected on 12.x from 0.24.0 on, and two of its copies have no kernels for it.
    ("MD031", {"vllm": "0.24.0"}, RTX_5090, LINUX, {}, "error"),
    ("MD031", {"vllm": "0.24.0"}, RTX_5090, LINUX, {"VLLM_USE_DEEP_GEMM": "0"}, None),
    ("MD031", {"vllm": "0.24.0"}, H200, LINUX, {}, None),
    ("MD032", {"vllm": "0.27.0", "flashinfer-python": "0.6.15"}, B200, LINUX, {}, "note"),
    ("MD032", {"vllm": "0.27.0", "flashinfer-python": "0.6.15"}, H200, LINUX, {}, None),
    ("MD033", {"vllm": "0.25.1", "nvidia-cudnn-cu13": "9.19.0.56"}, RTX_5090, LINUX, {}, "warning"),
    ("MD033", {"vllm": "0.25.1", "nvidia-cudnn-cu12": "9.22.0.52"}, RTX_5090, LINUX, {}, "warning"),
    ("MD033", {"vllm": "0.25.1", "nvidia-cudnn-cu13": "9.23.1.3"}, RTX_5090, LINUX, {}, None),
    ("MD033", {"vllm": "0.25.1", "nvidia-cudnn-cu13": "9.19.0.56"}, H200, LINUX, {}, None),
    ("MD034", {"vllm": "0.30.0"}, H200, LINUX, {}, None),
    ("MD034", {"vllm": "0.30.0", "triton_kernels": "1.0.0"}, H200, LINUX, {}, "warning"),
    ("MD036", {"vllm": "0.28.0", "flashinfer-python": "0.6.17"}, B200, LINUX, {}, "warning"),
    ("MD036", {"vllm": "0.28.0", "flashinfer-python": "0.6.16.post3"}, B200, LINUX, {}, "note"),
    ("MD036", {"vllm": "0.28.0", "flashinfer-python": "0.6.17"}, H200, LINUX, {}, None),
]


@pytest.mark.parametrize(("id", "packages", "gpu", "wsl", "environ", "severity"), STRUCK)
def test_the_severity_of_an_entry_on_a_machine(id, packages, gpu, wsl, environ, severity):
    result = check(sources(packages, gpu=gpu, wsl=wsl, environ=environ), probes())
    findings = {finding.id: finding for finding in (*result.findings, *result.conditional)}
    assert (findings[id].severity if id in findings else None) == severity
    if id == "MD010" and severity:
        assert findings[id].evidence["variables"] == environ


def test_without_a_gpu_the_confidence_is_half_and_says_so() -> None:
    here = check(sources(VLLM_018, gpu=H200, torch_cuda="12.9"), probes())
    away = check(sources(VLLM_018, torch_cuda="12.9"), probes())
    with_gpu, without = ({each.id: each for each in result.findings}["MD001"] for result in (here, away))
    assert without.confidence == pytest.approx(with_gpu.confidence / 2)
    assert "none here" in without.evidence["gpu"]
    assert "gpu" not in with_gpu.evidence
    # A setting has no effect with or without a GPU.
    setting = sources(VLLM_033, environ={"VLLM_NVFP4_MOE_BACKEND": "MARLIN"})
    (ignored,) = check(setting, probes()).findings
    assert (ignored.id, ignored.confidence) == ("MD010", 0.9)
    # A rule about a capability does not apply without a GPU.
    assert "MD011" not in found(away)


def test_the_expert_cache_is_recognized_by_its_file() -> None:
    file = "vllm/model_executor/layers/fused_moe/expert_weight_provider.py"
    result = check(sources(VLLM_033, gpu=H200, files=(file,)), probes())
    assert found(result) == {"MD006": "warning"}
    assert evidence(result, "MD006")["file"] == file


@pytest.mark.parametrize(
    ("release", "gpu", "cuda", "setting", "reason"),
    [
        ("0.6.6", H200, (13, 0), "9.0", "plain 90"),
        ("0.6.6", H200, (13, 0), "9.0a", None),
        ("0.6.7", H200, (13, 0), "9.0", None),
        ("0.7.2", H200, (13, 0), "9.0 ", "cannot read FLASHINFER_CUDA_ARCH_LIST"),
        ("0.7.2", H200, (13, 0), "8.0", "does not run on this GPU"),
        ("0.6.8", RTX_5090, (12, 8), None, "no architecture to build for"),
        ("0.7.2", RTX_5090, (12, 8), None, None),
        ("0.7.2", GB10, (12, 8), None, "no architecture to build for"),
        ("0.7.2", GB10, (13, 0), "12.0f", None),
        ("0.7.2", GB10, (13, 0), "12.0a", "does not run on this GPU"),
    ],
)
def test_what_flashinfer_would_build_is_judged_for_this_gpu(release, gpu, cuda, setting, reason):
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
    names = ("torch 2.11.0+cu130", "flashinfer-python 0.6.8.post1")
    assert what(result) == {f"{name} with vllm 0.33.0": "warning" for name in names}
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
    for made in (sources({"torch": "2.13.0"}), sources({"torch": "2.13.0"}, gpu=H200, torch_cuda="")):
        result = check(made, probes(pinning=Mock(side_effect=AssertionError)))
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
