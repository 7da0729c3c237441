"""The sources of a FlashInfer release: in a wheel, an unpacked folder, or the installed package.

Nothing is imported. A wheel's sources are unpacked once into the cache folder.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moedoctor.text import TextFileError, read_text
from moedoctor.upstream.releases.wheel import KernelError, find_package_folders, open_wheel, unpack

KERNELS = PurePosixPath("csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh")
"""The header with the routing maps and finalize, under the package's data folder."""
_NV = PurePosixPath("csrc/nv_internal")
_CUTLASS_KERNELS = _NV / "tensorrt_llm" / "kernels" / "cutlass_kernels"
_INCLUDES = (
    _NV,
    _NV / "include",
    _NV / "tensorrt_llm/cutlass_extensions/include",
    _CUTLASS_KERNELS / "include",
    _CUTLASS_KERNELS,
    PurePosixPath("include"),
    PurePosixPath("csrc"),
    PurePosixPath("cutlass/include"),
    PurePosixPath("cutlass/tools/util/include"),
    PurePosixPath("spdlog/include"),
    PurePosixPath("cccl/cub"),
    PurePosixPath("cccl/libcudacxx/include"),
    PurePosixPath("cccl/thrust"),
)
"""The include folders of the package's own build, in its order; a release without one does not need it."""
_SOURCES = (
    _CUTLASS_KERNELS / "moe_gemm/moe_gemm_tma_warp_specialized_input.cu",
    *(_NV / f"cpp/common/{name}.cpp" for name in ("logger", "stringUtils", "tllmException", "envUtils")),
)
"""Sources that the header's functions need to link."""
_NEEDED = re.compile(
    r"flashinfer/(data/(csrc|include|cutlass|spdlog|cccl)/|jit/).*[^/]|[^/]+\.dist-info/METADATA"
)
_MAX_PYTHON_BYTES = 8 << 20
_METADATA = re.compile(r"flashinfer_python-(.+)\.dist-info")
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class FlashInferSource:
    release: str
    package: Path
    """The folder ``flashinfer``, with ``data`` and ``jit`` in it."""

    @property
    def data(self) -> Path:
        return self.package / "data"

    @property
    def kernels(self) -> Path:
        """The header with the functions that the probe calls."""
        return self.data / KERNELS

    @property
    def includes(self) -> list[Path]:
        """Include folders in the order of the package's own build."""
        return [folder for part in _INCLUDES if (folder := self.data / part).is_dir()]

    @property
    def sources(self) -> list[Path]:
        """The package's own source files that are linked with the probe."""
        return [self.data / part for part in _SOURCES]

    def list_defines(self) -> list[str]:
        """The ``-D`` flags with which this release builds its MoE module for GPUs of 9.0.

        Read from its ``jit`` folder as text; raises KernelError if they are not there.
        """
        jit = self.package / "jit"
        flags = ["-DNDEBUG"]
        flags += [f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")]
        flags += _read_list(jit / "core.py", "common_nvcc_flags")
        flags += _read_list(jit / "core.py", "sm90a_nvcc_flags")
        flags += _read_list(jit / "fused_moe.py", "nvcc_flags", "gen_cutlass_fused_moe_sm90_module")
        return list(dict.fromkeys(flags))


def find_source(release: str, path: Path) -> FlashInferSource:
    """Return the sources of `release` in `path`: a wheel, a folder that holds ``flashinfer``, or that folder.

    Raises KernelError if they are not there, or of another release.
    """
    # Not Path.is_file, which raises for a name that is too long.
    if path.suffix == ".whl" and os.path.isfile(path):
        check_source(release, path)
        path = unpack(path, "flashinfer", _NEEDED, _MAX_BYTES)
    for package in (path / "flashinfer", path):
        if os.path.isfile(package / "data" / KERNELS):
            _check_release(release, package, (folder.name for folder in package.parent.glob("*.dist-info")))
            return FlashInferSource(release, package)
    raise KernelError(
        f"{path}: no FlashInfer sources; expected a wheel of flashinfer-python (.whl) or a folder with "
        f"flashinfer/data/{KERNELS}"
    )


def check_source(release: str, path: Path) -> None:
    """Raise KernelError if `path` cannot hold the sources of `release`. Unpacks nothing."""
    if path.suffix != ".whl" or not os.path.isfile(path):
        find_source(release, path)
        return
    with open_wheel(path) as wheel:
        names = wheel.namelist()
    if f"flashinfer/data/{KERNELS}" not in names:
        raise KernelError(f"{path}: no flashinfer/data/{KERNELS} in it; expected flashinfer-python's wheel")
    _check_release(release, path, (PurePosixPath(name).parts[0] for name in names))


def find_installed_source() -> FlashInferSource:
    """Return the sources of the installed FlashInfer, which is not imported; raises KernelError."""
    try:
        release = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise KernelError("flashinfer is not installed here") from None
    for package in find_package_folders("flashinfer"):
        if os.path.isfile(package / "data" / KERNELS):
            return FlashInferSource(release, package)
    raise KernelError(f"the installed flashinfer {release} has no data/{KERNELS}")


def _check_release(release: str, path: Path, names: Iterable[str]) -> None:
    """Raise KernelError if a metadata folder among `names` is of another release. There may be none."""
    releases = {match[1] for match in map(_METADATA.fullmatch, names) if match}
    if releases and release not in releases:
        raise KernelError(f"{path}: is release {releases.pop()}, not {release}")


def _read_list(file: Path, name: str, function: str | None = None) -> list[str]:
    """Return the ``-D`` texts in the list that is assigned to `name`, in `function` or at the top of `file`.

    A flag that depends on the CUDA release is taken: all known ones are for releases that are long out.
    """
    try:
        tree = ast.parse(read_text(file, _MAX_PYTHON_BYTES))
    except TextFileError as error:
        raise KernelError(f"{file}: {error.message}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise KernelError(f"{file}: its compiler flags cannot be read: {error}") from error
    body = tree.body
    if function is not None:
        body = next((x.body for x in body if isinstance(x, ast.FunctionDef) and x.name == function), [])
    for statement in body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == name:
            texts = [node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant)]
            return [text for text in texts if isinstance(text, str) and text.startswith("-D")]
    raise KernelError(f"{file}: no list {name}, which the release's own build would use; not a known release")
