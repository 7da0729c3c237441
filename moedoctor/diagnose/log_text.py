"""A log, traceback or pasted report as a stream: bytes in, the passages worth a closer look out.

Memory is bounded whatever comes in: blocks of half a megabyte, lines cut into pieces, and a table of
line shapes with a fixed number of entries. Nothing here raises for the content of the stream.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO

from moedoctor.diagnose.line_text import clean

BLOCK = 1 << 19
"""Bytes read at a time."""
THOROUGH = 1 << 18
"""So many bytes of lines of new shapes are looked at line by line, as the whole of a pasted report is."""
PASSAGES = 20_000
"""After so many passages only what is around a rare anchor is looked at, after twice as many its line."""
AROUND = 12
"""Lines before and after an anchor that are looked at."""
_LONGEST = 1 << 20
"""A line is cut after so many bytes."""
_PIECE = 4_000
_OVERLAP = 300
_SHAPES = 200_000
_REPEATS = 4
_TERMINAL = 60
_NEIGHBOUR = 200
_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_HEX = b"0123456789abcdefABCDEF"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Passage:
    """A line together with its neighbours, so that what was wrapped can be read as one sentence."""

    line: int
    """Of the middle line, from 1."""
    shown: str
    """The middle line without prefixes and markup."""
    text: str
    """Three lines, lower case, one space between them."""
    start: int
    """Where the middle line starts in `text`."""
    end: int
    glued: str | None = None
    """Three lines, lower case, nothing between them, where a terminal seems to have broken a word."""
    joints: tuple[int, int] = (0, 0)
    """Where in `glued` one line ends and the next one starts."""


@dataclass
class Passages:
    """Iterates over the passages of `stream` that are worth a look; a line shape counts four times at most.

    The shape of a line is the line without digits and hexadecimal letters: a server log repeats few shapes.
    Of lines of new shapes, the first ones are all looked at, later ones where an anchor, a telling word, is
    near; of a text that says ever new things about experts, in the end only what names a failure outright.
    """

    stream: BinaryIO
    anchors: Sequence[bytes]
    rare_anchors: Sequence[bytes]
    bytes_read: int = 0
    _shapes: dict[int, int] = field(default_factory=dict)
    _fresh_bytes: int = 0
    _given: int = 0

    def __iter__(self) -> Iterator[Passage]:
        """One passage after the other, in the order of their lines."""
        window, numbers, next_number = [b""], [0], 1
        for lines, cut in self._lines():
            window += lines
            numbers += range(next_number, next_number + len(lines))
            next_number += len(lines) - cut  # what follows a cut is still the same line
            yield from self._passages(window, numbers)
            window, numbers = window[-2:], numbers[-2:]
        yield from self._passages([*window, b""], [*numbers, 0])

    def _passages(self, window: list[bytes], numbers: list[int]) -> Iterator[Passage]:
        cleaned: dict[int, str] = {}
        for index in self._candidates(window):
            self._given += 1
            if len(window[index]) > _PIECE:
                yield from self._pieces(window[index], numbers[index])
                continue
            for near in (index - 1, index, index + 1):
                if near not in cleaned:
                    cleaned[near] = clean(window[near][:_PIECE])
            wrapped = (
                self._fresh_bytes <= THOROUGH and max(map(len, window[index - 1 : index + 1])) >= _TERMINAL
            )
            yield _passage(cleaned[index - 1], cleaned[index], cleaned[index + 1], numbers[index], wrapped)

    def _pieces(self, line: bytes, number: int) -> Iterator[Passage]:
        for start in range(0, len(line), _PIECE - _OVERLAP):
            piece = line[start : start + _PIECE]
            lowered = piece.lower()
            if any(anchor in lowered for anchor in self.anchors) and self._is_fresh(piece):
                yield _passage("", clean(piece), "", number, False)

    def _candidates(self, window: list[bytes]) -> list[int]:
        """Indices of the lines with neighbours that are to be looked at, in order."""
        fresh = [index for index in range(1, len(window) - 1) if self._is_fresh(window[index])]
        start = 0
        while start < len(fresh) and self._fresh_bytes < THOROUGH:
            self._fresh_bytes += min(len(window[fresh[start]]), _PIECE)
            start += 1
        if start == len(fresh):
            return fresh
        later = fresh[start:]
        anchors = self.anchors if self._given < PASSAGES else self.rare_anchors
        found = _holding([window[index] for index in later], anchors)
        if self._given < 2 * PASSAGES:
            found = {near for one in found for near in range(max(0, one - AROUND), one + AROUND + 1)}
        return fresh[:start] + [later[position] for position in sorted(found) if position < len(later)]

    def _is_fresh(self, line: bytes) -> bool:
        shape = hash(line.translate(_LOWER, _HEX))
        seen = self._shapes.get(shape, 0)
        if seen >= _REPEATS:
            return False
        if seen or len(self._shapes) < _SHAPES:
            self._shapes[shape] = seen + 1
        return True

    def _lines(self) -> Iterator[tuple[list[bytes], bool]]:
        """Lines, several at a time, and whether the last one was cut because it is too long."""
        rest = b""
        for block in self._blocks():
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            cut = len(rest) > _LONGEST
            if cut:
                lines.append(rest)
                rest = b""
            if lines:
                yield lines, cut
        if rest:
            yield [rest], False

    def _blocks(self) -> Iterator[bytes]:
        """The stream as UTF-8, or as what it is where that is some other superset of ASCII."""
        decoder: codecs.IncrementalDecoder | None = None
        while block := self.stream.read(BLOCK):
            if not self.bytes_read and (encoding := _encoding(block)):
                decoder = codecs.getincrementaldecoder(encoding)("replace")
            self.bytes_read += len(block)
            yield block if decoder is None else decoder.decode(block).encode("utf-8", "replace")


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


def _holding(lines: list[bytes], anchors: Sequence[bytes]) -> set[int]:
    """Positions of the lines that hold an anchor."""
    text = b"\n".join(lines).lower()
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    found: set[int] = set()
    for anchor in anchors:
        position, at = 0, text.find(anchor)
        while at >= 0:
            position = bisect_right(starts, at, position) - 1
            found.add(position)
            at = text.find(anchor, starts[position + 1])
    return found


def _passage(before: str, shown: str, after: str, number: int, wrapped: bool) -> Passage:
    head, middle, tail = before[-_NEIGHBOUR:].lower(), shown.lower(), after[:_NEIGHBOUR].lower()
    start = len(head) + 1 if head else 0
    text = f"{head} {middle}" if head else middle
    glued = None
    if wrapped and (_may_break(head, middle) or _may_break(middle, tail)):
        glued = f"{head}{middle}{tail}"
    joints = (len(head), len(head) + len(middle))
    return Passage(number, shown, f"{text} {tail}" if tail else text, start, len(text), glued, joints)


def _may_break(first: str, second: str) -> bool:
    """Whether a terminal may have broken a word between these two lines."""
    return len(first) >= _TERMINAL // 2 and first[-1:].isalnum() and second[:1].isalnum()
