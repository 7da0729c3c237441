"""The GPU code inside a file: machine code (SASS) and PTX, with the exact target of each piece.

cuobjdump lists and extracts what is embedded in a shared object or object file. It drops suffixes that it
does not know (12.8 shows ``sm_120`` for 120f), so the target of an extracted cubin is read from its bytes:
`sm_120`, `sm_120a` and `sm_120f` differ in one word of a note.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.diagnose.cuda.elf import EM_CUDA, Budget, Elf, ElfError
from moedoctor.fixes.arch.targets import Target
from moedoctor.processes.cuda_tools import Tool, run_tool
from moedoctor.processes.guardian import make_temporary_folder
from moedoctor.text import TextFileError, list_names, open_file, read_bytes

_LIST_SECONDS = 120.0
_LISTED = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = (sm_[1-9]\d{1,2}[af]?)$", re.MULTILINE)
_PTX_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+(sm_[1-9]\d{1,2}[af]?)\b", re.MULTILINE)
_PTX_HEAD_BYTES = 1 << 16
_MAX_CUBIN_BYTES = 256 << 20
_COMMAND_LINE = re.compile(rb"-arch[ =](sm_[1-9]\d{1,2}[af]?)(?![0-9A-Za-z])")


class DeviceCodeError(Exception):
    """A file whose device code cannot be listed; one line says why."""


@dataclass(frozen=True, order=True)
class Image:
    """Pieces of device code of one kind and target."""

    kind: str
    """``sass`` or ``ptx``."""
    target: Target
    count: int = 1


def list_images(path: Path, tool: Tool) -> tuple[Image, ...]:
    """Return the device code in the shared object or object file at `path`, by cuobjdump.

    Raises DeviceCodeError for another kind of file, and if the tool fails or takes over two minutes.
    """
    listing = _ask(tool, [str(path.resolve())], None)
    if listing is None:
        return ()
    counts: Counter[tuple[str, Target]] = Counter()
    for (listed, name), count in Counter(_LISTED.findall(listing)).items():
        kind, target = "sass" if listed == "elf" else "ptx", Target.parse(name)
        # Suffixes that cuobjdump may not show exist only since 10.0.
        if target.suffix or target.major < 10:
            counts[kind, target] += count
        else:
            counts.update((kind, exact) for exact in _find_exact_targets(path, kind, target, count, tool))
    return _count_images(counts)


def read_cubins(blobs: Iterator[bytes]) -> tuple[Image, ...]:
    """Return the targets of cubins given as bytes. Other files are left out."""
    targets = filter(None, map(read_cubin_target, blobs))
    return _count_images(Counter(("sass", target) for target in targets))


def _count_images(counts: Counter[tuple[str, Target]]) -> tuple[Image, ...]:
    return tuple(sorted(Image(kind, target, count) for (kind, target), count in counts.items()))


def _find_exact_targets(path: Path, kind: str, target: Target, count: int, tool: Tool) -> Sequence[Target]:
    """Return the exact targets of the pieces that cuobjdump calls `target`; `target` if unknown."""
    option, ending = ("-xelf", "*.cubin") if kind == "sass" else ("-xptx", "*.ptx")
    with make_temporary_folder() as folder:
        try:
            _ask(tool, [option, f"sm_{target}", str(path.resolve())], folder)
            targets = [_read_target(Path(folder, name), kind) for name in list_names(Path(folder), ending)]
        except (DeviceCodeError, TextFileError):
            return [target] * count
    exact = [other for other in targets if other is not None and other.capability == target.capability]
    # The pattern also extracts pieces whose suffix was listed.
    plain = [other for other in exact if other.suffix != "a"]
    return plain if len(plain) == count else (exact if len(exact) == count else [target] * count)


def _read_target(file: Path, kind: str) -> Target | None:
    if kind == "sass":
        return read_cubin_target(read_bytes(file, _MAX_CUBIN_BYTES, "a cubin"))
    with open_file(file, expected="a PTX file") as text:
        match = _PTX_TARGET.search(text.read(_PTX_HEAD_BYTES))
    return Target.parse(match[1].decode()) if match else None


def _ask(tool: Tool, arguments: Sequence[str], folder: str | None) -> str | None:
    """Return cuobjdump's output, or None if the file holds no device code."""
    try:
        outcome = run_tool(tool.path, arguments, folder=folder, seconds=_LIST_SECONDS)
    except OSError as error:
        raise DeviceCodeError(f"{tool.name} does not start: {error.strerror}") from error
    if outcome.code == 0:
        return outcome.stdout
    if "does not contain device code" in outcome.stderr + outcome.stdout:
        return None
    raise DeviceCodeError(outcome.first_line or f"{tool} ended with status {outcome.code}")


def read_cubin_target(blob: bytes) -> Target | None:
    """Return the target of the cubin `blob`, or None for anything else.

    The number is in the flags of the ELF header. Their layout changed with ABI version 8 (10.0 and later, and
    everything that CUDA 13 builds). The suffix is in the flags too (``a``, up to CUDA 12.9), and in the
    command line that ptxas leaves in a note (``a`` and ``f``, with ABI version 8).
    """
    cubin = Elf(blob, 0, len(blob), Budget())
    try:
        machine, flags, abi = cubin.header[1], cubin.header[6], blob[8]
    except ElfError:
        return None
    if machine != EM_CUDA:
        return None
    number, accelerated = (flags >> 8 & 0xFF, flags & 0x8) if abi >= 8 else (flags & 0xFF, flags & 0x800)
    major, minor = divmod(number, 10)
    if not major:
        return None
    named = (Target.parse(name.decode()) for name in _COMMAND_LINE.findall(_read_note(cubin)))
    exact = next((target for target in named if target.capability == (major, minor)), None)
    return exact or Target(major, minor, "a" if accelerated else "")


def _read_note(cubin: Elf) -> bytes:
    """Return the section with the command lines of the tools; empty if it is missing or cut off."""
    with contextlib.suppress(ElfError):
        if note := cubin.find_section(".note.nv.tkinfo"):
            return cubin.slice(note.offset, note.size)
    return b""
