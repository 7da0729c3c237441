"""The error that ended a server: the root of its chain of exceptions, where it was raised, and its class.

Every line is read, in constant memory. Tracebacks are followed for each process apart, since ranks write at
once. Of the errors of the last incident the first counts that is no echo of another one: vLLM's parent
process, other ranks and launchers only tell that something ended. `causes.yaml` has the classes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache

from moedoctor.diagnose.triage.line_text import Quotations, Stance, is_possible, read_stance, split_prefix
from moedoctor.diagnose.triage.log_text import find_lines
from moedoctor.diagnose.triage.signatures import load_data, load_patterns

_COMMON = (b"rror", b"Traceback")
_NEEDLES = (
    *(*_COMMON, b"xception", b'File "', b"illed", b"egfault", b"egmentation", b"SIG", b"oom-", b"c10d"),
    *(b"nterrupt", b"NVRM: Xid", b"terminate called", b"what():", b"atchdog", b"died", b"xit code"),
    *(b"xitcode", b"broadcast block", b"startup complete", b"fatal", b"access fault", b"HSA_STATUS_ERROR"),
)
"""A line without any of them, and outside a traceback, is no error. In the middle of a large text only the
common ones are looked for: the others tell of an end."""
_BLOCKING = re.compile(rb"(?<!passing )CUDA_LAUNCH_BLOCKING\W{1,4}1\b")
_TRACEBACK = "Traceback (most recent call last)"
_LINKS = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_LIST = "#>-*+• "
"""The marks before a sentence: of a heading, a quotation, or an item of a list."""
_WRAPS = 3
_PROBES = ("ImportError", "ModuleNotFoundError", "KeyError", "AttributeError", "Empty", "StopIteration")
"""Exceptions that code catches to go another way; the one raised then is the error."""
_MOST_ERRORS, _MOST_PROCESSES, _MOST_FRAMES, _MOST_LINES = 200, 256, 60, 300_000
_APART = 400
"""Lines between two errors that do not belong together."""
_MOST_MESSAGE, _KEPT, _CONTINUED = 2_000, 6, 60
_MOST_HINTS = 2
_MOST_LEADS, _MOST_LEAD = 100, 200
"""Prefixes of unknown loggers that are learned, and the characters of one."""


@dataclass(frozen=True)
class Cause:
    """The error that ended the server, as far as the text tells."""

    line: int
    excerpt: str
    kind: str
    """Its class: a name of `causes.yaml`, such as ``memory``, or ``unknown``."""
    says: str
    """The class in a person's words, with what the text tells of it."""
    place: str
    """The frame where it was raised, ``file:line, in function``; empty without a traceback."""
    owner: str
    """The owner of that code."""
    next_step: str
    """The next steps, a line each; the first is the most particular one. Empty if a finding has a step."""
    note: str = ""
    """A warning of what not to believe in this text."""


@dataclass(frozen=True)
class Frame:
    """A line ``File "…", line …, in …`` of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        root = max((match.end() for match in load_lines()["code_root"].finditer(self.file)), default=0)
        return f"{self.file[root:]}:{self.line}, in {self.function}"


@dataclass
class _Error:
    """An exception of a traceback, or a line that tells of an end without one."""

    line: int
    text: str
    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    link: str = ""
    """The relation to `before`: "cause", "context", or an empty string."""
    before: _Error | None = None
    lines_after: list[str] = field(default_factory=list)
    detail: tuple[int, str] | None = None
    """The line after it, and its number, in which a compiler or validator tells what is wrong."""
    context: str = ""
    """The sentence before it, which may be about something else."""
    logger: str = ""
    """The place in the code that logged it; empty if it was not logged."""

    @property
    def type(self) -> str:
        match = load_lines()["exception"].match(self.text)
        return match["type"].rpartition(".")[2] if match else ""

    @property
    def whole(self) -> str:
        """The message with the lines that continue it."""
        detail = self.detail[1] if self.detail else ""
        return " ".join((self.text, detail, *self.lines_after, self.context))[:_MOST_MESSAGE]

    @property
    def words(self) -> str:
        """The whole message, and the frames, a line each."""
        return "\n".join((self.whole, *map(str, self.frames)))

    def find_root(self) -> _Error:
        """Return the first exception of the chain that is not a mere probe."""
        chain = [self]
        while chain[-1].before is not None:
            chain.append(chain[-1].before)
        for earlier, later in zip(reversed(chain), [*reversed(chain)][1:], strict=False):
            if earlier.type == "CalledProcessError" and earlier.detail is None:
                continue
            if (later.link == "context" and earlier.type in _PROBES) or earlier.text == later.type:
                continue
            return earlier
        return self


@dataclass
class _Open:
    """A traceback that is being read."""

    error: _Error
    """Its exception, which comes last: before that, the line with the last frame."""
    idle: int = 0
    """Lines since the last frame."""
    asserted: str = ""
    """The statement of the last frame, if it is an assertion: many have no message."""
    ignored: bool = False


class Errors:
    """Collects the errors of a text, line by line."""

    def __init__(self) -> None:
        self._found: list[_Error] = []
        self._latest: deque[_Error] = deque(maxlen=_MOST_ERRORS)
        self._open: dict[str, _Open] = {}
        self._last: dict[str, _Error] = {}
        self._continued: dict[str, int] = {}
        self._link: dict[str, str] = {}
        self._skipped: set[str] = set()
        self._processes: set[str] = set()
        self._looked_at = 0
        self._lead: re.Pattern[str] | None = None
        self._leads = 0
        self._logger = ""
        self._ready = 0
        """The line that says that the server is ready: what was before did not end it."""
        self._waiting = deque[tuple[Sequence[bytes], Sequence[int]]]()
        self._needles: Sequence[bytes] = _NEEDLES
        self._quotations = Quotations(alone=False)
        self._told: _Error | None = None
        """The first error that only a sentence or a line of code tells of."""
        self.headline = self.first = (0, "")
        """The line and words of a report's headline, 0 and none without one, and those of its first line."""
        self.words = ""
        """The whole message of the cause and its frames, a line each, once it was looked for."""
        self._started = False
        self._above: list[bytes] = []
        """The last lines before those that are searched."""
        self._cut: _Error | None = None
        """The first traceback whose exception the text does not have."""
        self.launch_blocking = False
        """True if the text sets ``CUDA_LAUNCH_BLOCKING=1``."""

    def read(self, lines: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Take in lines, as they stand in the text, with their numbers."""
        if not self._started:
            self.headline, self._started = _find_headline(lines[:3]), True
            self.first = (
                self.headline if self.headline[0] else (1, split_prefix(lines[0])[1] if lines else "")
            )
        self._waiting.append((lines, numbers))
        if len(self._waiting) > 2:
            self._search(*self._waiting.popleft())
            self._needles = _COMMON

    def _search(self, lines: Sequence[bytes], numbers: Sequence[int]) -> None:
        block = b"\n".join(lines)
        if b"CUDA_LAUNCH" in block:
            self.launch_blocking |= _BLOCKING.search(block) is not None
        at = 0
        for hit in [*sorted({hit for word in self._needles for hit in find_lines(block, word)}), len(lines)]:
            while at < hit and (self._open or self._continued):
                self._read_line(lines[at], numbers[at])
                at += 1
            if at <= hit < len(lines):
                if not self._quotations.is_of_another(lines, hit):
                    line = lines[hit]
                    if line.strip() == b"AssertionError" and not self._open:
                        line = _find_statement([*self._above, *lines[max(0, hit - _KEPT) : hit + 1]])
                    self._read_line(line, numbers[hit])
                at = hit + 1
        self._quotations.leave(lines, len(lines))
        self._above = [*self._above, *lines[-_KEPT:]][-_KEPT:]

    def _read_line(self, line: bytes, number: int) -> None:
        self._looked_at += 1
        if self._looked_at > _MOST_LINES:
            self._open.clear()
            self._continued.clear()
            return
        prefix, text = split_prefix(line)
        joined = _TRACEBACK in text and not text.rstrip(":").endswith(_TRACEBACK)
        whole = text.replace(_TRACEBACK, f"{_TRACEBACK}\\n")
        for part in load_lines()["joint"].split(whole) if joined else [self._strip_lead(text)]:
            self._read_text(line, prefix, part.strip(), number)

    def _strip_lead(self, text: str) -> str:
        """Return a line without what an unknown logger writes before each line, as the frames showed it."""
        if self._lead is not None and (match := self._lead.match(text)):
            return text[match.end() :]
        if (frame := load_lines()["frame"].search(text, 0, _MOST_MESSAGE)) is None:
            return text
        if 0 < frame.start() < _MOST_LEAD and self._leads < _MOST_LEADS:
            self._leads += 1
            # One pattern for all of a number: several in a row could match it in countless ways.
            lead = re.sub(r"\d+", r"\\d+", re.escape(text[: frame.start()].rstrip()))
            self._lead = re.compile(rf"{lead}(?:\b|(?<!\w))\s*")
        return text[frame.start() :]

    def _read_text(self, line: bytes, prefix: str, text: str, number: int) -> None:
        if prefix.lstrip().startswith("#") or line.startswith(b"```"):
            self._continued.clear()  # a heading, or the end of a block of code
        match = load_lines()["process"].search(prefix)
        process = (match[1] or match[2] or "") if match else ""
        if len(self._processes) < _MOST_PROCESSES:
            self._processes.add(process)
        elif process not in self._processes:
            process = ""
        self._logger = "".join(load_lines()["logger"].findall(prefix))
        warned = "warning " in prefix
        if text.rstrip(":").endswith(_TRACEBACK):
            ignored = warned or process in self._skipped
            self._skipped.discard(process)
            link, before = self._link.pop(process, ""), self._last.get(process)
            error = _Error(number, text, link=link, before=before if link else None)
            self._open[process] = _Open(error, ignored=ignored)
            self._continued.pop(process, None)
            return
        if "Application startup complete" in text:
            self._ready = number
        if text in _LINKS:
            self._link[process] = _LINKS[text]
            return
        if text.startswith("Exception ignored in"):
            self._skipped.add(process)
            return
        if load_lines()["frame"].match(text) and process not in self._open:
            self._open[process] = _Open(_Error(number, text), ignored=warned)  # pasted without its start
        traceback = self._open.get(process)
        if traceback is not None and self._read_traceback(traceback, process, text, number):
            return
        if process in self._continued and self._read_continuation(process, text, number):
            return
        bare = None if warned else load_lines()["bare"].match(text)
        if bare and (traceback is None or not traceback.error.frames):
            link = self._link.pop(process, "")
            before = self._last.get(process) if link else None
            self._add(process, _Error(number, text, link=link, before=before))
        elif self._told is None and not prefix.strip(_LIST) and (match := load_lines()["told"].search(text)):
            lower, place = text.lower(), match.start()
            name = re.split(r"[:( ]", match[1], maxsplit=1)[0]
            stance = read_stance(lower, place, place + len(name), (0, len(lower)))
            if stance is Stance.STATED and not is_possible(lower, place):
                self._told = _Error(number, match[1], context=text[:place])

    def _read_traceback(self, traceback: _Open, process: str, text: str, number: int) -> bool:
        """Take in a line of a traceback; return False if it is none."""
        error = traceback.error
        if frame := load_lines()["frame"].match(text) or load_lines()["notebook_frame"].match(text):
            error.frames.append(Frame(frame[1], int(frame[2]), frame[3]))
            error.line, error.text, traceback.idle, traceback.asserted = number, text, 0, ""
            return True
        traceback.idle += 1
        match = load_lines()["exception"].match(text) if error.frames else None
        if match and (match["message"] is not None or load_lines()["names_error"].search(match["type"])):
            del self._open[process]
            is_bare = text == "AssertionError" and traceback.asserted
            error.line, error.text = number, f"{text}: {traceback.asserted}" if is_bare else text
            if not traceback.ignored:
                self._add(process, error)
            return True
        if traceback.idle > _KEPT:
            del self._open[process]
            if error.frames and not traceback.ignored:
                self._cut = self._cut or error
            return False
        if text.startswith("assert "):
            traceback.asserted = text[:_MOST_MESSAGE]
        if re.match(r"raise [a-z_.]{0,80}[A-Z]", text) and self._told is None and not traceback.ignored:
            # A paste that ends before the exception itself.
            self._told = _Error(number, text[6:], error.frames)
        return bool(error.frames)

    def _add(self, process: str, error: _Error) -> None:
        (self._found if len(self._found) < _MOST_ERRORS else self._latest).append(error)
        error.logger = self._logger
        self._last[process] = error
        self._continued[process] = _CONTINUED

    def _read_continuation(self, process: str, text: str, number: int) -> bool:
        """Take in a line after an exception, which may continue its message."""
        left = self._continued[process] - 1
        error = self._last[process]
        detail = load_lines()["detail"].match(text)
        another = load_lines()["bare"].match(text) and not detail
        if (
            another
            or not text
            or left < 0
            or self._logger not in ("", error.logger)
            or load_lines()["command_line"].search(text)
        ):
            if text:
                self._continued.pop(process, None)
            return not text
        self._continued[process] = left
        if detail and error.detail is None:
            error.detail = number, text[:500]
        if len(error.lines_after) < _KEPT:
            error.lines_after.append(text[:500])
        return True

    def find_cause(self) -> Cause | None:
        """Return the error that ended the server; None for a text without one. Reads what waits."""
        self._needles = _NEEDLES
        while self._waiting:
            self._search(*self._waiting.popleft())
        errors = [error for error in (*self._found, *self._latest) if error.line > self._ready]
        if not errors:
            self.words = self._told.words if self._told else ""
            return self._describe(self._told) if self._told else None
        incident = [errors[-1]]
        for error in reversed(errors[:-1]):
            if incident[-1].line - error.line > _APART:
                break
            incident.append(error)
        last_of_chain = {id(error.before) for error in errors if error.before is not None}
        roots = [error.find_root() for error in reversed(incident) if id(error) not in last_of_chain]
        error = min(roots, key=_rank_echo)  # the first of the best
        self.words, cause = error.words, self._describe(error)
        hint = self.find_hint() if _rank_echo(error) == _WRAPS else None
        return hint if hint and hint.kind != "unknown" else cause

    def find_hint(self) -> Cause | None:
        """Return the class of the headline and of a traceback without its end; None if they say nothing."""
        cuts = (each.error for each in self._open.values() if each.error.frames and not each.ignored)
        cut = self._cut or next(cuts, None)
        line, text = self.headline
        match = load_lines()["told"].search(text)
        error = replace(cut or _Error(line, ""), text=match[0] if match else text)
        cause = self._describe(error)
        if cut is None:
            return cause if cause.kind != "unknown" else None
        excerpt = text if text and cause.kind != "unknown" else cut.text
        return replace(cause, excerpt=excerpt, note=load_data("causes.yaml")["cut"])

    def _describe(self, error: _Error) -> Cause:
        rules, owners = load_rules()
        frames = "\n".join(map(str, error.frames))
        text = error.text if error.context else error.whole
        rule = next(rule for rule in rules if rule.matches(text, frames))
        if rule.kind == "unknown":
            rule = next(rule for rule in rules if rule.matches(error.whole, frames))
        last, plumbing = error.frames[-1] if error.frames else None, load_lines()["plumbing"]
        frame = next((each for each in reversed(error.frames) if not plumbing.search(str(each))), last)
        place = str(frame) if frame else ""
        owner = next((name for pattern, name in owners.items() if place and re.search(pattern, place)), "")
        note = ""
        if rule.kind == "kernel_fault" and place and not self.launch_blocking:
            note = (
                "CUDA reports a fault at a later call, so this frame and its owner may be innocent; "
                "CUDA_LAUNCH_BLOCKING=1 makes it report where it is"
            )
        return Cause(
            line=error.detail[0] if error.detail else error.line,
            excerpt=f"{error.detail[1]} ({error.type})" if error.detail else error.text,
            kind=rule.kind,
            says=rule.says,
            place=place,
            owner=owner,
            next_step=rule.step,
            note=note,
        )


def _find_headline(lines: Sequence[bytes]) -> tuple[int, str]:
    """Return the number and the words of a report's headline; no words if the text has none."""
    for number, line in enumerate(lines, 1):
        prefix, text = split_prefix(line)
        tag = load_lines()["headline"].match(text)
        if text and (tag or "#" in prefix):
            return number, text[tag.end() if tag else 0 :]
    return 0, ""


def _rank_echo(error: _Error) -> int:
    """Return 0 for an exception with its traceback, more for what only tells of another error."""
    if load_lines()["wrapper"].search(error.text):
        return _WRAPS
    if load_lines()["echo"].search(error.text):
        return 2
    return 0 if error.frames else 1


@dataclass(frozen=True)
class Rule:
    """A row of `causes.yaml`: what an error of a class looks like."""

    kind: str
    says: str
    message: re.Pattern[str] | None
    frames: re.Pattern[str] | None
    step: str

    def matches(self, text: str, frames: str) -> bool:
        """Return True if the message and the frames are those of this row."""
        return all(
            pattern is None or pattern.search(where)
            for pattern, where in ((self.message, text), (self.frames, frames))
        )


@cache
def load_rules() -> tuple[tuple[Rule, ...], Mapping[str, str]]:
    """Return the rules, in order, and the owners of code by a pattern of its path."""
    data, rules = load_data("causes.yaml"), []
    rows = [(kind, body, row) for kind, body in data["classes"].items() for row in body["rules"]]
    for kind, body, row in sorted(rows, key=lambda row: row[2].get("order", 5)):
        message, frames = (
            re.compile(row[key], re.IGNORECASE) if key in row else None for key in ("message", "frames")
        )
        says, step = f"{body['name']}: {row['says']}", row.get("step", body["step"])
        rules.append(Rule(kind, says, message, frames, step))
    return tuple(rules), data["owners"]


@cache
def load_lines() -> Mapping[str, re.Pattern[str]]:
    """Return the patterns of lines by what these tell."""
    return {**load_patterns("causes.yaml"), **load_patterns("facts.yaml")}


def find_told_cause(places: Mapping[str, tuple[int, int, str]]) -> Cause | None:
    """Return the class of what a text tells first in words; None if it tells of no failure.

    `places` has the first line of each clue: its number, the place of the clue in it, and its text.
    """
    rows = [
        (*places[clue], kind, body)
        for kind, body in load_data("causes.yaml")["classes"].items()
        for clue in body.get("told", ())
        if clue in places
    ]
    if not rows:
        return None
    line, _, excerpt, kind, body = min(rows, key=lambda row: (row[3] == "unknown", *row[:2]))
    return Cause(line, excerpt, kind, f"{body['name']}: {body['says']}", "", "", body["step"])


def list_steps(cause: Cause, clues: Set[str]) -> list[str]:
    """Return what a text with these clues should try for its error, first what is of it alone."""
    hints = [
        row["try"]
        for row in sorted(load_data("causes.yaml")["hints"], key=lambda row: -row["if"].count("+"))
        if cause.kind in row["kinds"] and clues >= {*row["if"].split("+")} and row.get("but") not in clues
        if row.get("unless", "\0") not in cause.says
    ]
    step = load_data("causes.yaml")["classes"][cause.kind]["step"]
    own = cause.kind != "unknown" and cause.next_step != step
    return [cause.next_step, *hints[:_MOST_HINTS]] if own else [*hints[:_MOST_HINTS], cause.next_step]


def _find_statement(lines: Sequence[bytes]) -> bytes:
    """Return the last line; an AssertionError without a message with the statement of the code above it."""
    for line in reversed(lines[-1 - _KEPT : -1]):
        if line.strip().startswith(b"assert "):
            return b"AssertionError: " + line.strip()
        if line[:1] not in (b"", b" ", b"\t", b"\r"):
            break  # no code
    return lines[-1]
