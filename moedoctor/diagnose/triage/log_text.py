"""A log, traceback or pasted report as a stream: bytes in, the passages worth a closer look out.

Time and memory are bounded whatever comes in: blocks of half a megabyte, lines cut into pieces, a table of
line shapes with a fixed number of entries, and a budget for what is looked at closely. Nothing here raises
for the content of the stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import BinaryIO

from moedoctor.diagnose.triage.line_text import LINES, Quotations, is_quoted, split_prefix

BLOCK = 1 << 19
"""Bytes read at a time."""
PIECE = 4_000
"""A longer line is looked at in pieces of so many bytes."""
_OVERLAP = 300
_LONGEST = 1 << 20
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

FIRST = 1_000
"""Patterns tried on account of an anchor before the log must be long enough for more."""
FIRST_RARE = 2_000
"""The same for a rare anchor, which names a failure."""
_BYTES_EACH = 80_000
_BYTES_EACH_RARE = 40_000
_AWAKE = 0.25
_HITS_EACH = 32

THOROUGH = 1 << 18
"""So many bytes of lines of new shapes are looked at line by line, as the whole of a pasted report is,"""
PATTERNS = 5_000
"""or so many patterns are tried on them, whichever comes first."""
AROUND = 12
"""Lines of new shapes before and after an anchor that are looked at."""
_FAR = 8 * AROUND
_SHAPES = 200_000
_REPEATS = 4
_TERMINAL = 60
_NEIGHBOR = 200
_LONG = 500
_BASE = 3
_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_HEX = b"0123456789abcdefABCDEF"


@dataclass(frozen=True)
class Passage:
    """A line together with its neighbors, so that what was wrapped can be read as one sentence."""

    line: int
    """The number of the middle line, from 1."""
    shown: str
    """The middle line without prefixes and markup."""
    text: str
    """Three lines, lower case, one space between them."""
    start: int
    """The place where the middle line starts in `text`."""
    end: int
    """The place where the middle line ends in `text`."""
    glued: str | None = None
    """Three lines, lower case, nothing between them, if a terminal seems to have broken a word."""
    joints: tuple[int, int] = (0, 0)
    """The places in `glued` where a line ends and the next one starts."""
    of_vllm: bool = False
    """True if a logger of vLLM wrote the middle line, as its prefix shows."""
    warned: bool = False
    """True if a logger wrote the middle line below the level of an error: it did not stop the server."""
    of_another: bool = False
    """True if the middle line is quoted from another text."""


@dataclass
class Passages:
    """Iterates over the passages of `stream` that are worth a look, at most four of each line shape.

    The shape of a line is the line without digits and hexadecimal letters: a server log repeats few shapes.
    All of the first lines with new shapes are looked at. Later lines are looked at if an anchor, a word that
    suggests a failure, is near, and only as many as the anchor's account allows.
    """

    stream: BinaryIO
    anchors: Sequence[bytes]
    rare_anchors: Sequence[bytes]
    watch: Callable[[Sequence[bytes], Sequence[int]], None] = lambda lines, numbers: None
    """Takes every line with its number, whatever is looked at closely."""
    _shapes: dict[int, int] = field(default_factory=dict)
    _fresh_bytes: int = 0
    _patterns: int = 0
    _charged: Account | None = None

    def __post_init__(self) -> None:
        self._lines = Lines(self.stream)
        self._quotations = Quotations(alone=True)
        common = (anchor for anchor in self.anchors if anchor not in self.rare_anchors)
        self._accounts = (
            *(Account(anchor, FIRST_RARE, _BYTES_EACH_RARE) for anchor in self.rare_anchors),
            *(Account(anchor, FIRST, _BYTES_EACH) for anchor in common),
        )

    @property
    def bytes_read(self) -> int:
        """Bytes of the stream so far."""
        return self._lines.bytes_read

    def charge(self, patterns: int) -> None:
        """Charge the patterns that were tried on the last passage."""
        if self._charged is not None:
            self._charged.spend(patterns)
        self._patterns += patterns

    def __iter__(self) -> Iterator[Passage]:
        """Yield the passages in the order of their lines."""
        window, numbers, pieces = [b""], [0], set[int]()
        for lines, line_numbers, line_pieces in self._lines:
            self.watch(lines, line_numbers)
            shift = len(window)
            window += lines
            numbers += line_numbers
            pieces |= {shift + piece for piece in line_pieces}
            yield from self._yield_passages(window, numbers, pieces)
            done = len(window) - 2
            self._quotations.leave(window, done)
            window, numbers = window[done:], numbers[done:]
            pieces = {piece - done for piece in pieces if piece >= done}
        yield from self._yield_passages([*window, b""], [*numbers, 0], pieces)

    def _yield_passages(self, window: list[bytes], numbers: list[int], pieces: set[int]) -> Iterator[Passage]:
        cleaned: dict[int, str] = {}
        prefixes: dict[int, str] = {}
        for index, account in self._choose_lines(window, pieces):
            self._charged = account
            alone = index in pieces
            for near in (index,) if alone else (index - 1, index, index + 1):
                if near not in cleaned:
                    prefixes[near], cleaned[near] = split_prefix(window[near])
            if alone:
                passage = _make_passage("", cleaned[index], "", numbers[index], False)
            else:
                quoted = is_quoted(window[index])  # a quotation and the words below it are no sentence
                before, after = (
                    "" if near in pieces or is_quoted(window[near]) != quoted else cleaned[near]
                    for near in (index - 1, index + 1)
                )
                longest = max(map(len, window[index - 1 : index + 1]))
                wrapped = longest >= _TERMINAL and (account is not None or self._fresh_bytes <= THOROUGH)
                passage = _make_passage(before, cleaned[index], after, numbers[index], wrapped)
            if account is not None:
                account.spend(_BASE * (1 + len(passage.text) // _LONG))
            prefix = prefixes[index]
            yield replace(
                passage,
                of_vllm=LINES["of_vllm"].search(prefix) is not None,
                warned=LINES["below_error"].search(prefix) is not None,
                of_another=self._quotations.is_of_another(window, index),
            )

    def _choose_lines(self, window: list[bytes], pieces: set[int]) -> Iterator[tuple[int, Account | None]]:
        """Yield (position of a line to look at, account to charge), in order."""
        index, last = 1, len(window) - 1
        fresh: dict[int, bool] = {}
        while index < last and self._fresh_bytes < THOROUGH and self._patterns < PATTERNS:
            fresh[index] = self._is_fresh(window[index])
            if fresh[index]:
                self._fresh_bytes += len(window[index])
                lowered = window[index].lower()
                if index not in pieces or any(account.anchor in lowered for account in self._accounts):
                    yield index, None
            index += 1
        if index < last:
            yield from self._choose_later(window, fresh, index)

    def _choose_later(
        self, window: list[bytes], fresh: dict[int, bool], first: int
    ) -> Iterator[tuple[int, Account | None]]:
        """Yield the lines from `first` on that are near an anchor with a filled account, in order."""
        searched = [account for account in self._accounts if account.is_awake(self.bytes_read)]
        if not searched:
            return
        text = b"\n".join(window).lower()
        hits: dict[int, list[Account]] = {}
        for account in searched:
            positions = find_lines(text, account.anchor)
            account.spend(len(positions) / _HITS_EACH)
            for hit in positions:
                hits.setdefault(hit, []).append(account)
        done = first - 1
        for hit in sorted(hits):
            if not 0 < hit < len(window) - 1:
                continue
            paying = next((account for account in hits[hit] if account.is_awake(self.bytes_read)), None)
            if paying is None or not self._has_new_shape(window, fresh, hit):
                continue
            for index in self._list_around(window, fresh, hit, done):
                done = index
                yield index, paying

    def _list_around(self, window: list[bytes], fresh: dict[int, bool], hit: int, done: int) -> list[int]:
        """Return `hit` and the nearest lines of new shapes around it that come after `done`, in order."""
        before = range(hit - 1, max(done, hit - _FAR), -1)
        after = range(hit + 1, min(len(window) - 1, hit + _FAR))
        new = (
            islice((index for index in side if self._has_new_shape(window, fresh, index)), AROUND)
            for side in (before, after)
        )
        return sorted(index for index in chain([hit], *new) if index > done)

    def _has_new_shape(self, window: list[bytes], fresh: dict[int, bool], index: int) -> bool:
        """Return True if the shape of a line is new; each line of a window is counted once."""
        if index not in fresh:
            fresh[index] = self._is_fresh(window[index])
        return fresh[index]

    def _is_fresh(self, line: bytes) -> bool:
        shape = hash(line.translate(_LOWER, _HEX))
        count = self._shapes.get(shape, 0)
        if count >= _REPEATS:
            return False
        if count or len(self._shapes) < _SHAPES:
            self._shapes[shape] = count + 1
        return True


def _make_passage(before: str, shown: str, after: str, number: int, wrapped: bool) -> Passage:
    head, middle, tail = before[-_NEIGHBOR:].lower(), shown.lower(), after[:_NEIGHBOR].lower()
    start = len(head) + 1 if head else 0
    text = f"{head} {middle}" if head else middle
    joined = ((head, middle), (middle, tail))  # a terminal may have broken a word between the two
    breaks = wrapped and any(len(first) >= _TERMINAL // 2 and second for first, second in joined)
    glued = f"{head}{middle}{tail}" if breaks else None
    joints = (len(head), len(head) + len(middle))
    return Passage(number, shown, f"{text} {tail}" if tail else text, start, len(text), glued, joints)


@dataclass
class Account:
    """The number of patterns to try on lines with one word: some at first, more with the bytes read.

    An empty account sleeps until a quarter of the first sum is there again. So a log that says "expert" in
    every line is not searched for it block by block, and other failures in the log are still found.
    """

    anchor: bytes
    first: int
    bytes_each: int
    spent: float = 0.0
    asleep: bool = False

    def is_awake(self, bytes_read: int) -> bool:
        """Return True if to search for the word after so many bytes."""
        left = self.first + bytes_read / self.bytes_each - self.spent
        if left <= 0:
            self.asleep = True
        elif left >= _AWAKE * self.first:
            self.asleep = False
        return not self.asleep

    def spend(self, patterns: float) -> None:
        """Charge so many patterns tried."""
        self.spent += patterns


def find_lines(text: bytes, word: bytes) -> list[int]:
    """Return the positions of the lines of `text`, from 0, that hold a word, in order."""
    positions = list[int]()
    position, start, at = 0, 0, text.find(word)
    while at >= 0:
        position += text.count(b"\n", start, at)
        positions.append(position)
        start = text.find(b"\n", at)
        at = text.find(word, start) if start >= 0 else -1
    return positions


@dataclass
class Lines:
    """Iterates over the lines of `stream` in blocks: UTF-8 lines, their numbers, and which lines are pieces.

    A line of more than `PIECE` bytes comes as overlapping pieces with the same number. Parts of a line of
    more than a megabyte have the same number too, but do not overlap where a megabyte ends.
    """

    stream: BinaryIO
    bytes_read: int = 0

    def __iter__(self) -> Iterator[tuple[list[bytes], list[int], set[int]]]:
        """Yield (lines, their numbers from 1, positions of the pieces among them)."""
        number, rest = 1, b""
        for block in self._read_blocks():
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            cut = len(rest) > _LONGEST
            if cut:
                lines.append(rest)
                rest = b""
            if lines:
                yield _cut(lines, number)
                number += len(lines) - cut  # what follows a cut is still the same line
        if rest:
            yield _cut([rest], number)

    def _read_blocks(self) -> Iterator[bytes]:
        """Yield the stream as UTF-8, or unchanged if it is another superset of ASCII."""
        decoder: codecs.IncrementalDecoder | None = None
        while block := self.stream.read(BLOCK):
            if not self.bytes_read and (encoding := find_encoding(block)):
                decoder = codecs.getincrementaldecoder(encoding)("replace")
            self.bytes_read += len(block)
            yield block if decoder is None else decoder.decode(block).encode("utf-8", "replace")


def _cut(lines: list[bytes], first: int) -> tuple[list[bytes], list[int], set[int]]:
    """Cut long lines into pieces. `first` is the number of the first line."""
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


def find_encoding(start: bytes) -> str | None:
    """Return the encoding to translate from: by byte order mark, or by the zeros of UTF-16 without one."""
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
