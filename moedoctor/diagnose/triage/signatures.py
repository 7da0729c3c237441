"""The words of known failures in text: clues, and the signatures that combine them.

A clue is a phrase. A signature names the clue that shows a failure and how sure that clue is alone. Other
clues in the text are evidence that raises or lowers this confidence; some signatures also need clues near the
first one. Releases rule a signature in or out. The folder `signatures_data` has a file for each family. The
phrases come from the error messages in the sources of vLLM and FlashInfer and from how people describe a
failure; the comment above a signature names the thread or fact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from moedoctor.text import load_yaml

WITHIN = 12
"""Lines that a clue may be away from the one it supports: a few paragraphs, or the top of a traceback."""


@dataclass(frozen=True)
class Clue:
    name: str
    needles: str
    """Lower-case phrases between ``|``. Every match of the pattern holds at least one, and each starts
    where a word starts: the pattern is tried only on text with a needle."""
    pattern: str
    """A regular expression for text in lower case; bounded repetitions let a search take linear time."""
    event: bool = False
    """True for what happens to a server: a text that says that it may happen does not show it."""
    ratio: int = 0
    """The two numbers of a match must be so many times one another; 0 for a pattern without numbers."""
    says: str = ""
    """The statement of a text with this clue, as the end of a sentence: "weights are on the host"."""


@dataclass(frozen=True)
class Evidence:
    """Clues that make a signature more or less sure."""

    names: tuple[str, ...]
    """Any of these clues."""
    factor: float
    """The factor by which they are more frequent in a text about the failure than in one about another; it
    multiplies the odds of the signature."""


@dataclass(frozen=True)
class Signature:
    """One way in which a text shows a known failure. Names in it are names of clues."""

    id: str
    shows: tuple[str, ...]
    """Any of these clues; its line is reported."""
    confidence: float
    """The share of texts with this signature about the failure, without more evidence: an estimate."""
    evidence: tuple[Evidence, ...] = ()
    """Clues that raise or lower the confidence from anywhere in the text."""
    near: tuple[tuple[str, ...], ...] = ()
    """One clue of each group must be within `within` lines of the line shown."""
    within: int = WITHIN
    needs: tuple[tuple[str, ...], ...] = ()
    """One clue of each group must be somewhere in the text; without it the failure is not even possible."""
    anywhere: tuple[tuple[str, ...], ...] = ()
    """One clue of each group should be somewhere in the text; without it the failure is possible at best."""
    unless: tuple[str, ...] = ()
    """None of these anywhere."""
    unless_near: tuple[str, ...] = ()
    """None of these within `within` lines of the line shown."""
    since: str | None = None
    """The first vLLM release that has the failure; a text about older ones only is about something else."""
    fixed: str | None = None
    """The first vLLM release without the failure."""
    needs_version: bool = False
    """True if the text must name a vLLM release."""
    flashinfer_fixed: str | None = None
    """The first FlashInfer release without the failure."""
    silent: bool = False
    """True if the failure is wrong numbers without a crash: a text about a crash only is hardly about it."""
    next: str = ""
    """The next step if the one of the entry does not follow from this text."""
    releases: str = ""
    """The words on releases if the entry's ranges are not about this text."""


_WORD = r"[a-z0-9]+"
_KEY = 3
"""Needles are looked up by so many first letters of their first word."""
_COMPOUND, _LONGEST = 8, 40
"""A word of so many letters may hold a needle behind its start: ``runtimeerror``."""
_REMEMBERED = 50_000


@cache
def load_clues() -> Mapping[str, Clue]:
    """Return all clues by name. Raises ValueError for a name that is used twice."""
    by_name: dict[str, Clue] = {}
    for family in _load_families():
        for name, row in family["clues"].items():
            if name in by_name:
                raise ValueError(f"the clue {name} is defined twice")
            by_name[name] = _read_clue(name, row, family.get("fragments", {}))
    return by_name


@cache
def load_signatures() -> tuple[Signature, ...]:
    """Return all signatures, in the order of the ids."""
    rows = [row for family in _load_families() for row in family.get("signatures", ())]
    return tuple(sorted(map(_read_signature, rows), key=lambda signature: signature.id))


@cache
def _load_families() -> Sequence[Mapping[str, Any]]:
    folder = files("moedoctor.diagnose.triage") / "signatures_data"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    return [load_data(f"signatures_data/{name}") for name in names]


@cache
def load_data(name: str) -> Any:
    """Return a YAML file of this package, read once: callers do not change it."""
    return load_yaml("moedoctor.diagnose.triage", name)


@cache
def load_patterns(name: str) -> Mapping[str, re.Pattern[str]]:
    """Return the patterns of a YAML file by name, with its fragments in their places."""
    data = load_data(name)
    rows = data["patterns"].items()
    return {key: re.compile(join_fragments(text, data.get("fragments", {}))) for key, text in rows}


def _read_clue(name: str, row: Mapping[str, Any], fragments: Mapping[str, Any]) -> Clue:
    """Return a clue: one pattern, or two patterns in either order at most `gap` characters apart."""
    texts = {key: join_fragments(row[key], fragments) for key in ("pattern", "beside", "or") if key in row}
    pattern = texts["pattern"]
    if "beside" in texts:
        beside, gap = texts["beside"], f".{{0,{row['gap']}}}?"
        pattern = f"(?:{pattern}){gap}(?:{beside})|(?:{beside}){gap}(?:{pattern})"
    needles = "".join(row["needles"])
    return Clue(
        name,
        needles,
        pattern + texts.get("or", ""),
        **{key: row[key] for key in ("event", "ratio", "says") if key in row},
    )


def _read_signature(row: Mapping[str, Any]) -> Signature:
    """Return a signature; `evidence` is written as ``{clue|clue: factor}``."""
    evidence = tuple(
        Evidence(tuple(names.split("|")), float(factor)) for names, factor in row.get("evidence", {}).items()
    )
    rest = {key: _freeze(value) for key, value in row.items() if key != "evidence"}
    return Signature(**rest, evidence=evidence)


def join_fragments(text: str | Sequence[str], fragments: Mapping[str, Any]) -> str:
    """Join the lines of a text and put fragments in place of their names in double braces."""
    joined = "".join(text)
    for name, fragment in reversed(list(fragments.items())):
        joined = joined.replace(f"{{{{{name}}}}}", "".join(fragment))
    return joined


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def find_clues(text: str) -> list[Clue]:
    """Return the clues that have a needle in `text`, which is in lower case."""
    table = _make_table()
    names: set[str] = set()
    for word in set(re.findall(_WORD, text)):
        for needle in table.find_needles(word):
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
            word = re.match(_WORD, needle.strip())
            if word is None:
                self.without_word.append(needle)
            else:
                self.by_start.setdefault(word[0][:_KEY], []).append((word[0], needle))
        self.keys = frozenset(self.by_start)
        self.sizes = sorted(set(map(len, self.keys)))
        self.find_needles = lru_cache(_REMEMBERED)(self._find_needles)

    def _find_needles(self, word: str) -> tuple[str, ...]:
        """Return the needles that start in `word`: at its start, in a long word anywhere."""
        long = _COMPOUND <= len(word) <= _LONGEST
        places = range(len(word)) if long else range(1)
        keys = self.keys.intersection({word[at : at + size] for size in self.sizes for at in places})
        return tuple(
            needle
            for key in keys
            for first, needle in self.by_start[key]
            if (first in word if long else word.startswith(first))
        )


@cache
def _make_table() -> _Table:
    return _Table(load_clues())
