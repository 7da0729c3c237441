"""Stand-ins for CUDA's tools and files, for machines that have neither."""

import struct
from pathlib import Path

BANNER = "Cuda compilation tools, release {0}, V{0}.93"


def fake_tool(folder: Path, name: str, cuda: str, body: str = "exit 0") -> Path:
    """An executable that gives its version as CUDA's tools do, and else runs `body` (sh)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    banner = BANNER.format(cuda)
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{banner}"; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return path


def fake_cubin(number: int, *, abi: int = 8, flags: int | None = None, command_line: str = "") -> bytes:
    """An ELF file with the header of a cubin for ``sm_<number>``, and the note that ptxas leaves there.

    `abi` 7 is the layout up to CUDA 12.9 for 9.0 and older, 8 the one after it.
    """
    if flags is None:
        flags = 0x6000002 | number << 8 if abi >= 8 else 0x500 | number << 16 | number
    names = b"\0.shstrtab\0.note.nv.tkinfo\0"
    note = command_line.encode()
    names_at, note_at = 64, 64 + len(names)
    sections_at = note_at + len(note)
    header = struct.pack(
        "<4sBBBBB7xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 41 if abi >= 8 else 33, abi, 2, 190, 1),
        *(0, 0, sections_at, flags, 64, 0, 0, 64, 3, 1),
    )
    sections = [(0, 0, 0), (1, names_at, len(names)), (11, note_at, len(note))]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, offset, size, 0, 0, 1, 0) for name, offset, size in sections
    )
    return header + names + note + table
