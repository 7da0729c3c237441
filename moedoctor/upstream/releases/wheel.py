"""Finds what belongs to a vLLM release: its kernels, in a wheel, as a shared object or installed here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from moedoctor.results import UnavailableError
from moedoctor.text import TextFileError, open_file, shorten

_LIBRARY = re.compile(r"vllm/_moe_C(_stable_libtorch)?\.abi3\.so")
_CORE_NAMES = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
"""vLLM's core kernels, FP8 quantization among them; which of the two has an operator differs by release."""
_CORE = re.compile(r"vllm/_C(_stable_libtorch)?\.abi3\.so")
_MAX_BYTES = 4 << 30
_MAX_READ = 32 << 20
_DAMAGED = (zipfile.BadZipFile, OSError, RuntimeError, EOFError, ValueError, zlib.error, struct.error)
"""Exceptions of `zipfile` for a damaged file, or for one with a password or an unknown compression."""


class KernelError(UnavailableError):
    """Kernels that are not available, so a case is skipped; one line says what was looked for, what to do."""


def find_package_folders(package: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported; empty if it is not installed."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def cache_folder(kind: str) -> Path:
    """Return the folder ``$XDG_CACHE_HOME/moedoctor/<kind>``, which may not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "moedoctor" / kind


def find_shared_object(path: Path) -> Path:
    """Return the shared object with the MoE kernels of `path`, a wheel or a shared object.

    A wheel's shared object is unpacked once into the cache folder. Raises KernelError for anything else.
    """
    check_kernels(path)
    if path.suffix != ".whl":
        return path
    return next(file for file in unpack(path, "kernels", _LIBRARY).glob("vllm/*.so"))


def check_kernels(path: Path) -> None:
    """Raise KernelError if `path` cannot hold MoE kernels; nothing is unpacked."""
    expected = "a vLLM wheel (.whl) or a shared object (.so)"
    try:
        with open_file(path, expected=expected) as file:
            magic = file.read(4)
    except TextFileError as error:
        raise KernelError(f"{path}: {error.message}") from error
    if path.suffix == ".whl":
        with open_wheel(path) as wheel:
            if not any(_LIBRARY.fullmatch(name) for name in wheel.namelist()):
                raise KernelError(f"{path}: no vllm/_moe_C*.abi3.so in it; expected a CUDA wheel of vLLM")
    elif magic != b"\x7fELF":
        raise KernelError(f"{path}: not a shared object (no ELF header); expected {expected}")


def find_core_libraries(path: Path) -> list[Path]:
    """Return vLLM's core kernels that go with `path`: from the same wheel, or beside the .so file."""
    folder = unpack(path, "kernels", _CORE) / "vllm" if path.suffix == ".whl" else path.parent
    return [file for name in _CORE_NAMES if (file := folder / name).is_file()]


@contextlib.contextmanager
def open_wheel(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel. Raises KernelError if it cannot be read, also later on."""
    try:
        file = _Bounded(open_file(path, expected="a wheel").detach())
        with file, zipfile.ZipFile(file) as wheel:
            yield wheel
    except TextFileError as error:
        raise KernelError(f"{path}: {error.message}") from error
    except _DAMAGED as error:
        raise KernelError(f"{path}: cannot be read as a wheel: {shorten(str(error), 200)}") from error


class _Bounded(io.BufferedReader):
    """A file that refuses to give so much at once that only a list of far too many members can be meant."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(_MAX_READ + 1 if size is None or size < 0 else min(size, _MAX_READ + 1))
        if len(data) > _MAX_READ:
            raise zipfile.BadZipFile("its list of files is too large")
        return data


def unpack(path: Path, kind: str, wanted: re.Pattern[str], max_bytes: int = _MAX_BYTES) -> Path:
    """Return a folder of the cache with the files of a wheel whose whole names match `wanted`.

    They are unpacked once, under a name that depends on the wheel's size and time. Raises KernelError.
    """
    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{wanted.pattern}"
    target = cache_folder(kind) / hashlib.sha256(key.encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_wheel(path) as wheel, tempfile.TemporaryDirectory(dir=target.parent) as name:
        members = [member for member in wheel.infolist() if wanted.fullmatch(member.filename)]
        members = [member for member in members if ".." not in Path(member.filename).parts]
        if sum(member.file_size for member in members) > max_bytes:
            raise KernelError(f"{path}: would unpack to more than {max_bytes >> 20} MiB, refused")
        folder = Path(name) / "unpacked"
        folder.mkdir()
        wheel.extractall(folder, members)
        # Two runs may unpack at once: the second one finds the folder and drops its own.
        with contextlib.suppress(OSError):
            folder.rename(target)
    if not target.is_dir():
        raise KernelError(f"{path}: cannot be unpacked into {target}")
    return target


def find_installed_library() -> Path:
    """Return the shared object with the MoE kernels of the installed vLLM, which is not imported."""
    for folder in find_package_folders("vllm"):
        for file in sorted(folder.glob("_moe_C*.so")):
            return file
    raise KernelError("the installed vllm has no _moe_C*.so: it was built without CUDA kernels")


def find_cuda_runtimes(beside: Path, major: str) -> list[Path]:
    """Return files that may be ``libcudart.so.<major>``: first beside the kernels, then in pip's packages."""
    name = f"libcudart.so.{major}"
    files = [beside.parent / name]
    for folder in find_package_folders("nvidia"):
        files += [folder / "cuda_runtime" / "lib" / name, folder / f"cu{major}" / "lib" / name]
    return [file for file in files if file.is_file()]
