"""Finds what belongs to a vLLM release: its kernels, in a wheel, as a shared object or installed here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_LIBRARY = re.compile(r"vllm/_moe_C(_stable_libtorch)?\.abi3\.so")
_CORE_NAMES = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
"""vLLM's core kernels, FP8 quantization among them; which of the two has an operator differs by release."""
_MAX_LIBRARY_BYTES = 4 << 30


class KernelError(Exception):
    """Kernels that are not available; one line says what was looked for and what to do."""


def package_folders(package: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported; empty if it is not installed."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def cache_folder() -> Path:
    """Return the folder for shared objects out of wheels: ``$XDG_CACHE_HOME/moedoctor/kernels``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "moedoctor" / "kernels"


def shared_object(path: Path) -> Path:
    """Return the shared object with the MoE kernels of `path`, a wheel or a shared object.

    A wheel's shared object is unpacked once into the cache folder, under a name that depends on the wheel's
    size and time. Raises KernelError for anything else.
    """
    if not path.is_file():
        raise KernelError(f"{path}: no such file; expected a vLLM wheel (.whl) or a shared object (.so)")
    if path.suffix == ".whl":
        with _opened(path) as wheel:
            return _unpack(wheel, _member(wheel, path), path)
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise KernelError(
                f"{path}: not a shared object (no ELF header); expected a vLLM wheel or a .so file"
            )
    return path


def check_kernels(path: Path) -> None:
    """Raise KernelError if `path` cannot hold MoE kernels; nothing is unpacked."""
    if path.suffix == ".whl" and path.is_file():
        with _opened(path) as wheel:
            _member(wheel, path)
    else:
        shared_object(path)


def core_libraries(path: Path) -> list[Path]:
    """Return vLLM's core kernels that go with `path`: from the same wheel, or beside the .so file."""
    if path.suffix != ".whl":
        return [file for name in _CORE_NAMES if (file := path.parent / name).is_file()]
    names = {f"vllm/{name}" for name in _CORE_NAMES}
    with _opened(path) as wheel:
        members = [member for member in wheel.infolist() if member.filename in names]
        return [_unpack(wheel, member, path) for member in members if member.file_size <= _MAX_LIBRARY_BYTES]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as wheel:
            yield wheel
    except (zipfile.BadZipFile, OSError) as error:
        raise KernelError(f"{path}: cannot be read as a wheel: {error}") from error


def _member(wheel: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    member = next((entry for entry in wheel.infolist() if _LIBRARY.fullmatch(entry.filename)), None)
    if member is None:
        raise KernelError(f"{path}: no vllm/_moe_C*.abi3.so in it; expected a CUDA wheel of vLLM")
    if member.file_size > _MAX_LIBRARY_BYTES:
        raise KernelError(f"{path}: {member.filename} would unpack to {member.file_size} bytes, refused")
    return member


def _unpack(wheel: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Path:
    key = hashlib.sha256(
        f"{path.resolve()}:{path.stat().st_size}:{path.stat().st_mtime_ns}".encode()
    ).hexdigest()
    target = cache_folder() / key[:16] / Path(member.filename).name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two runs may unpack at once: each writes its own file, and the rename is atomic.
    handle, name = tempfile.mkstemp(dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out, wheel.open(member) as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def installed_library() -> Path:
    """Return the shared object with the MoE kernels of the installed vLLM, which is not imported."""
    for folder in package_folders("vllm"):
        for file in sorted(folder.glob("_moe_C*.so")):
            return file
    raise KernelError("the installed vllm has no _moe_C*.so: it was built without CUDA kernels")


def cuda_runtimes(beside: Path, major: str) -> list[Path]:
    """Return files that may be ``libcudart.so.<major>``: first beside the kernels, then in pip's packages."""
    name = f"libcudart.so.{major}"
    files = [beside.parent / name]
    for folder in package_folders("nvidia"):
        files += [folder / "cuda_runtime" / "lib" / name, folder / f"cu{major}" / "lib" / name]
    return [file for file in files if file.is_file()]
