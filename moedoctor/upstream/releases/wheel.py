"""Finds the MoE kernels of a vLLM release: in its wheel, as a shared object, or installed here."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

_LIBRARY = re.compile(r"vllm/_moe_C(_stable_libtorch)?\.abi3\.so")
_CORE_NAMES = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
"""vLLM's core kernels, FP8 quantisation among them; which of the two holds an operator differs by release."""
_MAX_LIBRARY_BYTES = 4 << 30


class KernelError(Exception):
    """Kernels that cannot be had; one line says what was looked for and what to do."""


def cache_folder() -> Path:
    """Where shared objects out of wheels are kept: ``$XDG_CACHE_HOME/moedoctor/kernels``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "moedoctor" / "kernels"


def shared_object(path: Path) -> Path:
    """The shared object with the MoE kernels that `path`, a wheel or a shared object, stands for.

    A wheel's is unpacked once into the cache folder, under a name that its size and time are part of.
    Raises KernelError for anything else.
    """
    if not path.is_file():
        raise KernelError(f"{path}: no such file; expected a vLLM wheel (.whl) or a shared object (.so)")
    if path.suffix != ".whl":
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                raise KernelError(
                    f"{path}: not a shared object (no ELF header); expected a vLLM wheel or a .so file"
                )
        return path
    try:
        with zipfile.ZipFile(path) as wheel:
            return _unpack(wheel, _member(wheel, path), path)
    except (zipfile.BadZipFile, OSError) as error:
        raise KernelError(f"{path}: cannot be read as a wheel: {error}") from error


def core_libraries(path: Path) -> list[Path]:
    """vLLM's core kernels that go with `path`: shared objects in the wheel, or beside the .so file."""
    if path.suffix != ".whl":
        return [file for name in _CORE_NAMES if (file := path.parent / name).is_file()]
    try:
        with zipfile.ZipFile(path) as wheel:
            members = [
                one for one in wheel.infolist() if one.filename in {f"vllm/{name}" for name in _CORE_NAMES}
            ]
            return [_unpack(wheel, one, path) for one in members if one.file_size <= _MAX_LIBRARY_BYTES]
    except (zipfile.BadZipFile, OSError) as error:
        raise KernelError(f"{path}: cannot be read as a wheel: {error}") from error


def _member(wheel: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    member = next((one for one in wheel.infolist() if _LIBRARY.fullmatch(one.filename)), None)
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
    """The shared object of the vLLM of this environment, found without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("_moe_C*.so")):
            return file
    raise KernelError("the installed vllm has no _moe_C*.so: it was built without CUDA kernels")


def cuda_runtimes(beside: Path, major: str) -> list[Path]:
    """Files that may be ``libcudart.so.<major>``, best first: beside the kernels, then pip's packages."""
    name = f"libcudart.so.{major}"
    found = [beside.parent / name]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += [Path(folder) / "cuda_runtime" / "lib" / name, Path(folder) / f"cu{major}" / "lib" / name]
    return [file for file in found if file.is_file()]


def check_kernels(path: Path) -> None:
    """Raise KernelError where `path` cannot hold MoE kernels; looks only, unpacks nothing."""
    if path.suffix == ".whl" and path.is_file():
        try:
            with zipfile.ZipFile(path) as wheel:
                _member(wheel, path)
        except (zipfile.BadZipFile, OSError) as error:
            raise KernelError(f"{path}: cannot be read as a wheel: {error}") from error
    else:
        shared_object(path)
