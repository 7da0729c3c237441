"""A vLLM that is no known release is read: no all-clear by a version that says nothing."""

import json
import zipfile
from pathlib import Path

import pytest
from machine_fakes import probes, sources
from vllm_sources import rename, write_source

from moedoctor.cli import main
from moedoctor.diagnose.check.build import ASKED
from moedoctor.diagnose.check.check import check
from moedoctor.diagnose.check.records import CheckResult, Finding
from moedoctor.entries import load_entries

BUILDS = ("0.34.1.dev5+gabc123", "0.33.0.post1", "dev-build")
READ = [
    id
    for id, entry in load_entries().items()
    if any(each.decides and each.package == "vllm" for each in entry.questions)
]
KERNELS = "flashinfer/data/csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"


def check_build(
    folder: Path | None,
    version: str = "0.33.0",
    environ: dict[str, str] | None = None,
    gpu: str = "9.0",
    flashinfer: str = "0.7.2.post1",
) -> CheckResult:
    machine = sources(
        {"vllm": version, "torch": "2.14.0", "flashinfer-python": flashinfer},
        gpu=("a GPU", gpu),
        environ=environ,
        package_folder=lambda name: folder / name if folder and name in ASKED else None,
    )
    return check(machine, probes())


def get_finding(result: CheckResult, id: str) -> Finding | None:
    return next((each for each in (*result.findings, *result.conditional) if each.id == id), None)


@pytest.mark.parametrize("version", BUILDS)
def test_an_unknown_build_is_read_and_never_all_clear(version: str, tmp_path: Path) -> None:
    result = check_build(write_source(tmp_path, "0.33.0"), version)
    assert [line[:5] for line in result.unknown] == ["MD001"]
    assert [line[:5] for line in result.read] == READ
    assert all("as in 0.33.0" in line and (".py:" in line or ".cuh" in line) for line in result.read)
    assert result.exit_code == 2
    assert any("not known for this build: MD001" in reason for reason in result.reasons)
    offload = result.environment["moedoctor_fixes"]["known"]["offload"]
    assert offload["basis"] == "refused", "the made-up source is another one"
    repacked = get_finding(result, "MD013")
    assert repacked is not None
    assert repacked.evidence["vllm"] == version
    assert "vllm/model_executor/utils.py:" in repacked.evidence["read from this vLLM's source"]
    assert get_finding(result, "MD009") is None


def test_a_place_that_is_gone_is_listed(tmp_path: Path) -> None:
    folder = write_source(tmp_path, "0.33.0")
    rename(folder, RUNNER, "may_reinitialize_input_batch")
    result = check_build(folder, "0.34.1.dev5")
    (line,) = (line for line in result.unknown if line.startswith("MD009"))
    assert line.endswith(f": there is no GPUModelRunner.may_reinitialize_input_batch in {RUNNER}")
    (folder / RUNNER).unlink()
    result = check_build(folder, "0.34.1.dev5")
    assert any(line.startswith("MD009") and "\n" not in line for line in result.unknown)


def test_answers_that_no_release_gives_together_are_not_known(tmp_path: Path) -> None:
    folder = write_source(tmp_path, "0.33.0", changed={"MD002.never_pins": "affected"})
    result = check_build(folder, "0.34.1.dev5")
    (line,) = (line for line in result.unknown if line.startswith("MD002"))
    assert "no known release gives these answers together" in line


def test_without_a_source_nothing_is_known(tmp_path: Path) -> None:
    result = check_build(None, "0.34.1.dev5")
    assert {line[:5] for line in result.unknown} > {"MD001", "MD002", "MD009", "MD010", "MD013"}
    assert not result.read
    assert result.exit_code == 2


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu130"])
def test_a_known_release_goes_by_its_version_unless_it_was_changed(version: str, tmp_path: Path) -> None:
    as_released = check_build(write_source(tmp_path, "0.33.0"), version)
    assert (as_released.read, as_released.unknown, as_released.exit_code) == ((), (), 0)
    write_source(tmp_path, "0.33.0", changed={"MD013.not_installed": "affected", "MD013.repacked": "clean"})
    patched = check_build(tmp_path, version, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert [line[:5] for line in patched.read] == ["MD013"]
    finding = get_finding(patched, "MD013")
    assert finding is not None
    assert finding.severity == "warning"


def test_a_flashinfer_that_is_no_known_release_is_read(tmp_path: Path) -> None:
    folder = write_source(tmp_path, "0.33.0")
    result = check_build(folder, flashinfer="0.8.0.dev1")
    assert [line.partition(":")[0] for line in result.read] == ["MD004 arch_suffix", "MD011 duplicate_ids"]
    assert all("as in FlashInfer 0.7.2.post1" in line for line in result.read)
    assert result.unknown == ()
    (folder / KERNELS).write_text("__global__ void another() {}\n")
    result = check_build(folder, flashinfer="0.8.0.dev1")
    assert result.unknown == (f"MD011 duplicate_ids: there is no blockExpertPrefixSumKernel in {KERNELS}",)
    assert any(reason.startswith("not known for this build: MD011") for reason in result.reasons)
    changed = check_build(folder)
    assert (changed.unknown, changed.exit_code) == (result.unknown, 2), "a known release that was changed"
    result = check_build(None, flashinfer="0.8.0.dev1")
    assert [line.endswith("source of this FlashInfer is not here") for line in result.unknown] == [True] * 2


def test_targets_are_those_of_the_release_that_a_flashinfer_is_like(tmp_path: Path) -> None:
    environ = {"FLASHINFER_CUDA_ARCH_LIST": "12.0"}
    assert get_finding(check_build(write_source(tmp_path / "new", "0.33.0"), gpu="12.0"), "MD004") is None
    old = write_source(tmp_path / "old", "0.17.1")
    finding = get_finding(check_build(old, "0.17.1", environ, "12.0", "0.8.0.dev1"), "MD004")
    assert finding is not None
    assert (finding.evidence["flashinfer"], finding.evidence["builds_for"]) == ("0.8.0.dev1", ["120"])
    assert "read from this FlashInfer's source" in finding.evidence
    (old / "flashinfer" / "compilation_context.py").unlink()
    result = check_build(old, "0.17.1", environ, "12.0", "0.8.0.dev1")
    assert get_finding(result, "MD004") is None
    assert any(line.startswith("MD004") for line in result.unknown)


def test_variables_of_flashinfer_are_those_that_its_source_names(tmp_path: Path) -> None:
    folder = write_source(tmp_path, "0.33.0")
    (folder / "flashinfer" / "new.py").write_text("os.environ.get('FLASHINFER_BRAND_NEW')\n")
    names = ("FLASHINFER_BRAND_NEW", "FLASHINFER_NEVER_WAS", "FLASHINFER_AUTOTUNE_CACHE_DIR")
    environ = dict.fromkeys(names, "1")
    finding = get_finding(check_build(folder, environ=environ, flashinfer="0.8.0.dev1"), "MD010")
    assert finding is not None
    assert [name in finding.why for name in names] == [False, True, True]
    assert "neither a known release nor this FlashInfer declares it" in finding.why
    finding = get_finding(check_build(folder, environ=environ), "MD010")
    assert finding is not None
    assert [name in finding.why for name in names] == [True, True, False]


def test_variables_are_those_that_the_source_declares(tmp_path: Path) -> None:
    environ = {"VLLM_BRAND_NEW_MOE_KNOB": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NEVER_WAS": "1"}
    folder = write_source(tmp_path, "0.33.0", declared=("VLLM_BRAND_NEW_MOE_KNOB", "VLLM_NVFP4_GEMM_BACKEND"))
    result = check_build(folder, "0.34.1.dev5", {**environ, "VLLM_NVFP4_GEMM_BACKEND": "marlin"})
    problems = {problem.what.partition(":")[0]: problem.why for problem in result.problems}
    assert problems == {
        "VLLM_LOGGING_LEVEL": "vllm/envs.py of this vLLM does not declare it",
        "VLLM_NEVER_WAS": "neither a known release nor vllm/envs.py of this vLLM declares it",
    }
    assert get_finding(result, "MD010") is None, "a build that declares the variable again"
    (folder / "vllm" / "envs.py").write_text("class Settings: ...\n")
    result = check_build(folder, "0.34.1.dev5", environ)
    assert not result.problems
    assert any(line.startswith("MD010") for line in result.unknown)


def test_a_folder_and_a_wheel_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_source(tmp_path / "tree", "0.33.0")
    (folder / "requirements").mkdir()
    (folder / "requirements" / "cuda.txt").write_text("torch==2.14.0\nflashinfer-python==0.7.2.post1\n")
    wheel = tmp_path / "vllm-0.34.1.dev5+gabc-cp38-abi3-linux.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path in (folder / "vllm").rglob("*.*"):
            file.write(path, path.relative_to(folder))
        file.writestr("vllm-0.34.1.dev5+gabc.dist-info/METADATA", "Version: 0.34.1.dev5+gabc\n")
    for option, path, version in (
        ("--source", folder, "of unknown version"),
        ("--wheel", wheel, "0.34.1.dev5+gabc"),
    ):
        assert main(["check", option, str(path), "--format", "json"]) == 2
        document = json.loads(capsys.readouterr().out)
        assert document["environment"]["vllm"] == version
        assert len(document["read"]) == len(READ)
        assert [line[:5] for line in document["unknown"]] == ["MD001"]
        assert any(line.startswith("the MoE backend that it selects:") for line in document["not_looked_at"])


@pytest.mark.parametrize("text", ["x = " + "(" * 9999, "\0", "-" * 99_999 + "1"])
def test_a_source_that_is_no_python_is_refused_in_one_line(text, tmp_path, capsys):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "envs.py").write_text(text)
    assert main(["check", "--source", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "vllm/envs.py cannot be parsed; expected a wheel of vLLM, or a folder" in line


def test_a_release_that_is_newer_than_the_known_ones_is_not_refused(capsys):
    assert main(["check", "--release", "0.34.0", "--sm", "9.0", "--format", "json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["environment"]["vllm"] == "0.34.0"
    assert len(document["unknown"]) == len(READ) + 2  # MD001 is asked, MD010 rests on tables
    assert "which is not known" in document["target"]
