"""From the words of a line to the clues that may be in it, at a few microseconds a line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from moedoctor.diagnose.triage.signatures import Clue, clues

_WORD = r"[a-z0-9]+"
_KEY = 3
_COMPOUND, _LONGEST = 8, 40
_REMEMBERED = 50_000


def clues_in(text: str) -> list[Clue]:
    """The clues of which a needle is in `text`, which is in lower case."""
    table = _table()
    found: set[str] = set()
    for word in set(_words().findall(text)):
        its_needles = table.remembered.get(word)
        if its_needles is None:
            its_needles = table.needles_of(word)
        for needle in its_needles:
            if needle in text:
                found |= table.clues[needle]
    for needle in table.without_word:
        if needle in text:
            found |= table.clues[needle]
    return [table.by_name[name] for name in sorted(found)]


class _Table:
    """Needles by the start of the word that they start with."""

    def __init__(self, all_clues: Mapping[str, Clue]) -> None:
        self.by_name = all_clues
        self.clues: dict[str, set[str]] = {}
        for clue in all_clues.values():
            for needle in clue.needles:
                self.clues.setdefault(needle, set()).add(clue.name)
        self.by_start: dict[str, list[tuple[str, str]]] = {}
        self.without_word: list[str] = []
        for needle in self.clues:
            word = _words().match(needle.strip())
            if word is None:
                self.without_word.append(needle)
            else:
                self.by_start.setdefault(word[0][:_KEY], []).append((word[0], needle))
        self.keys = frozenset(self.by_start)
        self.sizes = sorted(set(map(len, self.keys)))
        self.remembered: dict[str, tuple[str, ...]] = {}

    def needles_of(self, word: str) -> tuple[str, ...]:
        """The needles that start in `word`, in a long one also behind its start: ``runtimeerror``."""
        long = _COMPOUND <= len(word) <= _LONGEST
        places = range(len(word)) if long else range(1)
        keys = self.keys.intersection({word[at : at + size] for size in self.sizes for at in places})
        needles = tuple(
            needle
            for key in keys
            for first, needle in self.by_start[key]
            if (first in word if long else word.startswith(first))
        )
        if len(self.remembered) < _REMEMBERED:
            self.remembered[word] = needles
        return needles


@cache
def _table() -> _Table:
    return _Table(clues())


@cache
def _words() -> re.Pattern[str]:
    return re.compile(_WORD)
