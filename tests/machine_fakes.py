"""Made-up machines: sources of facts about a GPU, a system and a set of packages."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moedoctor.diagnose.check.check import Probes
from moedoctor.diagnose.check.fix_plugin import state
from moedoctor.diagnose.check.pinning import Pinning
from moedoctor.diagnose.cuda.jit_cache import JitCache
from moedoctor.environment import Sources
from moedoctor.processes.cuda_tools import Tool
from moedoctor.upstream.releases.collectors import Collected

LINUX = "Linux version 6.8.0-45-generic"
WSL = "Linux version 6.6.87.2-microsoft-standard-WSL2"
H200 = ("NVIDIA H200", "9.0")
VLLM_018 = {"vllm": "0.18.0", "torch": "2.10.0+cu129", "flashinfer-python": "0.6.6"}
VLLM_033 = {"vllm": "0.33.0", "torch": "2.14.0+cu130", "flashinfer-python": "0.7.2.post1"}
PINNED = Pinning(tried=True, works=True, reason="64 MiB pinned in 9 ms")


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    """The functions of `pynvml` that are used, for GPUs given as (name, capability) or with their bytes.

    A size of None is not supported by the driver, a GPU in `lost` answers nothing.
    """

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18

    def __init__(
        self,
        gpus: Sequence[tuple[Any, ...]],
        driver_cuda: int = 13000,
        *,
        init_error: int | None = None,
        lost: tuple[int, ...] = (),
    ) -> None:
        self.gpus = [(*gpu, 80 << 30)[:3] for gpu in gpus]
        self.driver_cuda, self.init_error, self.lost = driver_cuda, init_error, lost
        self.open = 0

    def _init(self) -> None:
        if self.init_error is not None:
            raise NvmlError(self.init_error)
        self.open += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _handle(self, index: int) -> int:
        if index in self.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def _memory(self, handle: int) -> SimpleNamespace:
        if self.gpus[handle][2] is None:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=self.gpus[handle][2])

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{'ab'[handle] * 4}{str(handle + 1) * 4}-0000",
            "nvmlDeviceGetName": lambda handle: self.gpus[handle][0],
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [
                int(part) for part in self.gpus[handle][1].split(".")
            ],
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlSystemGetDriverVersion": lambda: "580.159.03",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: self.driver_cuda,
        }
        return answers[name]


def sources(
    packages: Mapping[str, str] | None = None,
    *,
    gpu: tuple[str, str] | None = None,
    wsl: bool = False,
    environ: Mapping[str, str] | None = None,
    torch_cuda: str = "13.0",
    files: tuple[str, ...] = (),
    texts: Mapping[str, str] | None = None,
    driver_cuda: int = 13000,
    **replaced: Any,
) -> Sources:
    """Return the facts of a machine with these packages, this GPU and these variables.

    `files` exist in packages; `texts` are all files of the system, by path. `replaced` are sources by name.
    """
    installed = packages or {}
    if texts is None:
        texts = {
            "/proc/version": WSL if wsl else LINUX,
            "/lib/torch/version.py": f"cuda: Optional[str] = '{torch_cuda}'",
            "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04 LTS"',
            "/proc/cpuinfo": "model name\t: A CPU\n",
            "/proc/meminfo": "MemTotal: 1000000 kB\n",
            "/proc/1/cgroup": "0::/\n",
        }

    def read_text(path: str) -> str:
        if path not in texts:
            raise FileNotFoundError(path)
        return texts[path]

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    answers: dict[str, Any] = {
        "environ": {"HOME": "/home/alice", "USER": "alice", **(environ or {})},
        "read_text": read_text,
        "exists": lambda path: path in texts or str(path).removeprefix("/lib/") in files,
        "package_version": version,
        "package_folder": lambda name: Path("/lib") / name if name in installed else None,
        "nvml": lambda: Nvml([gpu] if gpu else [], driver_cuda),
        "locked_memory_limit": lambda: 8 << 20,
        "host": lambda: "workstation-7",
    }
    return Sources(**{**answers, **replaced})


def probes(**replaced: Any) -> Probes:
    """Return probes that answer at once and start no process; `replaced` are by name."""
    answers: dict[str, Any] = {
        "pinning": lambda: PINNED,
        "vllm": lambda: Collected({"vllm_build_flags": "CUDA Archs: Not Set"}),
        "flashinfer": lambda: Collected({"FlashInfer": {"Target CUDA archs (resolved)": "{(9, '0a')}"}}),
        "nvcc": lambda environ: Tool("nvcc", "/usr/local/cuda/bin/nvcc", (13, 0), "13.0.88"),
        "jit_cache": lambda environ: JitCache("/home/alice/.cache/flashinfer", ()),
        "fix_plugin": state,
        "requires": lambda name: (),
    }
    return Probes(**{**answers, **replaced})
