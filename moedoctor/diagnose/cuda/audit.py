"""The GPU code in files, and what a GPU does with it: load it, compile it from PTX, or miss it.

Reads FlashInfer's cache, shared objects, cubins and wheels. Whole files are judged: a library may load for
some of its kernels and lack others. The list of its targets with their counts shows that.
"""

from __future__ import annotations

import os
import shutil
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


FATES = {
    "loads": "loads",  # machine code that the GPU runs
    # No machine code for the GPU, but PTX that the driver compiles, with the instructions of its target.
    "compiled": "compiled from PTX",
    "missing": "missing",  # neither: no kernel image is available for execution on the device
    "not_needed": "not needed here",  # neither, and vLLM or FlashInfer does not use the library on the GPU
    # Neither, and only the few models that `note` names use the library on the GPU.
    "for_some": "missing for some models",
}
"""The results of giving device code to a GPU, in words."""


@dataclass(frozen=True)
class Item:
    """One file, or the cubins of one folder, as it was read."""

    path: str
    source: str
    """``shared object``, ``cubins`` or ``build file``."""
    images: tuple[Image, ...] = ()
    note: str | None = None
    skipped: str | None = None
    """The reason why the file could not be read."""


@dataclass(frozen=True)
class AuditImage:
    """Device code of one kind and target in one file."""

    kind: str
    """``sass`` or ``ptx``."""
    target: str
    count: int
    verdict: str | None


@dataclass(frozen=True)
class AuditItem:
    """One file, or the cubins of one folder."""

    path: str
    source: str
    module: str | None
    """``FlashInfer 0.6.6 fused_moe_120`` for a file in FlashInfer's cache."""
    verdict: str | None
    """A key of `FATES`; None without a GPU, without device code, and for a skipped file."""
    lacks: tuple[str, ...]
    """Instructions that the kernels need and that the loading code was compiled without."""
    note: str | None
    skipped: str | None
    images: tuple[AuditImage, ...]

    @property
    def is_wrong(self) -> bool:
        """True if the GPU cannot use the file."""
        return self.verdict == "missing" or bool(self.lacks)


def judge_images(images: Sequence[Image], capability: Capability | None) -> str | None:
    """Return the best that a GPU of `capability` can do with `images`, or None without images or a GPU."""
    if not images or capability is None:
        return None
    if any(image.kind == "sass" and loads_sass(image.target, capability) for image in images):
        return "loads"
    if any(image.kind == "ptx" and compiles_ptx(image.target, capability) for image in images):
        return "compiled"
    return "missing"


def audit(paths: Sequence[Path], capability: Capability | None, tool: Tool | None) -> tuple[AuditItem, ...]:
    """Return every file with device code in or at `paths`, judged for a GPU of `capability` if one is given.

    `tool` is cuobjdump; without it shared objects are skipped. Raises AuditError for a path that does not
    exist or cannot hold device code. Unreadable files inside a folder are skipped with the reason.
    """
    items: list[Item] = []
    for path in paths:
        try:
            items += (_read_folder if os.path.isdir(path) else _read_named)(path, tool)
        except TextFileError as error:
            raise AuditError(f"{path}: {error}") from error
        except KernelError as error:
            raise AuditError(str(error)) from error
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise AuditError(f"{path}: cannot be read ({reason})") from error
    return tuple(_judge(item, capability) for item in items)


def _judge(item: Item, capability: Capability | None) -> AuditItem:
    """Return `item` with its place in FlashInfer's cache and what a GPU does with it."""
    images = tuple(
        AuditImage(image.kind, str(image.target), image.count, judge_images([image], capability))
        for image in item.images
    )
    if item.skipped is not None:
        return AuditItem(item.path, item.source, None, None, (), item.note, item.skipped, images)
    cached = find_cached_module(Path(item.path.partition(".whl!")[0]))
    fate = judge_images(item.images, capability)
    note = item.note or (None if item.images else "no device code")
    if fate == "missing" and capability:
        use = find_library_use(item.path, cached.module if cached else None)
        if use is not None and not use.uses(capability):
            fate, note = "not_needed", f"used on {use.gpus} only"
        elif use is not None and use.needed_by:
            fate, note = "for_some", f"only used by {use.needed_by}"
    lacks: tuple[str, ...] = ()
    if cached and cached.needs_suffix and capability and fate == "loads":
        targets = [image.target for image in item.images if image.kind == "sass"]
        usable = [target for target in targets if loads_sass(target, capability)]
        lacks = min((list_lacking(target, list_needed(capability), _NEWEST) for target in usable), key=len)
    module = f"FlashInfer {cached.release} {cached.module}" if cached else None
    return AuditItem(item.path, item.source, module, fate, lacks, note, None, images)


def _read_named(path: Path, tool: Tool | None) -> Iterable[Item]:
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
    try:
        images, unreadable = build_images(read_text(path, _MAX_NINJA_BYTES, "a build file"))
    except TextFileError as error:
        return Item(str(path), "build file", skipped=str(error))
    note = f"holds names that are not CUDA targets: {join_some(unreadable)}" if unreadable else None
    return Item(str(path), "build file", images, note)


def _read_binary(path: Path, tool: Tool | None, shown: str) -> Item:
    """Read a shared object, object file or cubin, which is called `shown`."""
    try:
        with open_file(path, _MAX_LIBRARY_BYTES, _EXPECTED) as file:
            is_cubin = read_cubin_target(file.read(1 << 12)) is not None
        if is_cubin:
            return Item(shown, "cubins", read_cubins(iter([read_bytes(path, _MAX_CUBIN_BYTES, "a cubin")])))
        if tool is not None:
            return Item(shown, "shared object", list_images(path, tool))
        reason = NO_TOOL
    except (DeviceCodeError, TextFileError) as error:
        reason = str(error)
    except OSError as error:
        reason = f"cannot be read ({(error.strerror or '?').lower()})"
    return Item(shown, "shared object", skipped=reason)


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
            yield Item(f"{path}!*.cubin", "cubins", read_cubins(map(wheel.read, cubins)))


def _read_member(wheel: zipfile.ZipFile, member: zipfile.ZipInfo, shown: str, tool: Tool | None) -> Item:
    if tool is None:
        return Item(shown, "shared object", skipped=NO_TOOL)
    with make_temporary_folder() as folder:
        # The name inside the wheel never becomes a path.
        copy = Path(folder, "member.so")
        with wheel.open(member) as packed, copy.open("wb") as file:
            head = packed.read(1 << 20)
            if head and not head.startswith(_ELF):
                return Item(shown, "shared object", skipped="holds no device code (no ELF header)")
            file.write(head)
            shutil.copyfileobj(packed, file)
        return _read_binary(copy, tool, shown)


def _is_library(name: str) -> bool:
    return name.endswith(".so") or ".so." in name
