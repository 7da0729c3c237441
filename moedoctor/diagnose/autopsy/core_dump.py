"""NVIDIA's core dump of a GPU, read without NVIDIA's tools.

A dump is an ELF file of machine 190 whose sections are tables; the rows are the structures of the CUDA
toolkit's `cudacoredump.h`. A table's section names its parent: `sh_link` is the parent's section, `sh_info`
its row. A row may be longer than the fields read here, since newer drivers append to it. The images are the
kernels' own ELF files after loading, so their symbols and line tables have addresses of the GPU.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from moedoctor.diagnose.autopsy.line_table import find_line
from moedoctor.diagnose.cuda.elf import EM_CUDA, HEADER, Budget, Elf, ElfError, Section
from moedoctor.text import load_yaml, open_file

_MOST_FAULTS = 100
_ET_CORE = 4
_REGISTERS, _IMAGE, _DEVICES, _SMS, _GRIDS, _BLOCKS, _WARPS, _LANES, _MODULES, _PARAMETERS, _META = (
    0x80000000 + kind for kind in (5, 7, 9, 11, 12, 13, 14, 15, 16, 18, 22)
)
EXCEPTIONS: Mapping[int, str] = load_yaml("moedoctor.diagnose.autopsy", "exceptions.yaml")
"""CUDBGException_t of `cudadebugger.h`, CUDA 13.1, in words."""
_LOADS = {0x980: 12, 0x981: 12}
_STORES = {0x985: 12, 0x986: 12, 0x98E: 12, 0x9A6: 12, 0xFAE: 11}
"""Instructions on global memory of GPUs of 8.x to 12.x, as nvdisasm shows them, and four bits that say that
the address is two registers and an offset. 0xFAE is LDGSTS, which writes to no register."""
_STEP = 16
"""Bytes of an instruction."""
_MOST_STEPS, _MOST_PARAMETERS = 64, 512


class DumpError(ElfError):
    """The file or folder is no core dump of a GPU."""


_GRID = struct.Struct("<7Q10I")
_BLOCK = struct.Struct("<Q3I")
_WARP = struct.Struct("<Q5I")
_LANE = struct.Struct("<2Q5I")
_DEVICE = struct.Struct("<3Q10I")
_META_ROW = struct.Struct("<Q4I")
_SYMBOL = struct.Struct("<IBBHQQ")
_HANDLE = struct.Struct("<Q")
_WORDS = struct.Struct("<2Q")
_SM = struct.Struct("<4IQ")
Size = tuple[int, int, int]
_Key = tuple[int, int, int]
"""Grid, exception and address of the instruction."""


class _Lane(NamedTuple):
    """The first thread of a warp that faulted."""

    block: Size
    thread: Size
    table: int
    """The section of its warp's lanes."""
    row: int
    next: int
    """The address of its next instruction."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that was on the GPU when the dump was written."""

    symbol: str
    """The name in its image; empty if the dump has no symbol for it."""
    grid: Size
    block: Size


@dataclass(frozen=True)
class Fault:
    """An exception of one instruction of one kernel."""

    kernel: Kernel
    code: int
    """CUDBGException_t."""
    function: str | None
    """The device function of the kernel that holds the instruction, if that is another symbol."""
    source: str | None
    """FILE:LINE, if the image has a line table."""
    block: Size | None
    thread: Size | None
    """The first thread that faulted; None if only its SM has the exception."""
    warps: int | None
    blocks: int | None
    """The number that faulted in this way."""
    address: int | None
    """The address that the first thread's instruction used; None if no register has it any more."""
    parameters: tuple[int, ...]
    """The kernel's parameters, eight bytes each: some are addresses."""


@dataclass(frozen=True)
class CoreDump:
    gpu: str
    capability: str
    driver: str | None
    cuda: str | None
    kernels: tuple[Kernel, ...]
    faults: tuple[Fault, ...]


def is_core_dump(file: Path) -> bool:
    """Return True if the file begins as CUDA's core dumps do."""
    return is_elf(file) and _read_head(file)[16:] == struct.pack("<2H", _ET_CORE, EM_CUDA)


def is_elf(file: Path) -> bool:
    """Return True for any ELF file, such as a core file of the system: it is no log."""
    return _read_head(file)[:4] == b"\x7fELF"


def _read_head(file: Path) -> bytes:
    with open_file(file, expected="a core dump of CUDA, or a log") as stream:
        return stream.read(20)


def read_core_dump(file: Path) -> CoreDump:
    """Read a dump. Raises ElfError for a file that is none, and TextFileError."""
    with open_file(file, expected="a core dump of CUDA") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < HEADER.size:
            raise DumpError("it is too short for a core dump")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(Elf(data, 0, size, Budget())).read()


@dataclass
class _Reader:
    elf: Elf
    images: dict[int, Elf] = field(default_factory=dict)
    """Handle of a module -> its image."""

    @cached_property
    def registers(self) -> dict[tuple[int, int], Section]:
        """The registers of each thread, by the section of its warp's lanes and its row there."""
        return {(part.link, part.info): part for part in self.elf.sections if part.kind == _REGISTERS}

    def read(self) -> CoreDump:
        if self.elf.header[:2] != (_ET_CORE, EM_CUDA):
            raise DumpError("it is an ELF file, and not a core dump that CUDA wrote")
        kinds: dict[int, list[Section]] = {}
        for section in self.elf.sections:
            kinds.setdefault(section.kind, []).append(section)
        for section in kinds.get(_IMAGE, ()):
            _, (handle,) = self.elf.get_parent(section, _MODULES, _HANDLE)
            begin = self.elf.begin + section.offset
            end = min(begin + section.size, self.elf.end)
            self.images[handle] = Elf(self.elf.data, begin, end, self.elf.budget)
        grids = {row[0]: row for part in kinds.get(_GRIDS, ()) for row in self.elf.list_rows(part, _GRID)}
        kernels = {number: self._describe(row) for number, row in grids.items()}
        found = self._find_in_lanes() or self._find_in_sms(kinds.get(_SMS, ()), grids)
        given = self._read_parameters(kinds.get(_PARAMETERS, ()))
        faults = tuple(self._explain(key, lanes, grids, kernels, given) for key, lanes in found.items())
        gpu, capability = self._read_device(kinds)
        driver, cuda = self._read_versions(kinds)
        return CoreDump(gpu, capability, driver, cuda, tuple(kernels.values()), faults)

    def _describe(self, row: tuple[int, ...]) -> Kernel:
        name, _ = self._find_symbol(row[4], row[3])
        return Kernel(name, _make_size(row[11:14]), _make_size(row[14:17]))

    def _find_in_lanes(self) -> dict[_Key, list[_Lane]]:
        """Return the first thread of each warp that faulted, by grid, exception and instruction."""
        found: dict[_Key, list[_Lane]] = {}
        for table, section in enumerate(self.elf.sections):
            if section.kind != _LANES:
                continue
            rows = [row for row in enumerate(self.elf.list_rows(section, _LANE)) if row[1][6]]
            if not rows:
                continue
            warps, warp = self.elf.get_parent(section, _WARPS, _WARP)
            _, block = self.elf.get_parent(warps, _BLOCKS, _BLOCK)
            row, lane = rows[0]
            place = warp[0] if warp[5] else lane[0]  # the instruction at fault, if the GPU knows it
            key = block[0], lane[6], place
            if key in found or len(found) < _MOST_FAULTS:
                thread = _Lane(_make_size(block[1:4]), _make_size(lane[3:6]), table, row, lane[0])
                found.setdefault(key, []).append(thread)
        return found

    def _find_in_sms(
        self, sms: Sequence[Section], grids: Mapping[int, tuple[int, ...]]
    ) -> dict[_Key, list[_Lane]]:
        """Return the exceptions that only the SMs have, since the warps had ended; blocks are not known."""
        rows = [row for section in sms if section.row >= _SM.size for row in self.elf.list_rows(section, _SM)]
        keys = [(next(iter(grids)), row[2], row[4]) for row in rows if row[2] and row[3] and len(grids) == 1]
        return {key: [] for key in keys[:_MOST_FAULTS]}

    def _explain(
        self,
        key: _Key,
        lanes: Sequence[_Lane],
        grids: Mapping[int, tuple[int, ...]],
        kernels: Mapping[int, Kernel],
        parameters: Mapping[int, tuple[int, ...]],
    ) -> Fault:
        grid, code, place = key
        if grid not in grids:
            raise DumpError(f"a block is of grid {grid}, which no table has")
        name, source = self._find_symbol(grids[grid][4], place)
        first = lanes[0] if lanes else None
        return Fault(
            kernel=kernels[grid],
            code=code,
            function=name if name and name != kernels[grid].symbol else None,
            source=source,
            block=first.block if first else None,
            thread=first.thread if first else None,
            warps=len(lanes) or None,
            blocks=len({lane.block for lane in lanes}) or None,
            address=self._find_address(self.images.get(grids[grid][4]), place, first) if first else None,
            parameters=parameters.get(grid, ()),
        )

    def _read_parameters(self, sections: Sequence[Section]) -> dict[int, tuple[int, ...]]:
        """Return the parameters of each grid that has some."""
        found = {}
        for section in sections:
            _, grid = self.elf.get_parent(section, _GRIDS, _GRID)
            count = min(section.size // 8, _MOST_PARAMETERS)
            found[grid[0]] = struct.unpack(f"<{count}Q", self.elf.slice(section.offset, 8 * count))
        return found

    def _find_address(self, image: Elf | None, place: int, lane: _Lane) -> int | None:
        """Return the address that a thread's instruction at `place` used, from the thread's registers.

        None if it is no known instruction, and if it or a later one may have written to these registers: the
        result of a load often goes where its address was.
        """
        code = image and next(
            (s for s in image.sections if s.kind == 1 and 0 <= place - s.address < s.size), None
        )
        steps = range(place, max(lane.next, place + _STEP), _STEP)
        if not image or not code or len(steps) > _MOST_STEPS:
            return None
        words = [image.unpack(_WORDS, code.offset + step - code.address) for step in steps]
        low, high = words[0]
        kind, base = low & 0xFFF, low >> 24 & 255
        if {**_LOADS, **_STORES}.get(kind) != high >> 24 & 15:
            return None
        for word, _ in words:
            # A result has up to four registers.
            if word & 0xFFF not in _STORES and base - 3 <= word >> 16 & 255 <= base + 1:
                return None
        registers = self.registers.get((lane.table, lane.row))
        if registers is None or 4 * base + 8 > registers.size:
            return None
        (address,) = self.elf.unpack(_HANDLE, registers.offset + 4 * base)
        offset, bits = (low >> 32 & 0xFFF, 12) if kind == 0xFAE else (low >> 40, 24)
        return address + offset - (offset >> (bits - 1) << bits)

    def _find_symbol(self, handle: int, place: int) -> tuple[str, str | None]:
        """Return the innermost function at an address of the GPU, and its line; ("", None) for none."""
        image = self.images.get(handle)
        if image is None:
            return "", None
        best: tuple[int, str] | None = None
        for section in image.sections:
            if section.kind != 2 or section.link >= len(image.sections):  # SHT_SYMTAB
                continue
            texts = image.sections[section.link]
            for name, info, _, _, value, size in image.list_rows(section, _SYMBOL):
                inside = value and info & 15 == 2 and value <= place < value + size  # STT_FUNC
                if inside and (best is None or size < best[0]):
                    best = size, image.read_text(texts, name)
        if best is None:
            return "", None
        lines = image.find_section(".debug_line")
        if lines is None or lines.size > image.budget.lines:
            return best[1], None
        image.budget.lines -= lines.size
        return best[1], find_line(image.slice(lines.offset, lines.size), place)

    def _read_device(self, kinds: Mapping[int, list[Section]]) -> tuple[str, str]:
        for section in kinds.get(_DEVICES, ()):
            for row in self.elf.list_rows(section, _DEVICE):
                return self._read_name(row[0]), f"{row[11]}.{row[12]}"
        raise DumpError("it names no GPU")

    def _read_versions(self, kinds: Mapping[int, list[Section]]) -> tuple[str | None, str | None]:
        """Return the versions of driver and CUDA, which dumps have since driver 565."""
        for section in kinds.get(_META, ()):
            row = self.elf.unpack(_META_ROW, section.offset)
            return f"{row[1]}.{row[2]}", f"{row[3]}.{row[4]}"
        return None, None

    def _read_name(self, offset: int) -> str:
        """Return a text of the string table that does not name sections."""
        index = self.elf.header[12]
        if index == 0xFFFF and self.elf.sections:
            index = self.elf.sections[0].link
        for number, section in enumerate(self.elf.sections):
            if section.kind == 3 and number != index:
                return self.elf.read_text(section, offset)
        return "unknown GPU"


def _make_size(values: tuple[int, ...]) -> Size:
    x, y, z = values
    return x, y, z
