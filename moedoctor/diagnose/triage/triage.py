"""Which known failures a log, traceback or report shows.

The text is read once, as a stream. In the lines worth a look, clues are noted with their line numbers and
releases are taken in; at the end the signatures say what the clues mean together.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import BinaryIO

from moedoctor.diagnose.triage.advice import NEXT_STEPS
from moedoctor.diagnose.triage.facts_in_text import Facts
from moedoctor.diagnose.triage.log_text import Passage, Passages
from moedoctor.diagnose.triage.signatures import Clue, Signature, clues, signatures
from moedoctor.diagnose.triage.vocabulary import clues_in
from moedoctor.redaction import Redactor
from moedoctor.text import escape

_EXCERPT = 160
_LONG = 500
_HEADLINES, _HEADLINE = 3, 0.1
"""What the first lines of a report say is what the report is about."""
_AGREEMENT = 0.04
_SUREST = 0.98
_KEPT = 2_000
_KEPT_LAST = 500
_SHOWN = 40
_ENOUGH = 20_000
"""A clue that was seen so often is not looked for any more."""
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
"""Words of log lines, tracebacks and reports near which the clues stand."""
_SECRET = (
    r"((?:api[-_]?key|token|password|passwd|secret|authorization)[\"']?(?:[=:]| bearer"
    r"|(?<=key) ) ?[\"']?)(?!\*)[^\s\"',]{3,}"
)
_MAIL = r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,64}"
_WINDOWS_HOME = r"([A-Za-z]:[\\/]{1,2}Users[\\/]{1,2})[^\\/\s\"']{1,64}"


@dataclass(frozen=True)
class Finding:
    """A known failure that the text shows."""

    id: str
    line: int
    """Of the line that shows it, from 1."""
    excerpt: str
    """What stands there: one line, shortened, without names, paths and secrets."""
    confidence: float
    """Above 0.5, at most 1."""
    next_step: str


@dataclass(frozen=True)
class Triage:
    """The result: findings, best first, and the releases that the text names."""

    findings: tuple[Finding, ...]
    releases: str
    bytes_read: int


@dataclass
class _Notes:
    """Where a clue was seen: line numbers, in order, the first and the last ones."""

    first: list[int] = field(default_factory=list)
    last: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_LAST))
    shown: dict[int, str] = field(default_factory=dict)
    count: int = 0

    def add(self, line: int, excerpt: str) -> None:
        if (
            line in self.shown
            or (self.first and self.first[-1] == line)
            or (self.last and self.last[-1] == line)
        ):
            return
        self.count += 1
        if len(self.first) < _KEPT:
            self.first.append(line)
        else:
            self.last.append(line)
        if len(self.shown) < _SHOWN:
            self.shown[line] = excerpt

    def lines(self) -> list[int]:
        return sorted((*self.first, *self.last))


def triage(stream: BinaryIO, redactor: Redactor | None = None) -> Triage:
    """The known failures in `stream`, whatever it holds; the caller bounds its size."""
    facts, notes = Facts(), dict[str, _Notes]()
    once = clues().keys() - _placed()
    settled: set[str] = set()
    passages = Passages(
        stream, [word.encode() for word in _ANCHORS], [word.encode() for word in _RARE_ANCHORS]
    )
    for passage in passages:
        facts.read(passage.text[passage.start : passage.end])
        wanted = [clue for clue in clues_in(_words_of(passage)) if clue.name not in settled]
        passages.charge(len(wanted) * (1 + len(passage.text) // _LONG))
        for name, line, excerpt in _seen(passage, wanted):
            note = notes.setdefault(name, _Notes())
            note.add(line, excerpt)
            if name in once or note.count >= _ENOUGH:
                settled.add(name)
    lines = {name: note.lines() for name, note in notes.items()}
    best: dict[str, Finding] = {}
    if not ("foreign" in lines and "vllm" not in lines):
        for signature in signatures():
            finding = _finding(signature, lines, notes, facts, redactor or Redactor())
            if finding:
                best[signature.id] = _better(best.get(signature.id), finding)
    ordered = sorted(best.values(), key=lambda one: (-one.confidence, one.id))
    return Triage(tuple(ordered), facts.summary(), passages.bytes_read)


@cache
def _placed() -> frozenset[str]:
    """The clues of which the place counts; of the others it is enough to know that they are there."""
    return frozenset(
        name for one in signatures() for group in (one.shows, one.unless_near, *one.near) for name in group
    )


def _better(known: Finding | None, new: Finding) -> Finding:
    """The surer of two findings of one failure; that there are two makes it a little surer still."""
    if known is None:
        return new
    surer = known if known.confidence >= new.confidence else new
    return replace(surer, confidence=_sure(surer.confidence + _AGREEMENT))


def _sure(confidence: float) -> float:
    return round(min(confidence, _SUREST), 2)


def _words_of(passage: Passage) -> str:
    return passage.text if passage.glued is None else f"{passage.text} {passage.glued}"


def _seen(passage: Passage, wanted: Sequence[Clue]) -> Iterator[tuple[str, int, str]]:
    """Those of the clues that are in a passage: name, line, and the text around them."""
    for clue in wanted:
        pattern = _compiled(clue.pattern)
        if clue.cased:
            if match := pattern.search(passage.shown):
                yield clue.name, passage.line, _around(passage.shown, match.start(), match.end())
            continue
        for match in pattern.finditer(passage.text):
            if match.start() >= passage.end:
                break
            if match.end() > passage.start:
                start = match.start() - passage.start
                excerpt = _around(passage.shown, max(0, start), max(0, match.end() - passage.start))
                yield clue.name, max(1, passage.line - (start < 0)), excerpt
                break
        else:
            # Only what the break went through: elsewhere gluing makes one word of two.
            for match in pattern.finditer(passage.glued or ""):
                if any(match.start() < joint < match.end() for joint in passage.joints):
                    yield clue.name, passage.line, passage.shown[:_EXCERPT]
                    break


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _finding(
    signature: Signature,
    lines: Mapping[str, list[int]],
    notes: Mapping[str, _Notes],
    facts: Facts,
    redactor: Redactor,
) -> Finding | None:
    if any(name in lines for name in signature.unless):
        return None
    if not all(any(name in lines for name in group) for group in signature.anywhere):
        return None
    if not facts.allows(
        signature.since, signature.fixed, signature.flashinfer_fixed, signature.needs_version
    ):
        return None
    if signature.silent and "crash" in lines and "wrong" not in lines:
        return None
    for name in signature.shows:
        for line in lines.get(name, ()):
            near = all(_any_near(lines, group, line, signature.within) for group in signature.near)
            if near and not _any_near(lines, signature.unless_near, line, signature.within):
                excerpt = _masked(notes[name].shown.get(line, name.replace("_", " ")), redactor)
                confidence = _sure(signature.confidence + (_HEADLINE if line <= _HEADLINES else 0.0))
                return Finding(signature.id, line, excerpt, confidence, NEXT_STEPS[signature.id])
    return None


def _any_near(lines: Mapping[str, list[int]], names: tuple[str, ...], line: int, within: int) -> bool:
    for name in names:
        its_lines = lines.get(name)
        if its_lines:
            at = bisect_left(its_lines, line - within)
            if at < len(its_lines) and its_lines[at] <= line + within:
                return True
    return False


def _around(text: str, start: int, end: int) -> str:
    """About 160 characters of `text` with what lies between `start` and `end` in them."""
    if len(text) <= _EXCERPT:
        return text
    room = max(0, _EXCERPT - (end - start))
    begin = max(0, min(start - room // 2, len(text) - _EXCERPT))
    stop = min(len(text), max(begin + _EXCERPT, min(end, begin + 2 * _EXCERPT)))
    return f"{'…' if begin else ''}{text[begin:stop].strip()}{'…' if stop < len(text) else ''}"


def _masked(text: str, redactor: Redactor) -> str:
    text = _compiled(f"(?i){_SECRET}").sub(r"\1***", text)
    text = _compiled(_MAIL).sub("***", text)
    text = _compiled(_WINDOWS_HOME).sub(r"\1***", text)
    return escape(redactor.text(text))
