"""ELF files of 64 bits as NVIDIA writes them: cubins, core dumps, and the images within a core dump."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

EM_CUDA = 190
MOST_SECTIONS = 2_000_000
"""A dump of 132 SMs that are all busy has 130,000, and 850,000 with all their registers."""
MOST_ROWS = 5_000_000
"""Of all tables that are read: ten seconds."""
MOST_LINES = 8 * 2**20
"""Bytes of all line tables that are read: ten seconds."""
_LONGEST_NAME = 4096
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")


class ElfError(ValueError):
    """The file is no ELF file of 64 bits, or a damaged one."""


class Section(NamedTuple):
    """A section header, without its flags and alignment."""

    name: int
    kind: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    row: int


@dataclass
class Budget:
    """The rows, and the bytes of line tables, that may still be read."""

    left: int = MOST_ROWS
    lines: int = field(default_factory=lambda: MOST_LINES)

    def spend(self, rows: int) -> None:
        """Raise ElfError if the rows are more than what is left."""
        self.left -= rows
        if self.left < 0:
            raise ElfError(f"its tables have more than {MOST_ROWS:,} rows")


@dataclass(frozen=True)
class Elf:
    """An ELF file of 64 bits within `data`, from `begin` on. Raises ElfError for what does not fit."""

    data: mmap.mmap | bytes
    begin: int
    end: int
    budget: Budget

    def unpack(self, form: struct.Struct, offset: int) -> tuple[int, ...]:
        """Return the fields at an offset from the file's begin."""
        return form.unpack(self.slice(offset, form.size))

    @cached_property
    def header(self) -> tuple[int, ...]:
        """The fields of the ELF header after its identification."""
        if bytes(self.data[self.begin : self.begin + 6]) != b"\x7fELF\x02\x01":
            raise ElfError("it is no ELF file of 64 bits, least significant byte first")
        return self.unpack(HEADER, 0)[1:]

    @cached_property
    def sections(self) -> list[Section]:
        """The section headers; as many as their table says, within bounds."""
        table, row, count = self.header[5], self.header[10], self.header[11]
        if not table:
            return []
        if not count:  # more than 65,535: the first header has the number
            count = self.unpack(_SECTION, table)[5]
        if row != _SECTION.size or count > MOST_SECTIONS:
            raise ElfError(
                f"it has {count:,} sections of {row} bytes; expected up to {MOST_SECTIONS:,} of 64"
            )
        self.budget.spend(count)
        found = _SECTION.iter_unpack(self.slice(table, count * row))
        return [Section(s[0], s[1], s[3], s[4], s[5], s[6], s[7], s[9]) for s in found]

    def slice(self, offset: int, size: int) -> bytes:
        place = self.begin + offset
        if min(offset, size) < 0 or place + size > self.end:
            raise ElfError(f"it ends at byte {self.end}, and a part of it should end at byte {place + size}")
        return self.data[place : place + size]

    def list_rows(self, section: Section, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        """Yield the first fields of each row of a table."""
        if section.size and section.row < form.size:
            raise ElfError(f"rows of a table have {section.row} bytes; expected {form.size} or more")
        places = range(0, section.size - form.size + 1, section.row or form.size)
        self.budget.spend(len(places))
        for offset in places:
            yield self.unpack(form, section.offset + offset)

    def get_parent(self, section: Section, kind: int, form: struct.Struct) -> tuple[Section, tuple[int, ...]]:
        """Return the table that a section names as its parent, and the first fields of the row there."""
        if section.link >= len(self.sections) or self.sections[section.link].kind != kind:
            raise ElfError(f"section {section.link} is not the table that another one names as its parent")
        parent = self.sections[section.link]
        if (section.info + 1) * parent.row > parent.size:
            raise ElfError(f"a table has no row {section.info}")
        return parent, self.unpack(form, parent.offset + section.info * parent.row)

    def find_section(self, name: str) -> Section | None:
        """Return the last section of a name, or None."""
        index = self.header[12]
        if index >= len(self.sections):
            return None
        titles, wanted = self.sections[index], name.encode() + b"\0"
        for place, section in {each.name: each for each in self.sections}.items():
            fits = place + len(wanted) <= titles.size
            if fits and self.slice(titles.offset + place, len(wanted)) == wanted:
                return section
        return None

    def read_text(self, table: Section, offset: int) -> str:
        """Return a string of a string table."""
        end = min(table.size - offset, _LONGEST_NAME)
        return self.slice(table.offset + offset, end).partition(b"\0")[0].decode("utf-8", "replace")
