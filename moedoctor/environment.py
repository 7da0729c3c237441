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
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return sources.package_version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _torch_cuda(sources: Sources) -> str | None:
    """Return the CUDA release that the installed torch was built for; None for a build without CUDA."""
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
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _memory_bytes(sources: Sources) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _proc(sources, "/proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _wsl(sources: Sources) -> bool:
    return "microsoft" in _proc(sources, "/proc/version").lower()


def _container(sources: Sources) -> bool | None:
    """Whether this process runs in a container; None if the system does not show it."""
    if sources.exists("/.dockerenv") or sources.exists("/run/.containerenv"):
        return True
    cgroup = _proc(sources, "/proc/1/cgroup")
    return bool(_CONTAINER_CGROUP.search(cgroup)) if cgroup else None


def _proc(sources: Sources, path: str) -> str:
    """Return a file that only Linux has; empty if it is absent."""
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
    """Return what is known about this machine, as plain values that JSON can hold.

    Sizes are in bytes. `gpu` and `capability` are those of the first GPU that CUDA programs may use
    here (None without any); `gpus` are all that the driver lists. `locked_memory_limit_bytes` is
    ``"unlimited"`` without a limit. No host name, user name or home folder is in it.

    Never raises: a fact that fails is None, with its error in `collector_errors`.
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
    """Return the error in one line that is safe to publish."""
    try:
        message = " ".join(str(error).split())
        return Redactor.of(sources.environ, sources.host()).text(f"{type(error).__name__}: {message}")
    except Exception:
        return type(error).__name__


@dataclass(frozen=True)
class Gpu:
    """One GPU. A fact that its driver does not report is None."""

    name: str | None
    capability: str | None
    """Compute capability, e.g. ``9.0``."""
    memory_bytes: int | None
    """None also if GPU and host share their memory."""
    visible: bool
    """Whether ``CUDA_VISIBLE_DEVICES`` lets CUDA programs see it."""


@dataclass(frozen=True)
class GpuFacts:
    """All GPUs and their driver."""

    gpus: tuple[Gpu, ...] | None = None
    """None if NVML could not be asked."""
    driver: str | None = None
    cuda_driver: str | None = None
    """The newest CUDA release that the driver supports, e.g. ``13.0``."""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as the flat keys of a report's environment."""
        first = next((gpu for gpu in self.gpus or () if gpu.visible and gpu.name), None)
        return {
            "gpu": first.name if first else None,
            "capability": first.capability if first else None,
            "gpus": None if self.gpus is None else [asdict(gpu) for gpu in self.gpus],
            "driver": self.driver,
            "cuda_driver": self.cuda_driver,
        }


def collect_gpus(nvml: Any, visible_devices: str | None) -> GpuFacts:
    """Ask NVML, given its module (`pynvml`) and the value of ``CUDA_VISIBLE_DEVICES`` (None: unset).

    The GPUs are in PCI order, which is CUDA's order unless the GPUs of a machine differ. A machine without
    the driver's library has no GPUs, which is not an error.

    Raises:
        nvml.NVMLError: the library is there but does not start, e.g. after a driver update without a reboot.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in (
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            return GpuFacts(gpus=())
        raise
    try:
        count = nvml.nvmlDeviceGetCount()
        handles = [_optional(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        visible = _visible(visible_devices, [_optional(nvml, nvml.nvmlDeviceGetUUID, gpu) for gpu in handles])
        return GpuFacts(
            gpus=tuple(_gpu(nvml, handle, index in visible) for index, handle in enumerate(handles)),
            driver=_text(_optional(nvml, nvml.nvmlSystemGetDriverVersion)),
            cuda_driver=_cuda_release(_optional(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)),
        )
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, visible: bool) -> Gpu:
    capability = _optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        name=_text(_optional(nvml, nvml.nvmlDeviceGetName, handle)),
        capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_bytes=int(memory.total) if memory else None,
        visible=visible,
    )


def _optional(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return an answer of NVML; None if the GPU is lost or the question is not supported."""
    if None in arguments:
        return None
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    """NVML's older bindings answer with bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _cuda_release(number: int | None) -> str | None:
    """CUDA's own encoding, 1000 × major + 10 × minor: 12080 is ``12.8``."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _visible(setting: str | None, uuids: list[Any]) -> set[int]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` selects; as in CUDA, an unknown entry ends the list.

    A MIG device is a part of a GPU that NVML lists under another UUID, so with MIG every GPU is visible here.
    """
    if setting is None or "MIG-" in setting:
        return set(range(len(uuids)))
    selected: set[int] = set()
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            selected.add(int(entry))
            continue
        named = [
            index
            for index, uuid in enumerate(uuids)
            if entry.startswith("GPU-") and (_text(uuid) or "").startswith(entry)
        ]
        if len(named) != 1:
            break
        selected.add(named[0])
    return selected


def no_gpu(environment: Mapping[str, Any]) -> str | None:
    """Return why no GPU can be used here; None if a GPU can be."""
    if not environment.get("gpu"):
        return "needs an NVIDIA GPU, none is visible"
    if not environment.get("torch_cuda"):
        return f"torch {environment.get('torch')} is built without CUDA: no use of the {environment['gpu']}"
    return None
