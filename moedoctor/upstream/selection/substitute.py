"""Makes an importable vLLM believe that it runs on a GPU of another compute capability.

Nothing of vLLM is changed on disk, and no GPU is needed. Its own CUDA platform class is used; only the
question that needs a device is answered differently. For a child process only: what is substituted stays so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moedoctor.upstream.releases.wheel import find_package_folders

EXTENSIONS = (
    "_C",
    "_C_stable_libtorch",
    "_moe_C",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""Compiled modules of vLLM that its Python code imports; left out if they do not load without a GPU."""

_LOOKS_FOR = {
    "flashinfer": "has_flashinfer",
    "deep_gemm": "has_deep_gemm",
    "triton_kernels": "has_triton_kernels",
    "humming": "has_humming",
    "b12x": "get_b12x_fused_moe",
    "hpc": "has_hpc",
    "quark": "has_quark",
}
"""Optional library -> what the names of vLLM's functions that look for it begin with."""
LIBRARIES = tuple(_LOOKS_FOR)
_LOOKED_FOR_IN = ("vllm.utils.flashinfer", "vllm.utils.import_utils", "vllm.utils.b12x", "vllm.utils.hpc")


class SubstituteError(Exception):
    """vLLM cannot be asked in this process; as text, why, in one line."""


class Substitute:
    """vLLM of this process, on a GPU of our choosing."""

    def __init__(self, platform: Any, notes: tuple[str, ...]) -> None:
        self._platform = platform
        self.notes = notes
        """Parts that were left out or answered in upstream's place."""

    def use(self, capability: tuple[int, int]) -> None:
        """Give the GPU this compute capability from now on."""
        type(self._platform).substituted = capability
        self.forget()

    def pretend(self, libraries: Mapping[str, bool]) -> None:
        """Let vLLM find these optional libraries (of `LIBRARIES`), or not, from now on."""
        for name in _LOOKED_FOR_IN:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for library, there in libraries.items():
            answer: Any = there
            if library == "b12x":  # its function returns a module or None
                has = types.SimpleNamespace(is_supported=lambda *arguments, **options: True)
                answer = has if there else None
            for module in _list_modules():
                for name, value in list(vars(module).items()):
                    if name.startswith(_LOOKS_FOR[library]) and callable(value):
                        setattr(module, name, lambda *arguments, _answer=answer, **options: _answer)
        self.forget()

    def find_libraries(self) -> dict[str, bool]:
        """Return whether vLLM finds each optional library (of `LIBRARIES`) that this release looks for."""
        there = {}
        for library, name in _LOOKS_FOR.items():
            for place in _LOOKED_FOR_IN:
                with contextlib.suppress(ImportError):
                    look = getattr(importlib.import_module(place), name, None)
                    if look is not None:
                        there[library] = _answers_yes(look)
        return there

    def forget(self) -> None:
        """Make vLLM forget what it remembers for the life of a process."""
        for module in _list_modules():
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None) if isinstance(value, _CACHED) else None
                if clear is not None and getattr(value, "__module__", "").startswith("vllm."):
                    clear()


def install(libraries: Mapping[str, bool] | None = None) -> Substitute:
    """Substitute the platform of vLLM in this process, best before anything else imports vllm.

    `libraries` says which optional libraries (`flashinfer`, `deep_gemm`, `triton_kernels`, `humming`) vLLM
    is to find; the others are looked for as usual. Raises SubstituteError if vLLM cannot be imported.
    """
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"  # its import would start a compiler
    notes = _stand_in_for_extensions()
    try:
        platforms: Any = importlib.import_module("vllm.platforms")
        interface = importlib.import_module("vllm.platforms.interface")
        # Modules keep the platform object that they import, and vLLM asks for it while it is being imported:
        # so an object that is there already is kept, and only its class changes.
        platform = getattr(platforms, "_current_platform", None)
        if platform is None:
            platform = platforms._current_platform = _make_platform_class(interface.Platform, interface)()
        platform.__class__ = _make_platform_class(interface.Platform, interface)
        cuda = importlib.import_module("vllm.platforms.cuda")
        platform.__class__ = _make_platform_class(cuda.CudaPlatformBase, interface)
        substitute = Substitute(platform, notes)
        substitute.pretend(libraries or {})
        return substitute
    except Exception as error:
        raise SubstituteError(f"vllm cannot be imported here: {type(error).__name__}: {error}") from error


def _make_platform_class(base: Any, interface: Any) -> Any:
    class SubstitutePlatform(base):  # type: ignore[misc]
        substituted = (9, 0)
        _enum = interface.PlatformEnum.CUDA
        device_name = device_type = "cuda"
        dispatch_key = "CUDA"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*cls.substituted)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "substituted by moedoctor"

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            least = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
            return bool(cls.substituted >= least)

    return SubstitutePlatform


def _stand_in_for_extensions() -> tuple[str, ...]:
    """Make empty modules for the compiled parts that do not load, and the operators that selection asks."""
    import torch

    folders = find_package_folders("vllm")
    if not folders:
        raise SubstituteError("vllm is not installed here")
    missing = [name for name in EXTENSIONS if not loads_extension(name, folders[0])]
    for name in missing:
        full = f"vllm.{name}"
        # What was imported on the way remembers that the compiled part is missing.
        package = f"{full.rpartition('.')[0]}."
        siblings = [other for other in sys.modules if other.startswith(package) and package != "vllm."]
        for sibling in siblings:
            if getattr(sys.modules[sibling], "__file__", None):
                del sys.modules[sibling]
        module = types.ModuleType(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None)
        sys.modules[full] = module
    answered = []
    for name, answer in OPERATORS.items():
        with contextlib.suppress(AttributeError):
            getattr(torch.ops._C, name)
            continue
        setattr(torch.ops._C, name, answer)
        answered.append(name)
    notes = (f"compiled modules that do not load here: {', '.join(missing)}",) if missing else ()
    return (*notes, f"answered in their place: {', '.join(answered)}") if answered else notes


def _list_modules() -> list[types.ModuleType]:
    """Return the modules of vLLM that are imported already."""
    return [module for name, module in sys.modules.items() if name.startswith("vllm.")]


def loads_extension(name: str, folder: Path) -> bool:
    """Return True if the compiled module is on disk and loads here."""
    parts = name.split(".")
    if not any(folder.joinpath(*parts[:-1]).glob(f"{parts[-1]}.*")):
        return False
    with contextlib.suppress(Exception):
        importlib.import_module(f"vllm.{name}")
        return True
    return False


def _answers_yes(look: Callable[[], Any]) -> bool:
    with contextlib.suppress(Exception):
        answer = look()
        return answer is not None and answer is not False
    return False


_CACHED = (type(functools.lru_cache(lambda: None)),)
OPERATORS = {
    # csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_entry.cu, built with CUDA 12.9 or 13.
    "cutlass_group_gemm_supported": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    # csrc/libtorch_stable/quantization/fp4/mxfp4_experts_quant.cu
    "mxfp4_experts_quant_supported": lambda capability: 100 <= capability < 120,
}
