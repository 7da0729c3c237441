"""The facts about a machine: their sources, failures of single collectors, and privacy."""

import json
import platform
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
from machine_fakes import Nvml, sources

from moedoctor import environment
from moedoctor.environment import COLLECTORS, collect

GPU_FACTS = {"gpu", "gpus", "capability", "driver", "cuda_driver"}


def collect_trace_facts(
    packages: Mapping[str, str] | None = None, *, nvml: Nvml | None = None, **replaced: Any
) -> dict[str, Any]:
    """Return the facts of a machine with only the given parts; by default it has no files and no driver."""
    nvml = nvml or Nvml((), init_error=Nvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    return collect(sources(packages, **{"texts": {}, **replaced, "nvml": lambda: nvml}))


def two_gpus(**options: Any) -> Nvml:
    """An H200, and a GPU whose driver does not report its memory and gives its name as bytes."""
    gpus = (("NVIDIA H200", "9.0", 150_754_820_096), (b"NVIDIA GB10", "12.1", None))
    return Nvml(gpus, 12080, **options)


def test_this_machine_is_described_without_an_error() -> None:
    facts = collect()
    assert facts["collector_errors"] == {}
    assert facts["python"] == platform.python_version()
    assert facts["torch"]
    assert facts["cpu_count"] >= 1
    assert set(facts) == {*GPU_FACTS, *COLLECTORS, "collector_errors"}
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("broken", sorted(COLLECTORS))
def test_a_failing_collector_loses_only_its_own_fact(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fail = collect_trace_facts(), Mock(side_effect=RuntimeError(f"cannot read {broken}"))
    monkeypatch.setitem(environment.COLLECTORS, broken, fail)
    errors = {broken: f"RuntimeError: cannot read {broken}"}
    assert collect_trace_facts() == {**whole, broken: None, "collector_errors": errors}


def test_two_gpus_with_their_facts() -> None:
    nvml = two_gpus()
    facts = collect_trace_facts(nvml=nvml)
    assert {name: facts[name] for name in GPU_FACTS} == {
        "gpu": "NVIDIA H200",
        "capability": "9.0",
        "gpus": [
            {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 150_754_820_096, "visible": True},
            {"name": "NVIDIA GB10", "capability": "12.1", "memory_bytes": None, "visible": True},
        ],
        "driver": "580.159.03",
        "cuda_driver": "12.8",
    }
    assert facts["collector_errors"] == {}
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("setting", "gpu", "visible"),
    [
        ("0,1", "NVIDIA H200", [True, True]), ("1", "NVIDIA GB10", [False, True]), ("", None, [False, False]),
        ("-1", None, [False, False]), ("0,-1,1", "NVIDIA H200", [True, False]), ("7,0", None, [False, False]),
        ("GPU-bbbb2222-0000", "NVIDIA GB10", [False, True]), ("GPU-bbbb", "NVIDIA GB10", [False, True]),
        ("GPU-", None, [False, False]), ("MIG-cccc3333", "NVIDIA H200", [True, True]),
    ],
)  # fmt: skip
def test_the_gpu_is_the_first_that_cuda_programs_see(setting, gpu, visible):
    facts = collect_trace_facts(nvml=two_gpus(), environ={"CUDA_VISIBLE_DEVICES": setting})
    assert facts["gpu"] == gpu
    assert [gpu["visible"] for gpu in facts["gpus"]] == visible
    assert "2222" not in json.dumps(facts)


@pytest.mark.parametrize(
    ("error", "gpus", "errors"),
    [
        (Nvml.NVML_ERROR_LIBRARY_NOT_FOUND, [], {}),
        (Nvml.NVML_ERROR_DRIVER_NOT_LOADED, [], {}),
        (Nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, None, {"gpus": "NvmlError: NVML error 18"}),
    ],
)
def test_no_driver_means_no_gpus_and_a_broken_driver_is_reported(error: int, gpus: Any, errors: Any) -> None:
    facts = collect_trace_facts(nvml=two_gpus(init_error=error))
    assert (facts["gpu"], facts["gpus"], facts["collector_errors"]) == (None, gpus, errors)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("__version__ = '2.4.0'\ncuda = \"12.4\"\n", "12.4"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", None),
    ],
)
def test_the_cuda_of_torch_is_read_from_its_source(text: str, expected: str | None) -> None:
    facts = collect_trace_facts({"torch": "2.13.0"}, texts={"/lib/torch/version.py": text})
    assert (facts["torch"], facts["torch_cuda"]) == ("2.13.0", expected)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.9.0+cu128", "12.8"), ("2.13.0+cu130", "13.0"), ("2.13.0+cpu", None), ("2.13.0", None)],
)
def test_without_its_folder_the_local_version_gives_the_cuda_of_torch(version, expected):
    assert collect_trace_facts({"torch": version}, package_folder=lambda name: None)["torch_cuda"] == expected


@pytest.mark.parametrize(
    ("path", "text", "fact", "expected"),
    [
        ("/proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2 (gcc 11.2.0)", "wsl", True),
        ("/proc/version", "Linux version 4.4.0-19041-Microsoft (gcc 5.4.0)", "wsl", True),
        ("/proc/version", "Linux version 6.8.0-45-generic (buildd@lcy02)", "wsl", False),
        ("/.dockerenv", "", "container", True),
        ("/run/.containerenv", "", "container", True),
        ("/proc/1/cgroup", "0::/kubepods/besteffort/pod1", "container", True),
        ("/proc/1/cgroup", "0::/init.scope", "container", False),
        ("/proc/cpuinfo", "processor\t: 0\nmodel name\t: EPYC 9654\n\nmodel name\t: b\n", "cpu", "EPYC 9654"),
        ("/proc/meminfo", "MemFree: 1 kB\nMemTotal:       2048 kB\n", "memory_bytes", 2_097_152),
        ("/etc/os-release", 'NAME="A"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n', "platform", "Ubuntu 24.04.1 LTS"),
    ],
)
def test_facts_that_files_of_the_system_hold(path: str, text: str, fact: str, expected: Any) -> None:
    assert collect_trace_facts(texts={path: text})[fact] == expected


def test_only_settings_of_the_stack_are_shown_and_none_that_identifies() -> None:
    environ = {
        "PATH": "/usr/bin", "HF_TOKEN": "hf_AbCdEfGhIjKlMnOp", "MY_VLLM_X": "1",
        "VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_API_KEY": "abc",
        "VLLM_CACHE_ROOT": "/home/alice/.cache/vllm", "NCCL_DEBUG_FILE": "/tmp/nccl.workstation-7.log",
        "TORCH_CUDA_ARCH_LIST": "9.0 12.0a", "CUDA_VISIBLE_DEVICES": "GPU-8f6d2a10-1111-2222",
    }  # fmt: skip
    facts = collect_trace_facts(environ=environ)
    assert facts["env"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-***",
        "NCCL_DEBUG_FILE": "/tmp/nccl.***.log",
        "TORCH_CUDA_ARCH_LIST": "9.0 12.0a",
        "VLLM_API_KEY": "***",
        "VLLM_CACHE_ROOT": "~/.cache/vllm",
        "VLLM_USE_FLASHINFER_MOE_FP4": "1",
    }
    assert facts["cuda_visible_devices"] == "GPU-***"
