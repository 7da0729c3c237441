"""Facts about this machine and its packages. Nothing is judged here and nothing heavy is imported.

Versions come from the packages' metadata, GPUs from NVML, so `collect` answers in a fraction of a
second, offline and for any user. A fact that cannot be read is None, and `collector_errors` says why.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.processes.ask import ChildError, answer, ask
from moedoctor.redaction import Redactor

SHOWN_VARIABLES = ("VLLM_", "FLASHINFER_", "CUDA_", "MOEDOCTOR_", "NCCL_", "TORCH_CUDA_ARCH_LIST")
"""Environment variables whose names begin so are reported, with secrets, names and home folders hidden."""


def _read_locked_memory_limit() -> int | str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _find_package_folder(name: str) -> Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@dataclass(frozen=True)
class Sources:
    """The sources of the facts. Tests replace any of them; each may raise anything."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    read_text: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8", errors="replace")
    exists: Callable[[str], bool] = os.path.exists
    package_version: Callable[[str], str] = importlib.metadata.version
    package_folder: Callable[[str], Path | None] = _find_package_folder
    nvml: Callable[[], Any] | None = None
    """Gives NVML's Python module; None: a child process asks it, which a broken driver may end."""
    locked_memory_limit: Callable[[], int | str] = _read_locked_memory_limit
    host: Callable[[], str] = platform.node


def collect(sources: Sources | None = None) -> dict[str, Any]:
    """Return what is known about this machine, as plain values that JSON can hold.

    Sizes are in bytes. `gpu` and `capability` are those of the first GPU that CUDA programs may use
    here (None without any); `gpus` are all that the driver lists. `locked_memory_limit_bytes` is
    ``"unlimited"`` without a limit. No host name, user name or home folder is in it.

    Never raises: a fact that fails is None, with its error in `collector_errors`.
    """
    sources = sources or Sources()
    errors: dict[str, str] = {}

    def try_to_read(name: str, read: Callable[[Sources], Any]) -> Any:
        try:
            return read(sources)
        except Exception as error:
            errors[name] = _describe(error, sources)
            return None

    facts = try_to_read("gpus", _ask_nvml) or _NO_GPU_FACTS
    return {
        **facts,
        **{name: try_to_read(name, read) for name, read in COLLECTORS.items()},
        "collector_errors": errors,
    }


def _describe(error: Exception, sources: Sources) -> str:
    """Return the error in one line that is safe to publish."""
    try:
        message = " ".join(str(error).split())
        if isinstance(error, ChildError):
            return message
        return Redactor.from_environment(sources.environ, sources.host()).mask(
            f"{type(error).__name__}: {message}"
        )
    except Exception:
        return type(error).__name__


def _find_version(sources: Sources, *names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return sources.package_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _read_torch_cuda(sources: Sources) -> str | None:
    """Return the CUDA release that the installed torch was built for; None for a build without CUDA."""
    folder = sources.package_folder("torch")
    if folder is not None:
        text = sources.read_text(str(folder / "version.py"))
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return match[1] if match else None
    match = re.search(r"\+cu(\d+)(\d)\b", _find_version(sources, "torch") or "")
    return f"{match[1]}.{match[2]}" if match else None


def _find(sources: Sources, path: str, pattern: str) -> str | None:
    """Return what the group of `pattern` matches in a file; None if it or the file is absent."""
    match = re.search(pattern, _read(sources, path), re.MULTILINE)
    return match[1].strip() if match else None


def _read(sources: Sources, path: str) -> str:
    """Return the text of a file; empty if it is absent, as /proc is on other systems than Linux."""
    try:
        return sources.read_text(path)
    except FileNotFoundError:
        return ""


def _read_memory_bytes(sources: Sources) -> int | None:
    kilobytes = _find(sources, "/proc/meminfo", r"^MemTotal:\s*(\d+) kB")
    return int(kilobytes) * 1024 if kilobytes else None


def _detect_container(sources: Sources) -> bool | None:
    """Return True if this process runs in a container; None if the system does not show it."""
    if sources.exists("/.dockerenv") or sources.exists("/run/.containerenv"):
        return True
    cgroup = _read(sources, "/proc/1/cgroup")
    return bool(re.search(r"docker|kubepods|containerd|libpod|lxc", cgroup)) if cgroup else None


def mask_variables(sources: Sources | None = None) -> dict[str, str]:
    """Return the variables that reports show, masked; by default those of this process."""
    sources = sources or Sources()
    redactor = Redactor.from_environment(sources.environ, sources.host())
    names = sorted(name for name in sources.environ if name.startswith(SHOWN_VARIABLES))
    return {redactor.mask(name): redactor.mask_setting(name, sources.environ[name]) for name in names}


COLLECTORS: dict[str, Callable[[Sources], Any]] = {
    "cuda_visible_devices": lambda sources: mask_variables(sources).get("CUDA_VISIBLE_DEVICES"),
    "torch": lambda sources: _find_version(sources, "torch"),
    "torch_cuda": _read_torch_cuda,
    "triton": lambda sources: _find_version(sources, "triton", "pytorch-triton"),
    "vllm": lambda sources: _find_version(sources, "vllm"),
    "flashinfer": lambda sources: _find_version(sources, "flashinfer-python"),
    "flashinfer_cubin": lambda sources: _find_version(sources, "flashinfer-cubin"),
    "flashinfer_jit_cache": lambda sources: _find_version(sources, "flashinfer-jit-cache"),
    "python": lambda sources: platform.python_version(),
    "platform": lambda sources: (
        _find(sources, "/etc/os-release", r'^PRETTY_NAME="?([^"\n]+)') or platform.system()
    ),
    "kernel": lambda sources: platform.release(),
    "machine": lambda sources: platform.machine(),
    "cpu": lambda sources: _find(sources, "/proc/cpuinfo", r"^model name\s*:\s*(.+)$"),
    # The processors that this process may use.
    "cpu_count": lambda sources: len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    "memory_bytes": _read_memory_bytes,
    "wsl": lambda sources: "microsoft" in _read(sources, "/proc/version").lower(),
    "container": _detect_container,
    "locked_memory_limit_bytes": lambda sources: sources.locked_memory_limit(),
    "env": mask_variables,
}
"""Fact -> how it is read. The facts about GPUs come together, from `_ask_nvml`."""

_NVML_SECONDS = 20.0
_NO_GPU_FACTS: Mapping[str, Any] = dict.fromkeys(("gpu", "capability", "gpus", "driver", "cuda_driver"))


def _ask_nvml(sources: Sources) -> Mapping[str, Any]:
    """Ask NVML for all GPUs, in PCI order, which is CUDA's order unless the GPUs of a machine differ.

    A GPU has a name, a compute capability such as ``9.0``, its memory in bytes (None also if it shares that
    of the host) and whether CUDA programs see it; what its driver does not report is None. `cuda_driver` is
    the newest CUDA release that the driver supports. A machine without the driver's library has no GPUs,
    which is not an error; a library that does not start is, e.g. after a driver update without a reboot.
    """
    if sources.nvml is None:
        facts = ask(
            "moedoctor.environment", sources.environ.get("CUDA_VISIBLE_DEVICES"), seconds=_NVML_SECONDS
        )
        if "error" in facts:
            raise ChildError(facts["error"])
        return facts
    nvml = sources.nvml()

    def call(function: str, *arguments: Any) -> Any:
        """Return an answer of NVML; None if the GPU is lost or the question is not supported."""
        if None in arguments:
            return None
        try:
            answer = getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None
        # Older bindings answer with bytes.
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if getattr(error, "value", None) in absent:
            return {**_NO_GPU_FACTS, "gpus": []}
        raise
    try:
        handles = [call("nvmlDeviceGetHandleByIndex", index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [call("nvmlDeviceGetUUID", handle) or "" for handle in handles]
        visible = _select_visible(sources.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        gpus: list[dict[str, Any]] = []
        for index, handle in enumerate(handles):
            capability = call("nvmlDeviceGetCudaComputeCapability", handle)
            memory = call("nvmlDeviceGetMemoryInfo", handle)
            facts = {
                "name": call("nvmlDeviceGetName", handle),
                "capability": f"{capability[0]}.{capability[1]}" if capability else None,
                "memory_bytes": int(memory.total) if memory else None,
            }
            gpus.append({**facts, "visible": index in visible})
        cuda = call("nvmlSystemGetCudaDriverVersion_v2")  # 12080 is 12.8
        first = next((gpu for gpu in gpus if gpu["visible"] and gpu["name"]), {})
        return {
            "gpu": first.get("name"),
            "capability": first.get("capability"),
            "gpus": gpus,
            "driver": call("nvmlSystemGetDriverVersion"),
            "cuda_driver": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        }
    finally:
        nvml.nvmlShutdown()


def _answer_gpu_facts(visible_devices: str | None) -> Mapping[str, Any]:
    """Return the facts of `_ask_nvml`, or its error; runs in a child."""
    environ = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
    sources = Sources(environ=environ, nvml=lambda: importlib.import_module("pynvml"))
    try:
        return _ask_nvml(sources)
    except Exception as error:
        return {"error": _describe(error, Sources())}


def _select_visible(setting: str | None, uuids: Sequence[str]) -> set[int]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` selects; as in CUDA, an unknown entry ends the list.

    A MIG device is a part of a GPU that NVML lists under another UUID, so with MIG every GPU is visible here.
    """
    if setting is None or "MIG-" in setting:
        return set(range(len(uuids)))
    selected: set[int] = set()
    for entry in map(str.strip, setting.split(",")):
        matches = [
            index
            for index, uuid in enumerate(uuids)
            if (entry.isdecimal() and int(entry) == index)
            or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if len(matches) != 1:
            break
        selected.add(matches[0])
    return selected


def explain_missing_gpu(environment: Mapping[str, Any]) -> str | None:
    """Return why no GPU can be used here; None if a GPU can be."""
    if not environment.get("gpu"):
        return "needs an NVIDIA GPU, none is visible"
    if not environment.get("torch_cuda"):
        torch = environment.get("torch")
        why = f"torch {torch} is built without CUDA" if torch else "torch is not installed"
        return f"{why}, so {environment['gpu']} cannot be used"
    return None


if __name__ == "__main__":
    answer(_answer_gpu_facts)
