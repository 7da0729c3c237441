"""The sources of a FlashInfer release: in a wheel, an unpacked folder, or the installed package.

Nothing is imported. A wheel's sources are unpacked once into the cache folder.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moedoctor.upstream.releases.wheel import KernelError, cache_folder

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
"""What the header's functions need to link, besides themselves."""
_NEEDED = re.compile(
    r"flashinfer/(data/(csrc|include|cutlass|spdlog|cccl)/|jit/).*|[^/]+\.dist-info/METADATA"
)
_MAX_FILES, _MAX_BYTES = 60_000, 1 << 30


@dataclass(frozen=True)
class FlashInferSource:
    """The sources of one release."""

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

    def defines(self) -> list[str]:
        """The ``-D`` flags with which this release builds its MoE module for GPUs of 9.0.

        Read from its ``jit`` folder as text; raises KernelError if they are not there.
        """
        jit = self.package / "jit"
        flags = ["-DNDEBUG"]
        flags += [f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")]
        flags += _listed(jit / "core.py", "common_nvcc_flags")
        flags += _listed(jit / "core.py", "sm90a_nvcc_flags")
        flags += _listed(jit / "fused_moe.py", "nvcc_flags", "gen_cutlass_fused_moe_sm90_module")
        return list(dict.fromkeys(flags))


def named_source(release: str, path: Path) -> FlashInferSource:
    """The sources of `release` in `path`: a wheel, a folder that holds ``flashinfer``, or that folder.

    Raises KernelError if they are not there, or of another release.
    """
    if path.suffix == ".whl" and path.is_file():
        path = _unpacked(path)
    for package in (path / "flashinfer", path):
        if (package / "data" / KERNELS).is_file():
            _check_release(release, package)
            return FlashInferSource(release, package)
    raise KernelError(
        f"{path}: no FlashInfer sources; expected a wheel of flashinfer-python (.whl) or a folder with "
        f"flashinfer/data/{KERNELS}"
    )


def check_source(release: str, path: Path) -> None:
    """Raise KernelError if `path` cannot hold the sources of `release`. Unpacks nothing."""
    if path.suffix != ".whl" or not path.is_file():
        named_source(release, path)
        return
    try:
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise KernelError(f"{path}: cannot be read as a wheel: {error}") from error
    if f"flashinfer/data/{KERNELS}" not in names:
        raise KernelError(f"{path}: no flashinfer/data/{KERNELS} in it; expected flashinfer-python's wheel")
    own = {name for name in names if re.fullmatch(r"flashinfer_python-[^/]+\.dist-info/METADATA", name)}
    if own and f"flashinfer_python-{release}.dist-info/METADATA" not in own:
        other = next(iter(own)).partition("-")[2].partition(".dist-info")[0]
        raise KernelError(f"{path}: is release {other}, not {release}")


def installed_source() -> FlashInferSource:
    """The sources of the installed FlashInfer, which is not imported; raises KernelError."""
    try:
        release = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise KernelError("flashinfer is not installed here") from None
    spec = importlib.util.find_spec("flashinfer")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "data" / KERNELS).is_file():
            return FlashInferSource(release, Path(folder))
    raise KernelError(f"the installed flashinfer {release} has no data/{KERNELS}")


def _check_release(release: str, package: Path) -> None:
    """Raise KernelError if the metadata beside the folder is of another release. It may have none."""
    names = [folder.name for folder in package.parent.glob("flashinfer_python-*.dist-info")]
    if names and f"flashinfer_python-{release}.dist-info" not in names:
        other = names[0].removeprefix("flashinfer_python-").removesuffix(".dist-info")
        raise KernelError(f"{package}: is release {other}, not {release}")


def _listed(file: Path, name: str, function: str | None = None) -> list[str]:
    """The ``-D`` texts in the list that is assigned to `name`, in `function` or at the top of `file`.

    A flag that depends on the CUDA release is taken: all known ones are for releases that are long out.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise KernelError(f"{file}: its compiler flags cannot be read: {error}") from error
    body = tree.body
    if function is not None:
        body = next((x.body for x in body if isinstance(x, ast.FunctionDef) and x.name == function), [])
    for statement in body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == name:
            texts = [node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant)]
            return [text for text in texts if isinstance(text, str) and text.startswith("-D")]
    raise KernelError(f"{file}: no list {name}, which the release's own build would use; not a known release")


def _unpacked(wheel: Path) -> Path:
    """The folder with the needed files of `wheel`, unpacked once."""
    stat = wheel.stat()
    key = hashlib.sha256(f"{wheel.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_folder().parent / "flashinfer" / key
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        with zipfile.ZipFile(wheel) as packed:
            members = [member for member in packed.infolist() if _is_needed(member)]
            if len(members) > _MAX_FILES or sum(member.file_size for member in members) > _MAX_BYTES:
                raise KernelError(f"{wheel}: would unpack to more than {_MAX_BYTES >> 20} MiB, refused")
            packed.extractall(folder, members)
        # Two runs may unpack at once: the second one finds the folder and drops its own.
        try:
            os.rename(folder, target)
        except OSError:
            if not target.is_dir():
                raise
    except (zipfile.BadZipFile, OSError) as error:
        raise KernelError(f"{wheel}: cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _is_needed(member: zipfile.ZipInfo) -> bool:
    parts = PurePosixPath(member.filename).parts
    return _NEEDED.fullmatch(member.filename) is not None and ".." not in parts and not member.is_dir()
