"""Facts about this machine and its packages. Nothing is judged here and nothing heavy is imported.

Versions come from the packages' metadata, GPUs from NVML, so `collect` answers in a fraction of a
second, offline and for any user. A fact that cannot be had is None, and why is in `collector_errors`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedoctor.gpus import GpuFacts, collect_gpus
from moedoctor.redaction import Redactor

SHOWN_VARIABLES = ("VLLM_", "FLASHINFER_", "CUDA_", "MOEDOCTOR_", "NCCL_", "TORCH_CUDA_ARCH_LIST")
"""Environment variables whose names begin so are reported, with secrets, names and home folders hidden."""

UNLIMITED = "unlimited"

_CONTAINER_CGROUP = re.compile(r"docker|kubepods|containerd|libpod|lxc")
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_LOCAL_CUDA = re.compile(r"\+cu(\d+)(\d)\b")


def _import_nvml() -> Any:
    return importlib.import_module("pynvml")


def _locked_memory_limit() -> int | str:
    import resource  # POSIX only

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _package_folder(name: str) -> Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@dataclass(frozen=True)
class Sources:
    """Where the facts come from. Tests replace any of them; each may raise anything."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    read_text: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8", errors="replace")
    exists: Callable[[str], bool] = os.path.exists
    package_version: Callable[[str], str] = importlib.metadata.version
    package_folder: Callable[[str], Path | None] = _package_folder
    nvml: Callable[[], Any] = _import_nvml
    locked_memory_limit: Callable[[], int | str] = _locked_memory_limit
    host: Callable[[], str] = platform.node


def _version(sources: Sources, *names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return sources.package_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _torch_cuda(sources: Sources) -> str | None:
    """The CUDA release that the installed torch was built for; None for a build without CUDA."""
    folder = sources.package_folder("torch")
    if folder is not None:
        match = _TORCH_CUDA.search(sources.read_text(str(folder / "version.py")))
        return match[1] if match else None
    match = _LOCAL_CUDA.search(_version(sources, "torch") or "")
    return f"{match[1]}.{match[2]}" if match else None


def _platform(sources: Sources) -> str:
    try:
        match = re.search(r'^PRETTY_NAME="?([^"\n]+)', sources.read_text("/etc/os-release"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.system()


def _cpu(sources: Sources) -> str | None:
    match = re.search(r"^model name\s*:\s*(.+)$", _proc(sources, "/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else None


def _cpu_count(sources: Sources) -> int | None:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _memory_bytes(sources: Sources) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _proc(sources, "/proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _wsl(sources: Sources) -> bool:
    return "microsoft" in _proc(sources, "/proc/version").lower()


def _container(sources: Sources) -> bool | None:
    """Whether this process runs in a container; None where the system does not tell."""
    if sources.exists("/.dockerenv") or sources.exists("/run/.containerenv"):
        return True
    cgroup = _proc(sources, "/proc/1/cgroup")
    return bool(_CONTAINER_CGROUP.search(cgroup)) if cgroup else None


def _proc(sources: Sources, path: str) -> str:
    """A file that only Linux has; empty where it is absent."""
    try:
        return sources.read_text(path)
    except FileNotFoundError:
        return ""


def _shown_environment(sources: Sources) -> dict[str, str]:
    redactor = Redactor.of(sources.environ, sources.host())
    names = sorted(name for name in sources.environ if name.startswith(SHOWN_VARIABLES))
    return {redactor.text(name): redactor.setting(name, sources.environ[name]) for name in names}


def _visible_devices(sources: Sources) -> str | None:
    return _shown_environment(sources).get("CUDA_VISIBLE_DEVICES")


def _gpus(sources: Sources) -> GpuFacts:
    return collect_gpus(sources.nvml(), sources.environ.get("CUDA_VISIBLE_DEVICES"))


COLLECTORS: Mapping[str, Callable[[Sources], Any]] = {
    "cuda_visible_devices": _visible_devices,
    "torch": lambda sources: _version(sources, "torch"),
    "torch_cuda": _torch_cuda,
    "triton": lambda sources: _version(sources, "triton", "pytorch-triton"),
    "vllm": lambda sources: _version(sources, "vllm"),
    "flashinfer": lambda sources: _version(sources, "flashinfer-python"),
    "flashinfer_cubin": lambda sources: _version(sources, "flashinfer-cubin"),
    "flashinfer_jit_cache": lambda sources: _version(sources, "flashinfer-jit-cache"),
    "python": lambda sources: platform.python_version(),
    "platform": _platform,
    "kernel": lambda sources: platform.release(),
    "machine": lambda sources: platform.machine(),
    "cpu": _cpu,
    "cpu_count": _cpu_count,
    "memory_bytes": _memory_bytes,
    "wsl": _wsl,
    "container": _container,
    "locked_memory_limit_bytes": lambda sources: sources.locked_memory_limit(),
    "env": _shown_environment,
}
"""Fact -> how it is read. The facts about GPUs come together, from `collect_gpus`."""


def collect(
    sources: Sources | None = None, collectors: Mapping[str, Callable[[Sources], Any]] = COLLECTORS
) -> dict[str, Any]:
    """What is known about this machine, as plain values that JSON can hold.

    Sizes are in bytes. `gpu` and `capability` are those of the first GPU that CUDA programs may use
    here (None without one); `gpus` are all that the driver lists. `locked_memory_limit_bytes` is
    ``"unlimited"`` where there is no limit. No host name, user name or home folder is in it.

    Never raises: what fails is None, with its error in `collector_errors`, by the fact's name.
    """
    sources = sources or Sources()
    errors: dict[str, str] = {}

    def attempt(name: str, read: Callable[[Sources], Any]) -> Any:
        try:
            return read(sources)
        except Exception as error:
            errors[name] = _describe(error, sources)
            return None

    gpus = attempt("gpus", _gpus) or GpuFacts()
    facts: dict[str, Any] = gpus.to_json()
    for name, read in collectors.items():
        facts[name] = attempt(name, read)
    return {**facts, "collector_errors": errors}


def _describe(error: Exception, sources: Sources) -> str:
    """The error in one line, safe to publish."""
    try:
        message = " ".join(str(error).split())
        return Redactor.of(sources.environ, sources.host()).text(f"{type(error).__name__}: {message}")
    except Exception:
        return type(error).__name__
