"""A log, traceback or pasted report as a stream: bytes in, the passages worth a closer look out.

Time and memory are bounded whatever comes in: blocks of half a megabyte, lines cut into pieces, a table of
line shapes with a fixed number of entries, and accounts of what is looked at closely. Nothing here raises for
the content of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from moedoctor.diagnose.triage.line_text import clean
from moedoctor.diagnose.triage.log_lines import Lines
from moedoctor.diagnose.triage.looks import Account, accounts, lines_holding

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
_NEIGHBOUR = 200
_LONG = 500
_BASE = 3
_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_HEX = b"0123456789abcdefABCDEF"


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
    near, and as many as the anchor's account allows.
    """

    stream: BinaryIO
    anchors: Sequence[bytes]
    rare_anchors: Sequence[bytes]
    _shapes: dict[int, int] = field(default_factory=dict)
    _fresh_bytes: int = 0
    _patterns: int = 0
    _charged: Account | None = None

    def __post_init__(self) -> None:
        self._lines = Lines(self.stream)
        self._accounts = accounts(self.anchors, self.rare_anchors)
        self._all_anchors = tuple(one.anchor for one in self._accounts)

    @property
    def bytes_read(self) -> int:
        """Bytes of the stream so far."""
        return self._lines.bytes_read

    def charge(self, patterns: int) -> None:
        """Say how many patterns were tried on the passage given last."""
        if self._charged is not None:
            self._charged.spend(patterns)
        self._patterns += patterns

    def __iter__(self) -> Iterator[Passage]:
        """One passage after the other, in the order of their lines."""
        window, numbers, pieces = [b""], [0], set[int]()
        for lines, its_numbers, its_pieces in self._lines:
            shift = len(window)
            window += lines
            numbers += its_numbers
            pieces |= {shift + one for one in its_pieces}
            yield from self._passages(window, numbers, pieces)
            done = len(window) - 2
            window, numbers = window[done:], numbers[done:]
            pieces = {one - done for one in pieces if one >= done}
        yield from self._passages([*window, b""], [*numbers, 0], pieces)

    def _passages(self, window: list[bytes], numbers: list[int], pieces: set[int]) -> Iterator[Passage]:
        cleaned: dict[int, str] = {}
        for index, account in self._candidates(window, pieces):
            self._charged = account
            alone = index in pieces
            for near in (index,) if alone else (index - 1, index, index + 1):
                if near not in cleaned:
                    cleaned[near] = clean(window[near])
            if alone:
                passage = _passage("", cleaned[index], "", numbers[index], False)
            else:
                before, after = ("" if one in pieces else cleaned[one] for one in (index - 1, index + 1))
                longest = max(map(len, window[index - 1 : index + 1]))
                wrapped = self._fresh_bytes <= THOROUGH and longest >= _TERMINAL
                passage = _passage(before, cleaned[index], after, numbers[index], wrapped)
            if account is not None:
                account.spend(_BASE * (1 + len(passage.text) // _LONG))
            yield passage

    def _candidates(self, window: list[bytes], pieces: set[int]) -> Iterator[tuple[int, Account | None]]:
        """(position of a line that is to be looked at, on whose account), in order."""
        index, last = 1, len(window) - 1
        fresh: dict[int, bool] = {}
        while index < last and self._fresh_bytes < THOROUGH and self._patterns < PATTERNS:
            if self._is_fresh(window[index]):
                self._fresh_bytes += len(window[index])
                if index not in pieces or self._holds_anchor(window[index]):
                    yield index, None
                fresh[index] = True
            else:
                fresh[index] = False
            index += 1
        if index < last:
            yield from self._later(window, fresh, index)

    def _later(
        self, window: list[bytes], fresh: dict[int, bool], first: int
    ) -> Iterator[tuple[int, Account | None]]:
        """The lines from `first` on that are near an anchor whose account is not empty, in order."""
        looked_for = [one for one in self._accounts if one.awake(self.bytes_read)]
        if not looked_for:
            return
        text = b"\n".join(window).lower()
        found: dict[int, list[Account]] = {}
        for account in looked_for:
            for hit in lines_holding(text, account):
                found.setdefault(hit, []).append(account)
        done = first - 1
        for hit in sorted(found):
            if not 0 < hit < len(window) - 1:
                continue
            paying = next((one for one in found[hit] if one.awake(self.bytes_read)), None)
            if paying is None or not self._fresh(window, fresh, hit):
                continue
            for index in self._around(window, fresh, hit, done):
                done = index
                yield index, paying

    def _around(self, window: list[bytes], fresh: dict[int, bool], hit: int, done: int) -> list[int]:
        """`hit` and the nearest lines of new shapes before and after it, in order, those behind `done`."""
        near: list[int] = []
        for index in range(hit - 1, max(done, hit - _FAR), -1):
            if len(near) == AROUND:
                break
            if self._fresh(window, fresh, index):
                near.append(index)
        near.reverse()
        near.append(hit)
        count = 0
        for index in range(hit + 1, min(len(window) - 1, hit + _FAR)):
            if count == AROUND:
                break
            if self._fresh(window, fresh, index):
                count += 1
                near.append(index)
        return [index for index in near if index > done]

    def _fresh(self, window: list[bytes], fresh: dict[int, bool], index: int) -> bool:
        """Whether the shape of a line is new; asked once for each line of a window."""
        if index not in fresh:
            fresh[index] = self._is_fresh(window[index])
        return fresh[index]

    def _is_fresh(self, line: bytes) -> bool:
        shape = hash(line.translate(_LOWER, _HEX))
        seen = self._shapes.get(shape, 0)
        if seen >= _REPEATS:
            return False
        if seen or len(self._shapes) < _SHAPES:
            self._shapes[shape] = seen + 1
        return True

    def _holds_anchor(self, piece: bytes) -> bool:
        lowered = piece.lower()
        return any(anchor in lowered for anchor in self._all_anchors)


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
