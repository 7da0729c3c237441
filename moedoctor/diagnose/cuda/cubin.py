"""The target of a cubin, read from its bytes: `sm_120`, `sm_120a` and `sm_120f` differ in one word of a note.

The number stands in the flags of the ELF header, whose layout changed with ABI version 8 (10.0 and later,
and everything that CUDA 13 builds). The suffix stands in the flags too (``a``, up to CUDA 12.9), and in the
command line that ptxas leaves in the section ``.note.nv.tkinfo`` (``a`` and ``f``, with ABI version 8).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from moedoctor.fixes.arch.targets import Target

_EM_CUDA = 190
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOTE = b".note.nv.tkinfo"
_COMMAND_LINE = re.compile(rb"-arch[ =](sm_[1-9]\d{1,2}[af]?)(?![0-9A-Za-z])")


def cubin_target(blob: bytes) -> Target | None:
    """The target of the cubin that `blob` holds; None where it is no cubin."""
    if len(blob) < _HEADER.size:
        return None
    header = _HEADER.unpack_from(blob)
    magic, wide, abi, machine, flags = header[0], header[1] == 2, header[5], header[7], header[12]
    if magic != b"\x7fELF" or not wide or machine != _EM_CUDA:
        return None
    number, accelerated = (flags >> 8 & 0xFF, flags & 0x8) if abi >= 8 else (flags & 0xFF, flags & 0x800)
    major, minor = divmod(number, 10)
    if not major:
        return None
    named = (Target.parse(name.decode()) for name in _COMMAND_LINE.findall(_note(blob)))
    exact = next((one for one in named if one.capability == (major, minor)), None)
    return exact or Target(major, minor, "a" if accelerated else "")


def _note(blob: bytes) -> bytes:
    """The section with the command lines of the tools; empty where there is none or the file is cut off."""
    names: bytes | None = None
    sections = list(_sections(blob))
    index = _HEADER.unpack_from(blob)[18]
    if index < len(sections):
        _, offset, size = sections[index]
        names = blob[offset : offset + size]
    for name, offset, size in sections:
        if names is not None and names.startswith(_NOTE + b"\0", name):
            return blob[offset : offset + size]
    return b""


def _sections(blob: bytes) -> Iterator[tuple[int, int, int]]:
    """(offset of the name, offset, size) of each section."""
    header = _HEADER.unpack_from(blob)
    start, size, count = header[11], header[16], header[17]
    for place in range(start, start + size * count, size or 1):
        if size < _SECTION.size or place + _SECTION.size > len(blob):
            return
        name, _, _, _, offset, length, *_ = _SECTION.unpack_from(blob, place)
        yield name, offset, length
