"""Finds the known failures that a log, traceback or report shows, and how sure that is.

The text is read once, as a stream. In the lines worth a look, clues are noted with their line numbers, and
releases are collected. At the end the signatures decide what the clues mean together: the clue that shows a
failure has a confidence of its own, and other clues in the text raise or lower it.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import BinaryIO

from moedoctor.diagnose.triage.advice import NO_HELP, NO_OLDER, Advice
from moedoctor.diagnose.triage.cause import Cause, Errors, find_told_cause, load_lines
from moedoctor.diagnose.triage.facts_in_text import Facts, release_words
from moedoctor.diagnose.triage.line_text import Stance, is_possible, read_stance
from moedoctor.diagnose.triage.log_text import Passage, Passages
from moedoctor.diagnose.triage.settings_in_text import Settings, SettingsReader
from moedoctor.diagnose.triage.signatures import (
    Clue,
    Signature,
    find_clues,
    load_clues,
    load_data,
    load_signatures,
)
from moedoctor.entries import load_entries
from moedoctor.redaction import Redactor
from moedoctor.text import escape

_EXCERPT = 160
_LONG = 500
_HEADLINES = 3
"""A headline is one of the first lines."""
_SUBJECT = 2.5
"""A headline names the subject of its report: the odds of what it shows are so many times higher."""
_STEP = 0.01
_AGREEMENT = 0.04
_SUREST = 0.98
_CERTAIN, _LIKELY, _LEAST = 0.9, 0.5, 0.05
_CRASH_ONLY = 0.1
"""A failure without a crash in a text that has a crash and no wrong result."""
_LACKING = 0.25
"""A group of clues that a signature asks for and the text lacks. The finding is then possible at best."""
_OTHER_ENGINE = 0.04
_NEAR_MISSES, _NEAR_MISS = 5, 0.3
"""So many near misses are shown, of failures that would be as sure as this without what excludes them."""
_OURS = re.compile(r"^.{0,40}\bmoedoctor: |\bmd\d{3} (?:[a-z]{1,20}_){1,3}[a-z]{1,20}\b")
"""A line of moedoctor's plug-in or of a report, in lower case: it names failures that were looked for."""
_FIRST_LINES = 2_000
_LAST_LINES = 500
_EXCERPTS = 40
_ENOUGH = 20_000
"""After so many lines with a clue, it is not looked for any more."""
_MOST_WORDS, _BODY = 20_000, 40
"""The characters of an error that are compared with threads upstream, and the lines of a report in words."""
_Excerpt = tuple[str, int, int]
"""A line, and where in it the clue starts and ends."""


class Grade(str, enum.Enum):
    """The certainty of a finding."""

    CERTAIN = "certain"
    """The text itself proves it."""
    LIKELY = "likely"
    POSSIBLE = "possible"
    """The text does not decide: it is this failure under conditions that the text does not name."""


@dataclass(frozen=True)
class Finding:
    """A known failure that the text shows."""

    id: str
    line: int
    """The number of the line that shows it, from 1."""
    excerpt: str
    """The text of that line, shortened, without names, paths and secrets."""
    confidence: float
    """Above 0, below 1."""
    next_step: str
    """The next steps, a line each."""
    grade: Grade
    why: tuple[str, ...] = ()
    """Reasons in the text that speak for it, and after "but" what speaks against it."""
    missing: tuple[str, ...] = ()
    """Facts that would make it surer."""
    releases: str = ""
    """If the release in the text has the failure, and which release fixes it."""
    file: str | None = field(default=None, metadata={"sparse": True})
    """The input that shows it, if there are several."""


@dataclass(frozen=True)
class NearMiss:
    """A known failure of which the text shows a part."""

    id: str
    line: int
    reason: str
    """The reason why it is not this failure."""
    file: str | None = field(default=None, metadata={"sparse": True})
    """The input, if there are several."""


@dataclass(frozen=True)
class Triage:
    """The findings about a text, best first, and the facts that they rest on."""

    findings: tuple[Finding, ...]
    """Certain and likely ones."""
    releases: str
    """The releases that the text names."""
    possible: tuple[Finding, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    gpus: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    """MoE backends."""
    bytes_read: int = 0
    other_releases: str = ""
    """Releases that the text names, but not as the ones that failed."""
    settings: Settings = field(default_factory=Settings)
    """The settings that the server was started with."""
    error: Cause | None = None
    """The error that ended the server."""


@dataclass
class _Notes:
    """The lines with one clue, in order: the first and the last ones."""

    first: list[int] = field(default_factory=list)
    last: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    excerpts: dict[int, _Excerpt] = field(default_factory=dict)
    mentions: set[int] = field(default_factory=set)
    """Lines that tell of it without saying that it happened here."""
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

    def list_lines(self) -> list[int]:
        return sorted((*self.first, *self.last))


def triage(stream: BinaryIO, redactor: Redactor | None = None) -> Triage:
    """Return the known failures in `stream`, whatever it holds. The caller bounds its size."""
    facts, notes = Facts(), dict[str, _Notes]()
    once = load_clues().keys() - _list_placed()
    settled: set[str] = set()
    settings, body = SettingsReader(), list[str]()
    errors = Errors()
    anchors = load_data("anchors.yaml")
    common, rare = ([word.encode() for word in anchors[kind].split("|")] for kind in ("common", "rare"))
    passages = Passages(stream, common, rare, errors.read)
    for passage in passages:
        middle = passage.text[passage.start : passage.end]
        if _OURS.search(middle):
            continue
        facts.read(middle)
        settings.read(passage.shown, passage.of_another)
        if len(body) < _BODY:
            body.append(passage.shown[:_EXCERPT])
        if passage.of_vllm and "vllm_log" not in settled:
            settled.add("vllm_log")
            notes.setdefault("vllm_log", _Notes()).add(passage.line, (passage.shown, 0, 0))
        words = passage.text if passage.glued is None else f"{passage.text} {passage.glued}"
        open_clues = [clue for clue in find_clues(words) if clue.name not in settled]
        passages.charge(len(open_clues) * (1 + len(passage.text) // _LONG))
        for clue in open_clues:
            if place := _place(passage, clue):
                line, excerpt, stance = place
                denied = stance is Stance.DENIED
                note = notes.setdefault(f"no {clue.name}" if denied else clue.name, _Notes())
                note.add(line, excerpt)
                if denied:
                    continue
                if stance is Stance.TOLD:
                    note.mentions.add(line)
                elif clue.name in once or note.count >= _ENOUGH:
                    settled.add(clue.name)
    lines = {name: note.list_lines() for name, note in notes.items()}
    redactor = redactor or Redactor()
    advice = Advice(facts, settings.mask(redactor), notes.keys(), settings.attempts.keys())
    reader = _Reader(lines, notes, facts, advice, redactor, errors.headline[0])
    best: dict[str, Finding] = {}
    for signature in load_signatures():
        if finding := reader.find(signature):
            best[signature.id] = _choose_surer(best.get(signature.id), finding)
    ordered = sorted(best.values(), key=lambda finding: (-finding.confidence, finding.id))
    findings = tuple(finding for finding in ordered if finding.grade is not Grade.POSSIBLE)
    error = errors.find_cause()
    if error is None or (error.kind == "unknown" and not error.place):
        in_words = _find_told_error(errors, notes, redactor, bool(findings))
        if error is None:
            error = in_words
        elif in_words is not None and in_words.kind not in ("unknown", "wrong_output", "speed"):
            error = replace(in_words, line=error.line, excerpt=error.excerpt)
    flags = (f"--{name} {value}" for name, value in settings.flags.items())
    heads = (errors.headline[1][:_LONG], errors.first[1][:_LONG], error.excerpt if error else "")
    words = redactor.mask("\n".join((*heads, settings.model, *flags, errors.words)))[:_MOST_WORDS]
    # A report in words names its subject anywhere.
    more = "" if errors.words.strip() else redactor.mask("\n".join(body))
    if error is not None:
        masked = replace(error, excerpt=redactor.mask(error.excerpt))
        steps = [*advice.list_facts(masked, words, more)]
        findings = tuple(
            replace(each, next_step="\n".join((each.next_step, *steps))) if each.line == error.line else each
            for each in findings
        )
        own = [*advice.list_steps(error)] if error.next_step else []
        steps += [*own[:1], *advice.name_likely(words, more, error.kind), *own[1:]]
        steps.sort(key=lambda step: step.endswith((NO_HELP, NO_OLDER)))
        error = replace(error, next_step="\n".join(dict.fromkeys(steps)))
    elif not (findings or notes.keys() & {"vllm_log", "solved_told"}):
        error = _answer_question(errors, advice, words, more)
    return Triage(
        findings=findings,
        releases=facts.summarize(),
        possible=tuple(finding for finding in ordered if finding.grade is Grade.POSSIBLE),
        near_misses=tuple(miss for id, miss in reader.misses.items() if id not in best)[:_NEAR_MISSES],
        gpus=tuple(facts.gpus),
        backends=facts.list_backends(),
        bytes_read=passages.bytes_read,
        other_releases=facts.summarize_others(),
        settings=advice.settings,
        error=_mask_cause(error, redactor),
    )


def _answer_question(errors: Errors, advice: Advice, words: str, body: str) -> Cause | None:
    """Return what is known about a question, or of a report without an error; None if nothing is known."""
    line, text = errors.first
    row = load_data("causes.yaml")["classes"]["question"]
    asked = Cause(line, text[:_LONG], "question", f"{row['name']}: {row['says']}", "", "", "")
    tagged = body.partition("\n")[0]  # with its tag, such as [Bug]
    asks = load_lines()["asks"].search(f"{tagged} {text[:_LONG]}")
    own = [*filter(None, advice.list_steps(asked))] if asks else []
    likely = advice.name_likely(words, body, "question")
    steps = [*advice.list_facts(asked, words, body), *own[:1], *likely, *own[1:]]
    return replace(asked, next_step="\n".join(steps)) if steps else None


def _find_told_error(
    errors: Errors, notes: Mapping[str, _Notes], redactor: Redactor, explained: bool
) -> Cause | None:
    """Return the class of what a text without an exception tells; without a step if a finding has one."""
    if "solved_told" in notes:
        return None
    first = {
        name: min((line, excerpt) for line, excerpt in note.excerpts.items() if line not in note.mentions)
        for name, note in notes.items()
        if note.excerpts.keys() - note.mentions
    }
    in_words = find_told_cause(
        {name: (line, where[1], _mask(where, redactor)) for name, (line, where) in first.items()}
    )
    cause = in_words if in_words and in_words.kind != "unknown" else errors.find_hint() or in_words
    if cause is None or not explained:
        return cause
    return replace(cause, next_step="") if cause.kind != "unknown" else None


def _mask_cause(cause: Cause | None, redactor: Redactor) -> Cause | None:
    if cause is None:
        return None
    excerpt = _mask((cause.excerpt, 0, min(len(cause.excerpt), 2 * _EXCERPT)), redactor)
    return replace(cause, excerpt=excerpt, place=escape(redactor.mask(cause.place)))


@cache
def _list_placed() -> frozenset[str]:
    """Return the clues whose lines matter. Of the others it is enough to know that the text has them."""
    return frozenset(
        name
        for signature in load_signatures()
        for group in (signature.shows, signature.unless_near, *signature.near)
        for name in group
    )


def _choose_surer(known: Finding | None, new: Finding) -> Finding:
    """Return the surer of two findings of one failure, a little surer if two lines show it."""
    if known is None:
        return new
    surer = known if known.confidence >= new.confidence else new
    if surer.grade is Grade.POSSIBLE or known.line == new.line:
        return surer
    confidence = _limit(surer.confidence + _AGREEMENT)
    return replace(surer, confidence=confidence, grade=_judge(confidence))


def _limit(confidence: float) -> float:
    return round(min(confidence, _SUREST), 2)


def _judge(confidence: float) -> Grade:
    if confidence >= _CERTAIN:
        return Grade.CERTAIN
    return Grade.LIKELY if confidence > _LIKELY else Grade.POSSIBLE


def _place(passage: Passage, clue: Clue) -> tuple[int, _Excerpt, Stance] | None:
    """Return the line of a clue in a passage, its place there, and how the text speaks of it.

    Returns None if the clue is not there.
    """
    pattern = re.compile(clue.pattern)  # from the module's own cache
    weaker = None
    for match in pattern.finditer(passage.text):
        if match.start() >= passage.end:
            break
        if match.end() > passage.start:
            start = match.start() - passage.start
            span = max(0, start), max(0, match.end() - passage.start)
            place = max(1, passage.line - (start < 0)), (passage.shown, *span)
            if clue.ratio and max(sizes := [*map(int, match.groups())]) != clue.ratio * min(sizes):
                continue
            if clue.event and (passage.warned or is_possible(passage.text, match.start())):
                continue
            stance = _read_stance(passage, *match.span())
            if stance is Stance.STATED:
                return *place, stance
            if weaker is None or stance is Stance.TOLD:
                weaker = *place, stance
    # Only a match across a joint: elsewhere gluing makes one word of two.
    for match in pattern.finditer(passage.glued or ""):
        if any(match.start() < joint < match.end() for joint in passage.joints):
            return passage.line, (passage.shown, 0, 0), Stance.TOLD if passage.of_another else Stance.STATED
    return weaker


def _read_stance(passage: Passage, start: int, end: int) -> Stance:
    first = passage.start if start >= passage.start else 0
    stance = read_stance(passage.text, start, end, (first, passage.end))
    return Stance.TOLD if stance is Stance.STATED and passage.of_another else stance


@dataclass
class _Reader:
    """Says what the clues of a text mean together."""

    lines: Mapping[str, list[int]]
    """The lines of each clue."""
    notes: Mapping[str, _Notes]
    facts: Facts
    advice: Advice
    redactor: Redactor
    headline: int = 0
    """The line of the report's headline, or 0."""
    misses: dict[str, NearMiss] = field(default_factory=dict)
    """The first near miss of each failure."""

    def find(self, signature: Signature) -> Finding | None:
        """Return what `signature` finds, or None. Notes a near miss."""
        place = self._find_clue(signature)
        if place is None:
            self._note_denial(signature)
            return None
        name, line = place
        confidence, why, missing = self._weigh(signature, line)
        if line in self.notes[name].mentions or self._tells_of_others():
            confidence = min(confidence, _LIKELY)
            why = (*why, "but the text mentions it and does not say that it happened here")
        if confidence < _LEAST or not all(map(self._is_any_here, signature.needs)):
            return None
        against = next((_describe(name) for name in signature.unless if name in self.lines), "")
        reason = f"the text says that {against}" if against else ""
        if reason := self.facts.explain_exclusion(signature) or reason:
            if confidence >= _NEAR_MISS:
                self.misses.setdefault(signature.id, NearMiss(signature.id, line, reason))
            return None
        entry = load_entries()[signature.id]
        return Finding(
            id=signature.id,
            line=line,
            excerpt=_mask(self.notes[name].excerpts.get(line, (name.replace("_", " "), 0, 0)), self.redactor),
            confidence=confidence,
            next_step=self.advice.fit(signature.next or entry.next),
            grade=_judge(confidence),
            why=why,
            missing=missing,
            releases=signature.releases or release_words(entry, self.facts),
        )

    def _tells_of_others(self) -> bool:
        """Return True for a proposal, or if the writer's server works, unless an engine's log follows."""
        proposed = self.lines.get("proposal", [_HEADLINES + 1])[0] <= _HEADLINES
        return (proposed or "fine_here" in self.lines) and "vllm_log" not in self.lines

    def _is_any_here(self, names: tuple[str, ...]) -> bool:
        return any(name in self.lines for name in names)

    def _note_denial(self, signature: Signature) -> None:
        """Note a near miss if the text has ground for a failure, and does not say that it happened here."""
        denied = [self.lines[f"no {name}"][0] for name in signature.shows if f"no {name}" in self.lines]
        around = tuple(name for group in (*signature.near, *signature.anywhere) for name in group)
        groups = (*signature.needs, *((around,) if around else ()))  # what is denied, too, is spoken of
        if denied and all(self._is_any_here((*names, *map("no {}".format, names))) for names in groups):
            self.misses.setdefault(
                signature.id, NearMiss(signature.id, denied[0], "the text does not say that it happened here")
            )

    def _list_support(self, signature: Signature) -> list[str]:
        """Return what the text says of the clues that a signature asks for beside the one it shows."""
        groups = (*signature.near, *signature.needs, *signature.anywhere)
        present = (next((name for name in group if name in self.lines), None) for group in groups)
        return [load_clues()[name].says for name in present if name and load_clues()[name].says]

    def _find_clue(self, signature: Signature) -> tuple[str, int] | None:
        """Return the clue that shows a failure, and the first of its lines with the clues it needs nearby."""
        for name in signature.shows:
            mentions = self.notes[name].mentions if name in self.notes else ()
            for line in sorted(self.lines.get(name, ()), key=lambda line: line in mentions):
                near = all(
                    _is_any_near(self.lines, group, line, signature.within) for group in signature.near
                )
                if near and not _is_any_near(self.lines, signature.unless_near, line, signature.within):
                    return name, line
        return None

    def _weigh(self, signature: Signature, line: int) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
        """Return the confidence with all evidence, what speaks for and against it, and what is missing."""
        confidence = signature.confidence
        odds = confidence / (1 - confidence)
        if line == self.headline and confidence < _CERTAIN:
            surest = _CERTAIN - _STEP  # the place alone makes nothing certain
            odds = min(odds * _SUBJECT, surest / (1 - surest))
        why = self._list_support(signature)
        against: list[str] = []
        missing: list[str] = []
        for evidence in sorted(signature.evidence, key=lambda evidence: -evidence.factor):
            name = next((name for name in evidence.names if name in self.lines), None)
            if name is not None:
                odds *= evidence.factor
                (why if evidence.factor > 1 else against).append(_describe(name))
            elif evidence.factor > 1:
                missing.append(_describe(evidence.names[0]))
        lacking = [group for group in signature.anywhere if not self._is_any_here(group)]
        missing = [*(_describe(group[0]) for group in lacking), *missing]
        odds *= _LACKING ** len(lacking)
        if signature.silent and "crash" in self.lines and "wrong" not in self.lines:
            odds *= _CRASH_ONLY
            against.append("the text is about a crash")
        if "foreign" in self.lines and "vllm" not in self.lines:
            odds *= _OTHER_ENGINE
            against.append("the text is about another engine")
        reasons = (*dict.fromkeys(why), *(f"but {reason}" for reason in against))
        weighed = min(odds / (1 + odds), _LIKELY) if lacking else odds / (1 + odds)
        return _limit(weighed), reasons, tuple(missing)


def _describe(name: str) -> str:
    return load_clues()[name].says or f"it is about {name.replace('_', ' ')}"


def _mask(excerpt: _Excerpt, redactor: Redactor) -> str:
    """Return the text around a place, masked before it is cut: half a secret is not recognized."""
    text, start, end = excerpt
    at = len(redactor.mask(text[:start])) if start else 0
    return escape(_cut_around(redactor.mask(text), at, at + end - start))


def _is_any_near(lines: Mapping[str, list[int]], names: tuple[str, ...], line: int, within: int) -> bool:
    placed = (lines.get(name, []) for name in names)
    return any(bisect_left(near, line - within) < bisect_right(near, line + within) for near in placed)


def _cut_around(text: str, start: int, end: int) -> str:
    """Return about 160 characters of `text` that hold the range from `start` to `end`."""
    if len(text) <= _EXCERPT:
        return text
    room = max(0, _EXCERPT - (end - start))
    begin = max(0, min(start - room // 2, len(text) - _EXCERPT))
    stop = min(len(text), max(begin + _EXCERPT, min(end, begin + 2 * _EXCERPT)))
    return f"{'…' if begin else ''}{text[begin:stop].strip()}{'…' if stop < len(text) else ''}"
