"""Upstream's own collectors in a child process: fakes of both packages, and each way to fail."""

import os
from pathlib import Path

import pytest

from moedoctor.upstream.releases.collectors import collect_flashinfer, collect_vllm

VLLM = """
from collections import namedtuple
FIELDS = "vllm_version env_vars pip_packages xpu_available cudnn_version cpu_info libc_version"
Env = namedtuple("Env", FIELDS)
def get_env_info():
    print("collecting")
    packages = "torch==2.10.0 in /home/alice/lib"
    return Env("0.18.0", "VLLM_API_KEY=secret", packages, "False", None, "a CPU", "2.36")
"""
FLASHINFER = """
import os
def _force_load_gpu_libs():
    open(os.environ["MARK"], "w").write("ran on the GPU")
def collect_env_info():
    _force_load_gpu_libs()
    return {
        "FlashInfer": {
            "flashinfer": "0.7.2", "JIT cache": "/tmp/x", "Target CUDA archs (resolved)": "{(9, '0a')}"
        },
        "GPU Libraries: loaded vs on disk": {},
        "Environment Variables": {"HF_TOKEN": "hf_abcdefghijklmnop123"},
    }
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the child's import path; packages in it are installed for the child."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path


def install(folder: Path, package: str, code: str) -> None:
    (folder / package).mkdir()
    own = "raise RuntimeError('imported')\n" if package == "flashinfer" else ""
    (folder / package / "__init__.py").write_text(own)
    (folder / package / "collect_env.py").write_text(code)


def test_vllms_report_without_variables_and_host_facts(packages: Path) -> None:
    install(packages, "vllm", VLLM)
    collected = collect_vllm()
    assert collected.error is None
    assert collected.facts == {"vllm_version": "0.18.0", "pip_packages": "torch==2.10.0 in ~/lib"}


def test_flashinfers_report_without_importing_it_and_without_gpu_work(packages: Path) -> None:
    install(packages, "flashinfer", FLASHINFER)
    collected = collect_flashinfer()
    assert collected.error is None
    facts = {"flashinfer": "0.7.2", "Target CUDA archs (resolved)": "{(9, '0a')}"}
    assert collected.facts == {"FlashInfer": facts}
    assert not (packages / "mark").exists()


@pytest.mark.parametrize(
    ("package", "code", "error"),
    [
        ("vllm", "raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13"),
        ("vllm", "def get_env_info(): raise OSError('/home/alice/x')", "OSError: ~/x"),
        ("vllm", "import os; os._exit(9)", "exit status 9"),
        ("flashinfer", "def other(): pass", "collect_env_info"),
    ],
)
def test_a_collector_that_fails_is_a_fact(packages: Path, package: str, code: str, error: str) -> None:
    install(packages, package, code)
    collected = collect_vllm() if package == "vllm" else collect_flashinfer()
    assert collected.facts == {}
    assert error in (collected.error or "")
    assert "alice" not in (collected.error or "")


def test_a_package_without_a_collector(packages: Path) -> None:
    install(packages, "flashinfer", FLASHINFER)
    os.remove(packages / "flashinfer" / "collect_env.py")
    assert collect_flashinfer().error == "this FlashInfer release brings no collect_env.py"


def test_metadata_alone_is_no_package(packages: Path) -> None:
    (packages / "vllm-0.18.0.dist-info").mkdir()
    (packages / "flashinfer_python-0.7.2.dist-info").mkdir()
    assert "No module named 'vllm" in (collect_vllm().error or "")
    assert collect_flashinfer().error == "there is no module flashinfer, only its metadata"


@pytest.mark.upstream
def test_the_installed_vllm_reports() -> None:
    collected = collect_vllm()
    assert collected.error is None
    assert collected.facts["vllm_version"]
