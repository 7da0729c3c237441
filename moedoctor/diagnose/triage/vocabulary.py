"""All clues and signatures, and the clues that may be in a line, found by its words in a few microseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from moedoctor.diagnose.triage.families import cache as cache_family
from moedoctor.diagnose.triage.families import general, offload, quantization, routing, selection
from moedoctor.diagnose.triage.signature import Clue, Signature

_WORD = r"[a-z0-9]+"
_KEY = 3
"""Needles are looked up by so many first letters of their first word."""
_COMPOUND, _LONGEST = 8, 40
"""A word of so many letters may hold a needle behind its start: ``runtimeerror``."""
_REMEMBERED = 50_000


@cache
def clues() -> Mapping[str, Clue]:
    """Return all clues by name."""
    by_name: dict[str, Clue] = {}
    for family in (general, routing, offload, cache_family, quantization, selection):
        for clue in family.CLUES:
            if clue.name in by_name:
                raise ValueError(f"the clue {clue.name} is defined twice")
            by_name[clue.name] = clue
    return by_name


@cache
def signatures() -> tuple[Signature, ...]:
    """Return all signatures, in the order of the ids."""
    families = (routing, offload, cache_family, quantization, selection)
    return tuple(
        sorted((item for family in families for item in family.SIGNATURES), key=lambda item: item.id)
    )


def clues_in(text: str) -> list[Clue]:
    """Return the clues that have a needle in `text`, which is in lower case."""
    table = _table()
    names: set[str] = set()
    for word in set(_words().findall(text)):
        needles = table.remembered.get(word)
        if needles is None:
            needles = table.needles_of(word)
        for needle in needles:
            if needle in text:
                names |= table.clues[needle]
    for needle in table.without_word:
        if needle in text:
            names |= table.clues[needle]
    return [table.by_name[name] for name in sorted(names)]


class _Table:
    """Needles by the start of their first word."""

    def __init__(self, all_clues: Mapping[str, Clue]) -> None:
        self.by_name = all_clues
        self.clues: dict[str, set[str]] = {}
        for clue in all_clues.values():
            for needle in clue.needles.split("|"):
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
        """Return the needles that start in `word`: at its start, in a long word anywhere."""
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
