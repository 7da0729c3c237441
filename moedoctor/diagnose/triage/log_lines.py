"""The lines of a stream: any encoding in, UTF-8 lines out, in blocks and with a bound on their length."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 1 << 19
"""Bytes read at a time."""
PIECE = 4_000
"""A line that is longer is looked at in pieces of so many bytes."""
_OVERLAP = 300
_LONGEST = 1 << 20
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class Lines:
    """Iterates over the lines of `stream`, several at a time: lines, their numbers, and which are pieces.

    A line of more than `PIECE` bytes comes as overlapping pieces, which all have its number; a line of more
    than a megabyte is one still, though its parts do not overlap where a megabyte ends.
    """

    stream: BinaryIO
    bytes_read: int = 0

    def __iter__(self) -> Iterator[tuple[list[bytes], list[int], set[int]]]:
        """(lines, their numbers from 1, positions of those lines that are pieces), block after block."""
        number, rest = 1, b""
        for block in self._blocks():
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            cut = len(rest) > _LONGEST
            if cut:
                lines.append(rest)
                rest = b""
            if lines:
                yield _in_pieces(lines, number)
                number += len(lines) - cut  # what follows a cut is still the same line
        if rest:
            yield _in_pieces([rest], number)

    def _blocks(self) -> Iterator[bytes]:
        """The stream as UTF-8, or as what it is where that is some other superset of ASCII."""
        decoder: codecs.IncrementalDecoder | None = None
        while block := self.stream.read(BLOCK):
            if not self.bytes_read and (encoding := _encoding(block)):
                decoder = codecs.getincrementaldecoder(encoding)("replace")
            self.bytes_read += len(block)
            yield block if decoder is None else decoder.decode(block).encode("utf-8", "replace")


def _in_pieces(lines: list[bytes], first: int) -> tuple[list[bytes], list[int], set[int]]:
    """`lines`, of which the first has the number `first`, with long ones in pieces."""
    if max(map(len, lines)) <= PIECE:
        return lines, list(range(first, first + len(lines))), set()
    shorter: list[bytes] = []
    numbers: list[int] = []
    pieces: set[int] = set()
    for number, line in enumerate(lines, first):
        if len(line) <= PIECE:
            shorter.append(line)
            numbers.append(number)
            continue
        for start in range(0, len(line), PIECE - _OVERLAP):
            pieces.add(len(shorter))
            shorter.append(line[start : start + PIECE])
            numbers.append(number)
    return shorter, numbers, pieces


def _encoding(start: bytes) -> str | None:
    """The encoding to translate from, by byte order mark or by the zeros of UTF-16 without one."""
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return None if encoding == "utf-8" else encoding
    sample = start[:4096]
    if len(sample) >= 16:
        for offset, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
            zeros, others = sample[offset::2].count(0), sample[1 - offset :: 2].count(0)
            if zeros > 0.8 * len(sample[offset::2]) and others < 0.2 * len(sample[1 - offset :: 2]):
                return encoding
    return None
