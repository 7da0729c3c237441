"""The facts about a machine: their sources, failures of single collectors, and privacy."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from machine_fakes import Nvml

from moedoctor.environment import COLLECTORS, Sources, collect

GPU_FACTS = {"gpu", "gpus", "capability", "driver", "cuda_driver"}


NO_LIBRARY = Nvml((), init_error=Nvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def two_gpus(**options: Any) -> Nvml:
    """An H200, and a GPU whose driver does not report its memory and gives its name as bytes."""
    gpus = (("NVIDIA H200", "9.0", 150_754_820_096), (b"NVIDIA GB10", "12.1", None))
    return Nvml(gpus, 12080, **options)


def fake(
    *,
    nvml: Callable[[], Any] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    packages: Mapping[str, str] | None = None,
    torch_folder: Path | None = None,
) -> Sources:
    """Return a machine with only the given parts."""

    def read_text(path: str) -> str:
        if path not in (files or {}):
            raise FileNotFoundError(path)
        return (files or {})[path]

    def package_version(name: str) -> str:
        if name not in (packages or {}):
            raise PackageNotFoundError(name)
        return (packages or {})[name]

    return Sources(
        environ=environ or {},
        read_text=read_text,
        exists=lambda path: path in (files or {}),
        package_version=package_version,
        package_folder=lambda name: torch_folder,
        nvml=nvml or (lambda: NO_LIBRARY),
        locked_memory_limit=lambda: 8192,
        host=lambda: "gpubox7",
    )


def test_this_machine_is_described_without_an_error() -> None:
    facts = collect()
    assert facts["collector_errors"] == {}
    assert facts["python"] == platform.python_version()
    assert facts["torch"]
    assert facts["cpu_count"] >= 1
    assert set(facts) == {*GPU_FACTS, *COLLECTORS, "collector_errors"}
    assert json.loads(json.dumps(facts)) == facts


def test_a_machine_without_packages_is_no_error() -> None:
    facts = collect(fake())
    assert facts["collector_errors"] == {}
    assert facts["gpus"] == []
    assert [
        name
        for name in ("gpu", "driver", "torch", "torch_cuda", "vllm", "cpu", "memory_bytes")
        if facts[name]
    ] == []
    assert facts["wsl"] is False
    assert facts["container"] is None
    assert facts["platform"] == platform.system()


@pytest.mark.parametrize("broken", sorted(COLLECTORS))
def test_a_failing_collector_loses_only_its_own_fact(broken: str) -> None:
    def fail(sources: Sources) -> Any:
        raise RuntimeError(f"cannot read {broken}")

    facts = collect(fake(), {**COLLECTORS, broken: fail})
    whole = collect(fake())
    assert facts == {
        **whole,
        broken: None,
        "collector_errors": {broken: f"RuntimeError: cannot read {broken}"},
    }


def test_with_every_source_failing_there_is_still_an_answer() -> None:
    def fail(*_: Any) -> Any:
        raise PermissionError(13, "denied", "/home/alice/secret")

    class NoMapping(dict[str, str]):
        __iter__ = get = fail

    facts = collect(
        Sources(
            environ=NoMapping(),
            read_text=fail,
            exists=fail,
            package_version=fail,
            package_folder=fail,
            nvml=fail,
            locked_memory_limit=fail,
            host=fail,
        )
    )
    known = {"python", "kernel", "machine", "cpu_count", "platform", "collector_errors"}
    assert {name for name, value in facts.items() if value is not None} == known
    assert {"gpus", "torch", "wsl", "env", "locked_memory_limit_bytes"} <= set(facts["collector_errors"])
    assert "alice" not in json.dumps(facts)


def test_two_gpus_with_their_facts() -> None:
    nvml = two_gpus()
    facts = collect(fake(nvml=lambda: nvml))
    assert facts["gpu"] == "NVIDIA H200"
    assert facts["capability"] == "9.0"
    assert facts["gpus"] == [
        {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 150_754_820_096, "visible": True},
        {"name": "NVIDIA GB10", "capability": "12.1", "memory_bytes": None, "visible": True},
    ]
    assert facts["driver"] == "580.159.03"
    assert facts["cuda_driver"] == "12.8"
    assert facts["collector_errors"] == {}
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("setting", "gpu", "visible"),
    [
        ("0,1", "NVIDIA H200", [True, True]),
        ("1", "NVIDIA GB10", [False, True]),
        ("", None, [False, False]),
        ("-1", None, [False, False]),
        ("0,-1,1", "NVIDIA H200", [True, False]),
        ("7,0", None, [False, False]),
        ("GPU-bbbb2222-0000", "NVIDIA GB10", [False, True]),
        ("GPU-bbbb", "NVIDIA GB10", [False, True]),
        ("GPU-", None, [False, False]),
        ("MIG-cccc3333", "NVIDIA H200", [True, True]),
    ],
)
def test_the_gpu_is_the_first_that_cuda_programs_see(
    setting: str, gpu: str | None, visible: list[bool]
) -> None:
    facts = collect(fake(nvml=two_gpus, environ={"CUDA_VISIBLE_DEVICES": setting}))
    assert facts["gpu"] == gpu
    assert [gpu["visible"] for gpu in facts["gpus"]] == visible
    assert "2222" not in json.dumps(facts)


def test_a_lost_gpu_does_not_hide_the_other() -> None:
    facts = collect(fake(nvml=lambda: two_gpus(lost=(0,))))
    assert facts["gpu"] == "NVIDIA GB10"
    assert facts["gpus"][0] == {"name": None, "capability": None, "memory_bytes": None, "visible": True}


@pytest.mark.parametrize("error", [Nvml.NVML_ERROR_LIBRARY_NOT_FOUND, Nvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_means_no_gpus(error: int) -> None:
    facts = collect(fake(nvml=lambda: two_gpus(init_error=error)))
    assert (facts["gpu"], facts["gpus"], facts["collector_errors"]) == (None, [], {})


def test_a_driver_that_does_not_start_is_reported() -> None:
    facts = collect(fake(nvml=lambda: two_gpus(init_error=Nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)))
    assert (facts["gpu"], facts["gpus"]) == (None, None)
    assert facts["collector_errors"] == {"gpus": "NvmlError: NVML error 18"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("__version__ = '2.4.0'\ncuda = \"12.4\"\n", "12.4"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", None),
    ],
)
def test_the_cuda_of_torch_is_read_from_its_source(text: str, expected: str | None) -> None:
    files = {str(Path("/site/torch/version.py")): text}
    facts = collect(fake(files=files, torch_folder=Path("/site/torch"), packages={"torch": "2.13.0"}))
    assert (facts["torch"], facts["torch_cuda"]) == ("2.13.0", expected)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.9.0+cu128", "12.8"), ("2.13.0+cu130", "13.0"), ("2.13.0+cpu", None), ("2.13.0", None)],
)
def test_without_its_folder_the_local_version_gives_the_cuda_of_torch(
    version: str, expected: str | None
) -> None:
    assert collect(fake(packages={"torch": version}))["torch_cuda"] == expected


def test_versions_come_from_the_packages_metadata() -> None:
    packages = {
        "pytorch-triton": "3.7.1",
        "vllm": "0.21.0",
        "flashinfer-python": "0.6.1",
        "flashinfer-cubin": "0.6.0",
        "flashinfer-jit-cache": "0.6.1+cu130",
    }
    facts = collect(fake(packages=packages))
    names = ("triton", "vllm", "flashinfer", "flashinfer_cubin", "flashinfer_jit_cache")
    assert [facts[name] for name in names] == list(packages.values())


@pytest.mark.parametrize(
    ("version", "wsl"),
    [
        ("Linux version 6.6.87.2-microsoft-standard-WSL2 (gcc 11.2.0)", True),
        ("Linux version 4.4.0-19041-Microsoft (gcc 5.4.0)", True),
        ("Linux version 6.8.0-45-generic (buildd@lcy02)", False),
    ],
)
def test_wsl_is_recognised_by_the_kernel(version: str, wsl: bool) -> None:
    assert collect(fake(files={"/proc/version": version}))["wsl"] is wsl


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({"/.dockerenv": ""}, True),
        ({"/run/.containerenv": ""}, True),
        ({"/proc/1/cgroup": "0::/kubepods/besteffort/pod1"}, True),
        ({"/proc/1/cgroup": "0::/init.scope"}, False),
        ({}, None),
    ],
)
def test_containers_are_recognised_by_their_files(files: dict[str, str], container: bool | None) -> None:
    assert collect(fake(files=files))["container"] is container


def test_processor_memory_and_system_are_read_from_their_files() -> None:
    files = {
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\n\nmodel name\t: other\n",
        "/proc/meminfo": "MemFree: 1 kB\nMemTotal:       2048 kB\n",
        "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
    }
    facts = collect(fake(files=files))
    assert (facts["cpu"], facts["memory_bytes"], facts["platform"]) == (
        "AMD EPYC 9654",
        2_097_152,
        "Ubuntu 24.04.1 LTS",
    )
    assert facts["locked_memory_limit_bytes"] == 8192


def test_only_settings_of_the_stack_are_shown_and_none_that_identifies() -> None:
    environ = {
        "HOME": "/home/alice",
        "USER": "alice",
        "PATH": "/usr/bin",
        "HF_TOKEN": "hf_AbCdEfGhIjKlMnOp",
        "MY_VLLM_X": "1",
        "VLLM_USE_FLASHINFER_MOE_FP4": "1",
        "VLLM_API_KEY": "abc",
        "VLLM_CACHE_ROOT": "/home/alice/.cache/vllm",
        "NCCL_DEBUG_FILE": "/tmp/nccl.gpubox7.log",
        "TORCH_CUDA_ARCH_LIST": "9.0 12.0a",
        "CUDA_VISIBLE_DEVICES": "GPU-8f6d2a10-1111-2222",
    }
    facts = collect(fake(environ=environ))
    assert facts["env"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-***",
        "NCCL_DEBUG_FILE": "/tmp/nccl.***.log",
        "TORCH_CUDA_ARCH_LIST": "9.0 12.0a",
        "VLLM_API_KEY": "***",
        "VLLM_CACHE_ROOT": "~/.cache/vllm",
        "VLLM_USE_FLASHINFER_MOE_FP4": "1",
    }
    assert facts["cuda_visible_devices"] == "GPU-***"


def test_collecting_imports_no_torch_and_takes_a_fraction_of_a_second() -> None:
    code = (
        "import sys, time; from moedoctor.environment import collect; start = time.perf_counter(); collect();"
        "heavy = {'torch', 'triton', 'vllm', 'flashinfer'};"
        "print(time.perf_counter() - start, sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    seconds, heavy = answer.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert (
        float(seconds) < 2.0
    )  # some 20 ms without a GPU; the bound leaves room for a busy machine and for NVML
