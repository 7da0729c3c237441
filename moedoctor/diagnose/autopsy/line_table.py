"""The line of the source at an address of the GPU, from an image's `.debug_line` (DWARF 2 to 4).

Triton writes such tables for every kernel, and `nvcc -lineinfo` for others.
"""

from __future__ import annotations

import struct

_MOST_STEPS = 200_000


def find_line(data: bytes, place: int) -> str | None:
    """Return FILE:LINE of an address; None if no table has it, or a table is not understood."""
    begin = 0
    while begin + 10 < len(data):
        (size,) = struct.unpack_from("<I", data, begin)
        end = begin + 4 + size
        if size < 10 or end > len(data):
            return None
        try:
            found = _Program(data[begin + 4 : end]).find(place)
        except (IndexError, ValueError, struct.error):
            return None
        if found:
            return found
        begin = end
    return None


class _Program:
    """The program of one unit, which makes rows of (address, file, line)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        version = self._read("<H")
        length = self._read("<I")
        body = self.at + length
        self.step = self._read("<B")
        if version >= 4:
            self._read("<B")  # operations in an instruction
        self._read("<B")  # is a statement
        self.base, self.range, self.first = self._read("<b"), self._read("<B"), self._read("<B")
        self.lengths = [0, *(self._read("<B") for _ in range(self.first - 1))]
        self.folders = list(iter(self._read_text, ""))
        self.files: list[tuple[str, int]] = []
        while name := self._read_text():
            self.files.append((name, self._read_number()))
            self._read_number(), self._read_number()
        self.at = body
        self.known = 2 <= version <= 4 and self.range > 0

    def find(self, place: int) -> str | None:
        """Return FILE:LINE of an address."""
        before: tuple[int, int, int] | None = None
        address, file, line = 0, 1, 1
        for _ in range(_MOST_STEPS if self.known else 0):
            if self.at >= len(self.data):
                return None
            code, row, ends = self._read("<B"), False, False
            if code >= self.first:
                step = code - self.first
                address += step // self.range * self.step
                line += self.base + step % self.range
                row = True
            elif code == 0:
                size = self._read_number()
                end = self.at + size
                kind = self._read("<B")
                if kind == 1:
                    row = ends = True
                elif kind == 2 and size == 9:
                    address = self._read("<Q")
                self.at = end
            elif code == 1:
                row = True
            elif code == 2:
                address += self._read_number() * self.step
            elif code == 3:
                line += self._read_number(signed=True)
            elif code == 4:
                file = self._read_number()
            elif code == 8:
                address += (255 - self.first) // self.range * self.step
            elif code == 9:
                address += self._read("<H")
            else:
                for _ in range(self.lengths[code]):
                    self._read_number()
            if row:
                if before and before[0] <= place < address:
                    return self._name(before[1], before[2])
                before = None if ends else (address, file, line)
            if ends:
                address, file, line = 0, 1, 1
        return None

    def _name(self, file: int, line: int) -> str | None:
        if not 1 <= file <= len(self.files):
            return None
        name, index = self.files[file - 1]
        folder = f"{self.folders[index - 1]}/" if 1 <= index <= len(self.folders) else ""
        return f"{folder}{name}:{line}"

    def _read(self, form: str) -> int:
        value: int
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _read_text(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end + 1
        return text

    def _read_number(self, *, signed: bool = False) -> int:
        """Return a number of LEB128."""
        value = shift = 0
        while shift < 64:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value
        raise ValueError("a number has more than 64 bits")
