"""The GPU code in files, and what a GPU does with it: load it, compile it from PTX, or miss it.

Reads FlashInfer's cache, shared objects, cubins and wheels. Whole files are judged: a library may load for
some of its kernels and lack others. The list of its targets with their counts shows that.
"""

from __future__ import annotations

import enum
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moedoctor.diagnose.cuda.device_code import (
    DeviceCodeError,
    Image,
    list_images,
    read_cubin_target,
    read_cubins,
)
from moedoctor.diagnose.cuda.instructions import list_lacking, list_needed
from moedoctor.diagnose.cuda.jit_cache import build_images, find_cached_module
from moedoctor.diagnose.cuda.library_use import find_library_use
from moedoctor.fixes.arch.targets import Capability, compiles_ptx, loads_sass
from moedoctor.processes.cuda_tools import Tool
from moedoctor.processes.guardian import make_temporary_folder
from moedoctor.text import TextFileError, join_some, open_file, read_bytes, read_text, walk
from moedoctor.upstream.releases.wheel import KernelError, open_wheel

NO_TOOL = "needs cuobjdump: install triton or the CUDA toolkit"

_NEWEST = (13, 5)
_ELF = b"\x7fELF"
_EXPECTED = "a folder, .so, .cubin, .whl or build.ninja"
_MAX_LIBRARY_BYTES = 8 << 30
_MAX_CUBIN_BYTES = 64 << 20
_MAX_WHEEL_BYTES = 16 << 30
"""Of all members of a wheel together, unpacked."""
_MAX_NINJA_BYTES = 64 << 20


class AuditError(Exception):
    """A path that cannot be audited; one line says why."""


class Fate(str, enum.Enum):
    """The result of giving device code to a GPU."""

    LOADS = "loads"
    """Machine code that the GPU runs."""
    COMPILED = "compiled from PTX"
    """No machine code for the GPU, but PTX that the driver compiles, with the instructions of its target."""
    MISSING = "missing"
    """Neither: no kernel image is available for execution on the device."""
    NOT_NEEDED = "not needed here"
    """Neither, and vLLM or FlashInfer does not use the library on the GPU."""
    FOR_SOME = "missing for some models"
    """Neither, and only the few models that `note` names use the library on the GPU."""


@dataclass(frozen=True)
class Item:
    """One file, or the cubins of one folder."""

    path: str
    source: str
    """``shared object``, ``cubins`` or ``build file``."""
    images: tuple[Image, ...] = ()
    module: str | None = None
    """``FlashInfer 0.6.6 fused_moe_120`` for a file in FlashInfer's cache."""
    fate: Fate | None = None
    """None without a GPU, without device code, and for a skipped file."""
    lacks: tuple[str, ...] = ()
    """Instructions that the kernels need and that the loading code was compiled without."""
    note: str | None = None
    skipped: str | None = None
    """The reason why the file could not be read."""


def judge_images(images: Sequence[Image], capability: Capability) -> Fate | None:
    """Return the best that a GPU of `capability` can do with `images`, or None without images."""
    if not images:
        return None
    if any(image.kind == "sass" and loads_sass(image.target, capability) for image in images):
        return Fate.LOADS
    if any(image.kind == "ptx" and compiles_ptx(image.target, capability) for image in images):
        return Fate.COMPILED
    return Fate.MISSING


def audit(paths: Sequence[Path], capability: Capability | None, tool: Tool | None) -> tuple[Item, ...]:
    """Return every file with device code in or at `paths`, judged for a GPU of `capability` if one is given.

    `tool` is cuobjdump; without it shared objects are skipped. Raises AuditError for a path that does not
    exist or cannot hold device code. Unreadable files inside a folder are skipped with the reason.
    """
    items: list[Item] = []
    for path in paths:
        try:
            items += (_read_folder if os.path.isdir(path) else _read_named)(path, tool)
        except TextFileError as error:
            raise AuditError(f"{path}: {error.message}") from error
        except KernelError as error:
            raise AuditError(str(error)) from error
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise AuditError(f"{path}: cannot be read ({reason})") from error
    return tuple(_judge(item, capability) for item in items)


def _judge(item: Item, capability: Capability | None) -> Item:
    """Return `item` with its place in FlashInfer's cache and what a GPU does with it."""
    if item.skipped is not None:
        return item
    cached = find_cached_module(Path(item.path.partition(".whl!")[0]))
    fate = judge_images(item.images, capability) if capability else None
    note = item.note or (None if item.images else "no device code")
    if fate is Fate.MISSING and capability:
        use = find_library_use(item.path, cached.module if cached else None)
        if use is not None and not use.uses(capability):
            fate, note = Fate.NOT_NEEDED, f"used on {use.gpus} only"
        elif use is not None and use.needed_by:
            fate, note = Fate.FOR_SOME, f"only used by {use.needed_by}"
    lacks: tuple[str, ...] = ()
    if cached and cached.needs_suffix and capability and fate is Fate.LOADS:
        targets = [image.target for image in item.images if image.kind == "sass"]
        usable = [target for target in targets if loads_sass(target, capability)]
        lacks = min((list_lacking(target, list_needed(capability), _NEWEST) for target in usable), key=len)
    module = f"FlashInfer {cached.release} {cached.module}" if cached else None
    return replace(item, module=module, fate=fate, lacks=lacks, note=note)


def _read_named(path: Path, tool: Tool | None) -> Iterable[Item]:
    """Read a file that the user named."""
    with open_file(path, expected=_EXPECTED) as file:
        magic = file.read(4)
    if path.suffix == ".ninja":
        return [_read_build_file(path)]
    if path.suffix == ".whl":
        return _read_wheel(path, tool)
    if magic != _ELF:
        raise AuditError(f"{path}: holds no device code (no ELF header); expected {_EXPECTED}")
    return [_read_binary(path, tool, str(path))]


def _read_folder(folder: Path, tool: Tool | None) -> Iterator[Item]:
    """Read the files under `folder`. Links to folders are not followed."""
    for parent, names in walk(folder):
        paths = [parent / name for name in names]
        if cubins := [path for path in paths if path.suffix == ".cubin"]:
            yield _read_cubins(parent, cubins)
        for path in paths:
            if path.name == "build.ninja":
                yield _read_build_file(path)
            elif _is_library(path.name):
                yield _read_binary(path, tool, str(path))
            elif path.suffix == ".whl":
                try:
                    yield from _read_wheel(path, tool)
                except KernelError as error:
                    yield Item(str(path), "shared object", skipped=str(error).removeprefix(f"{path}: "))


def _read_cubins(folder: Path, paths: Sequence[Path]) -> Item:
    """Read the cubins of one folder; those that cannot be read are left out and counted."""
    unreadable: list[str] = []

    def read_blobs() -> Iterator[bytes]:
        for path in paths:
            try:
                yield read_bytes(path, _MAX_CUBIN_BYTES, "a cubin")
            except TextFileError as error:
                unreadable.append(f"{path.name} {error.message}")

    item = Item(str(folder), "cubins", read_cubins(read_blobs()))
    if not unreadable:
        return item
    if len(unreadable) == len(paths):
        return replace(item, skipped=unreadable[0])
    return replace(item, note=f"left out {len(unreadable)} of {len(paths)}: {unreadable[0]}")


def _read_build_file(path: Path) -> Item:
    item = Item(str(path), "build file")
    try:
        images, unreadable = build_images(read_text(path, _MAX_NINJA_BYTES, "a build file"))
    except TextFileError as error:
        return replace(item, skipped=error.message)
    note = f"holds names that are not CUDA targets: {join_some(unreadable)}" if unreadable else None
    return replace(item, images=images, note=note)


def _read_binary(path: Path, tool: Tool | None, shown: str) -> Item:
    """Read a shared object, object file or cubin, which is called `shown`."""
    item = Item(shown, "shared object")
    try:
        with open_file(path, _MAX_LIBRARY_BYTES, _EXPECTED) as file:
            is_cubin = read_cubin_target(file.read(1 << 12)) is not None
        if is_cubin:
            return Item(shown, "cubins", read_cubins(iter([read_bytes(path, _MAX_CUBIN_BYTES, "a cubin")])))
        if tool is None:
            return replace(item, skipped=NO_TOOL)
        return replace(item, images=list_images(path, tool))
    except DeviceCodeError as error:
        return replace(item, skipped=str(error))
    except TextFileError as error:
        return replace(item, skipped=error.message)
    except OSError as error:
        return replace(item, skipped=f"cannot be read ({(error.strerror or '?').lower()})")


def _read_wheel(path: Path, tool: Tool | None) -> Iterator[Item]:
    """Read each shared object of a wheel, and all its cubins together. Their paths come after a ``!``.

    Raises KernelError for a file that is not a wheel.
    """
    left = _MAX_WHEEL_BYTES
    cubins: list[zipfile.ZipInfo] = []
    with open_wheel(path) as wheel:
        for member in wheel.infolist():
            is_cubin = member.filename.endswith(".cubin")
            if not is_cubin and not _is_library(member.filename.rpartition("/")[2]):
                continue
            left -= member.file_size
            if left < 0 or member.file_size > (_MAX_CUBIN_BYTES if is_cubin else _MAX_LIBRARY_BYTES):
                shown = f"{path}!{member.filename}"
                yield Item(shown, "shared object", skipped=f"would unpack to {member.file_size} bytes")
            elif is_cubin:
                cubins.append(member)
            else:
                yield _read_member(wheel, member, f"{path}!{member.filename}", tool)
        if cubins:
            images = read_cubins(b"".join(_read_blocks(wheel, member)) for member in cubins)
            yield Item(f"{path}!*.cubin", "cubins", images)


def _read_member(wheel: zipfile.ZipFile, member: zipfile.ZipInfo, shown: str, tool: Tool | None) -> Item:
    if tool is None:
        return Item(shown, "shared object", skipped=NO_TOOL)
    with make_temporary_folder() as folder:
        # The name inside the wheel never becomes a path.
        copy = Path(folder, "member.so")
        with copy.open("wb") as file:
            for block in _read_blocks(wheel, member):
                if file.tell() == 0 and not block.startswith(_ELF):
                    return Item(shown, "shared object", skipped="holds no device code (no ELF header)")
                file.write(block)
        return _read_binary(copy, tool, shown)


def _read_blocks(wheel: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with wheel.open(member) as packed:
        while block := packed.read(1 << 20):
            yield block


def _is_library(name: str) -> bool:
    return name.endswith(".so") or ".so." in name
