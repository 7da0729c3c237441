"""Writes a package `vllm` that is shaped like a release where moedoctor touches it, with two kernels and no
kernels' code."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FILES = {
    "vllm/__init__.py": "__version__ = '{version}'\n",
    "vllm/envs.py": """
import logging
import os

logger = logging.getLogger("vllm.envs")
environment_variables = {{"VLLM_USE_DEEP_GEMM": lambda: os.getenv("VLLM_USE_DEEP_GEMM")}}


def is_set(name):
    return name in os.environ


def validate_environ(hard_fail):
    for name in os.environ:
        if name.startswith("VLLM_") and name not in environment_variables:
            logger.warning("Unknown vLLM environment variable detected: %s", name)
""",
    "vllm/logger.py": """
class Logger:
    def __init__(self, name):
        self.name, self.said = name, []

    def info_once(self, message, *arguments, scope="local"):
        self.said.append(("info", message, scope))

    def debug_once(self, message, *arguments, scope="local"):
        self.said.append(("debug", message, scope))


def getLogger(name):
    return Logger(name)


def init_logger(name):
    return getLogger(name)
""",
    "vllm/platforms/__init__.py": """
from .interface import Platform, PlatformEnum

_current_platform = None


def __getattr__(name):
    if name == "current_platform":
        return _current_platform
    raise AttributeError(name)
""",
    "vllm/platforms/interface.py": """
import enum
from typing import NamedTuple


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()
    UNSPECIFIED = enum.auto()


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    _enum = PlatformEnum.UNSPECIFIED
    device_name = "none"

    def is_cuda(self):
        return self._enum is PlatformEnum.CUDA

    @classmethod
    def get_device_capability(cls, device_id=0):
        return None

    @classmethod
    def family(cls, number):
        return cls.get_device_capability().major == number // 10
""",
    "vllm/platforms/cuda.py": """
from .interface import Platform, PlatformEnum


class CudaPlatformBase(Platform):
    _enum = PlatformEnum.CUDA
    device_name = "cuda"
""",
    "vllm/utils/import_utils.py": "def has_deep_gemm():\n    return False\n",
    "vllm/utils/flashinfer.py": "def has_flashinfer():\n    return False\n",
    "vllm/config/kernel.py": """
from typing import Literal

MoEBackend = Literal["auto", "cutlass", "marlin"]
""",
    "vllm/config/vllm.py": "_current_vllm_config = None\n",
    "vllm/engine/arg_utils.py": """
import types


class EngineArgs:
    def __init__(self, quantization=None, described=None, moe_backend="auto"):
        self.quantization, self.described, self.moe_backend = quantization, described, moe_backend

    def create_engine_config(self, usage_context=None, headless=False):
        kernel_config = types.SimpleNamespace(moe_backend="auto")
        if self.moe_backend != "auto":
            kernel_config.moe_backend = self.moe_backend
        hf_config = types.SimpleNamespace(quantization_config=self.described)
        hf_config.hidden_act = getattr(self, "hidden_act", "silu")
        model_config = types.SimpleNamespace(quantization=self.quantization, hf_config=hf_config)
        parts = types.SimpleNamespace(kernel_config=kernel_config, model_config=model_config)
        parts.parallel_config = getattr(self, "parallel", None)
        return parts
""",
    "vllm/model_executor/layers/quantization/utils/quant_utils.py": """
kNvfp4Static, kNvfp4Dynamic = "nvfp4 static", "nvfp4 dynamic"
kFp8StaticTensorSym, kFp8Static128BlockSym, kFp8Dynamic128Sym = "fp8", "fp8 block", "fp8 block dynamic"
""",
    "vllm/model_executor/layers/fused_moe/activation.py": """
import enum


class MoEActivation(enum.Enum):
    SILU = "silu"
    RELU2_NO_MUL = "relu2_no_mul"
""",
    "vllm/model_executor/layers/fused_moe/config.py": """
import enum
from dataclasses import dataclass


class RoutingMethodType(enum.Enum):
    Renormalize = 1


@dataclass
class FusedMoEParallelConfig:
    tp_size: int
    pcp_size: int
    dp_size: int
    ep_size: int
    use_ep: bool
    all2all_backend: str
    enable_eplb: bool


@dataclass
class FusedMoEConfig:
    num_experts: int
    activation: object
    moe_parallel_config: FusedMoEParallelConfig
    intermediate_size_per_partition: int
    moe_backend: str = "auto"
    is_act_and_mul: bool = True
""",
    "vllm/model_executor/layers/fused_moe/oracle/nvfp4.py": """
import enum

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)


class NvFp4MoeBackend(enum.Enum):
    FLASHINFER_TRTLLM = "FLASHINFER_TRTLLM"
    VLLM_CUTLASS = "VLLM_CUTLASS"
    MARLIN = "MARLIN"


class Experts:
    families = ()
    gates_only = False

    @staticmethod
    def is_supported_config(cls, config, weight_key, activation_key, activation_format):
        if not any(current_platform.family(family) for family in cls.families):
            return False, f"kernel does not support current device {{current_platform.device_name}}"
        if cls.gates_only and not config.is_act_and_mul:
            return False, "kernel does not support no act_and_mul MLP layer"
        return True, None


class Trtllm(Experts):
    families = (100,)


class Cutlass(Experts):
    families = (100, 120)
    gates_only = True


class Marlin(Experts):
    families = (80, 90, 100, 120)


def backend_to_kernel_cls(backend):
    return [{{"FLASHINFER_TRTLLM": Trtllm, "VLLM_CUTLASS": Cutlass, "MARLIN": Marlin}}[backend.value]]


def select_nvfp4_moe_backend(config, weight_key, activation_key):
    backends = list(NvFp4MoeBackend)
    if config.moe_backend != "auto":
        flags = {{"cutlass": NvFp4MoeBackend.VLLM_CUTLASS, "marlin": NvFp4MoeBackend.MARLIN}}
        if config.moe_backend not in flags:
            raise ValueError(f"moe_backend='{{config.moe_backend}}' is not supported for NvFP4 MoE.")
        backends = [flags[config.moe_backend]]
    for backend in backends:
        for kernel in backend_to_kernel_cls(backend):
            asked = (kernel, config, weight_key, activation_key, "standard")
            supported, reason = kernel.is_supported_config(*asked)
            if supported:
                logger.info_once(f"Using '{{backend.value}}' NvFp4 MoE backend")
                return backend, kernel
            logger.debug_once(f"NvFp4 MoE backend '{{backend.value}}' does not fit since {{reason}}.")
    raise NotImplementedError("No NvFp4 MoE backend supports the deployment configuration.")
""",
    "vllm/model_executor/layers/fused_moe/oracle/unquantized.py": """
import enum

logger = None


class UnquantizedMoeBackend(enum.Enum):
    TRITON = "TRITON"


def select_unquantized_moe_backend(moe_config, use_ep, use_dp):
    return UnquantizedMoeBackend.TRITON
""",
    "vllm-{version}.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
}


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files, and make each folder on their way a package."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in list(file.relative_to(folder).parents)[:-1]:
            (folder / package / "__init__.py").touch()
        file.write_text(text, encoding="utf-8")


def write(folder: Path, version: str = "0.21.0", **replaced: str) -> Path:
    """Write the package into `folder`; `replaced` gives other text for files, by the last part of their
    name."""
    files = {
        name: replaced.get(Path(name).stem, text.format(version=version)) for name, text in FILES.items()
    }
    write_files(folder, {name.format(version=version): text for name, text in files.items()})
    return folder


@contextmanager
def forget() -> Iterator[None]:
    """Let `import vllm` look for the package again; what was imported before comes back at the end.

    A real vLLM cannot be imported twice: torch refuses types that it registers.
    """

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    try:
        yield
    finally:
        after = take()
        place = getattr(after.get("vllm"), "__file__", None) or "nowhere"
        is_real = (Path(place).parent / "_version.py").is_file()
        sys.modules.update(before or (after if is_real else {}))
