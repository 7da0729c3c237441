"""Which known failures a log, traceback or report shows.

The text is read once, as a stream. In the lines worth a look, clues are noted with their line numbers, and
releases are collected. At the end the signatures decide what the clues mean together.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import BinaryIO

from moedoctor.diagnose.triage.facts_in_text import Facts
from moedoctor.diagnose.triage.log_text import Passage, Passages
from moedoctor.diagnose.triage.signatures import Clue, Signature, clues, clues_in, signatures
from moedoctor.entries import entries
from moedoctor.redaction import Redactor
from moedoctor.text import escape

_EXCERPT = 160
_LONG = 500
_HEADLINES, _HEADLINE = 3, 0.1
"""The first lines of a report name its subject."""
_AGREEMENT = 0.04
_SUREST = 0.98
_FIRST_LINES = 2_000
_LAST_LINES = 500
_EXCERPTS = 40
_ENOUGH = 20_000
"""After so many lines with a clue, it is not looked for any more."""
_RARE_ANCHORS = (
    "illegal memory",
    "illegal instruction",
    "not on gpu",
    "ordereddict",
    "input batch when cpu",
    "noopoffloader",
    "environment variable",
    "invalid value",
    "scaling factor 1.0",
    "must match w3",
    "unique experts requested",
    "finalizemoerouting",
    "not supported on",
    "no supported cuda arch",
)
"""Words of messages that name a failure."""
_ANCHORS = (
    "moe",
    "expert",
    "offload",
    "illegal",
    "flashinfer",
    "fp4",
    "scal",
    "swizzl",
    "lfru",
    "backend",
    "environment variable",
    "arch_list",
    "sm_12",
    "compute_12",
    "wsl",
    "uva",
    "dynamo",
    "ordereddict",
    "may_reinit",
    "xid",
    "not supported on",
    "cuda arch",
    "llm engine",
    "server version",
)
"""Words of log lines, tracebacks and reports that are near clues."""


_Excerpt = tuple[str, int, int]
"""A line, and where in it the clue starts and ends."""


@dataclass(frozen=True)
class Finding:
    """A known failure that the text shows."""

    id: str
    line: int
    """The number of the line that shows it, from 1."""
    excerpt: str
    """The text of that line, shortened, without names, paths and secrets."""
    confidence: float
    """Above 0.5, at most 1."""
    next_step: str


@dataclass(frozen=True)
class Triage:
    """The findings, best first, and the releases that the text names."""

    findings: tuple[Finding, ...]
    releases: str


@dataclass
class _Notes:
    """The lines with one clue, in order: the first and the last ones."""

    first: list[int] = field(default_factory=list)
    last: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    excerpts: dict[int, _Excerpt] = field(default_factory=dict)
    count: int = 0

    def add(self, line: int, excerpt: _Excerpt) -> None:
        if line in self.excerpts or line in self.first[-1:] or (self.last and self.last[-1] == line):
            return
        self.count += 1
        if len(self.first) < _FIRST_LINES:
            self.first.append(line)
        else:
            self.last.append(line)
        if len(self.excerpts) < _EXCERPTS:
            self.excerpts[line] = excerpt

    def lines(self) -> list[int]:
        return sorted((*self.first, *self.last))


def triage(stream: BinaryIO, redactor: Redactor | None = None) -> Triage:
    """Return the known failures in `stream`, whatever it holds. The caller bounds its size."""
    facts, notes = Facts(), dict[str, _Notes]()
    once = clues().keys() - _placed()
    settled: set[str] = set()
    passages = Passages(
        stream, [word.encode() for word in _ANCHORS], [word.encode() for word in _RARE_ANCHORS]
    )
    for passage in passages:
        facts.read(passage.text[passage.start : passage.end])
        words = passage.text if passage.glued is None else f"{passage.text} {passage.glued}"
        open_clues = [clue for clue in clues_in(words) if clue.name not in settled]
        passages.charge(len(open_clues) * (1 + len(passage.text) // _LONG))
        for clue in open_clues:
            if place := _place(passage, clue):
                note = notes.setdefault(clue.name, _Notes())
                note.add(*place)
                if clue.name in once or note.count >= _ENOUGH:
                    settled.add(clue.name)
    lines = {name: note.lines() for name, note in notes.items()}
    best: dict[str, Finding] = {}
    if not ("foreign" in lines and "vllm" not in lines):
        for signature in signatures():
            finding = _finding(signature, lines, notes, facts, redactor or Redactor())
            if finding:
                best[signature.id] = _better(best.get(signature.id), finding)
    ordered = sorted(best.values(), key=lambda finding: (-finding.confidence, finding.id))
    return Triage(tuple(ordered), facts.summary())


@cache
def _placed() -> frozenset[str]:
    """Return the clues whose lines matter. Of the others it is enough to know that the text has them."""
    return frozenset(
        name
        for signature in signatures()
        for group in (signature.shows, signature.unless_near, *signature.near)
        for name in group
    )


def _better(known: Finding | None, new: Finding) -> Finding:
    """Return the surer of two findings of one failure, a little surer since there are two."""
    if known is None:
        return new
    surer = known if known.confidence >= new.confidence else new
    return replace(surer, confidence=_sure(surer.confidence + _AGREEMENT))


def _sure(confidence: float) -> float:
    return round(min(confidence, _SUREST), 2)


def _place(passage: Passage, clue: Clue) -> tuple[int, _Excerpt] | None:
    """Return the line of a clue in a passage and its place there, or None if it is not there."""
    pattern = re.compile(clue.pattern)  # from the module's own cache
    if clue.cased:
        match = pattern.search(passage.shown)
        return (passage.line, (passage.shown, *match.span())) if match else None
    for match in pattern.finditer(passage.text):
        if match.start() >= passage.end:
            break
        if match.end() > passage.start:
            start = match.start() - passage.start
            place = max(0, start), max(0, match.end() - passage.start)
            return max(1, passage.line - (start < 0)), (passage.shown, *place)
    # Only a match across a joint: elsewhere gluing makes one word of two.
    for match in pattern.finditer(passage.glued or ""):
        if any(match.start() < joint < match.end() for joint in passage.joints):
            return passage.line, (passage.shown, 0, 0)
    return None


def _finding(
    signature: Signature,
    lines: Mapping[str, list[int]],
    notes: Mapping[str, _Notes],
    facts: Facts,
    redactor: Redactor,
) -> Finding | None:
    if any(name in lines for name in signature.unless) or not facts.allows(signature):
        return None
    if not all(any(name in lines for name in group) for group in signature.anywhere):
        return None
    if signature.silent and "crash" in lines and "wrong" not in lines:
        return None
    for name in signature.shows:
        for line in lines.get(name, ()):
            near = all(_any_near(lines, group, line, signature.within) for group in signature.near)
            if near and not _any_near(lines, signature.unless_near, line, signature.within):
                excerpt = _masked(notes[name].excerpts.get(line, (name.replace("_", " "), 0, 0)), redactor)
                confidence = _sure(signature.confidence + (_HEADLINE if line <= _HEADLINES else 0.0))
                return Finding(signature.id, line, excerpt, confidence, entries()[signature.id].next)
    return None


def _masked(excerpt: _Excerpt, redactor: Redactor) -> str:
    """Return the text around a place, masked before it is cut: half a secret is not recognised."""
    text, start, end = excerpt
    at = len(redactor.text(text[:start])) if start else 0
    return escape(_around(redactor.text(text), at, at + end - start))


def _any_near(lines: Mapping[str, list[int]], names: tuple[str, ...], line: int, within: int) -> bool:
    for name in names:
        clue_lines = lines.get(name)
        if clue_lines:
            at = bisect_left(clue_lines, line - within)
            if at < len(clue_lines) and clue_lines[at] <= line + within:
                return True
    return False


def _around(text: str, start: int, end: int) -> str:
    """Return about 160 characters of `text` that hold the range from `start` to `end`."""
    if len(text) <= _EXCERPT:
        return text
    room = max(0, _EXCERPT - (end - start))
    begin = max(0, min(start - room // 2, len(text) - _EXCERPT))
    stop = min(len(text), max(begin + _EXCERPT, min(end, begin + 2 * _EXCERPT)))
    return f"{'…' if begin else ''}{text[begin:stop].strip()}{'…' if stop < len(text) else ''}"
