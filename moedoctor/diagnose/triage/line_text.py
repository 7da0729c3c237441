"""One line of a log or report without what terminals, containers and web pages put around it."""

from __future__ import annotations

import enum
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moedoctor.diagnose.triage.signatures import load_patterns

LINES = load_patterns("log_lines.yaml")
"""Patterns of prefixes and markup by name."""
_STRIPPED = {
    **str.maketrans("", "", "`\x00\ufeff\u200b\u200c\u200d\u2060\xad"),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u2032\xb4"), "'"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\u2033"), '"'),
    **dict.fromkeys(map(ord, "\u2010\u2011\u2212"), "-"),
}
"""Characters to remove, and what word processors and web pages put in place of quotes and hyphens."""
_CJK = "[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]"
_SCRIPTS = re.compile(rf"(?<=\w)(?={_CJK})(?<!{_CJK})|(?<={_CJK})(?=\w)(?!{_CJK})")
"""A joint of words of another script: `\b` finds none."""
_CLAUSE = 120
"""Characters before a phrase that may deny it."""
_QUOTATION = 60
"""Lines of a quotation in which its introduction is looked for."""
_OWN = re.compile(rb"\b(?:i|we|my|our|mine|it|log|output|traceback|server|with)\b[^.]{0,80}:\W{0,3}$")
_CHANGE = re.compile(
    rb"\s{0,8}[-*+] {1,4}(?:\[[\w /+-]{1,30}\] ?){0,3}(?:fix|avoid|prevent|handle|resolve|correct)\w{0,3} "
)


class Stance(enum.Enum):
    """The way in which a text speaks of an event."""

    STATED = ""
    """It happened here."""
    TOLD = "told"
    """It happened to others or earlier, or it may happen: here it is possible at most."""
    DENIED = "denied"


def read_stance(text: str, start: int, end: int, line: tuple[int, int]) -> Stance:
    """Return how a text in lower case speaks of what is written from `start` to `end`.

    `line` is the place of its line in the text: a pasted line is no part of the sentence before it.
    """
    words = load_patterns("stance.yaml")
    start, end = _find_quotation(text, start, end)
    before = text[max(0, start - _CLAUSE) : start]
    denied = words["denied_before"].search(before) or words["attributed"].search(before)
    if denied or words["denied_after"].match(text, end):
        return Stance.DENIED
    in_line = text[max(line[0], start - 2 * _CLAUSE) : start]
    after = text[end : max(end, line[1])]
    asked = words["question"].search(in_line) and words["open_end"].match(after)
    possible = asked or words["told_before"].search(in_line)
    clause = words["clause_end"].split(in_line.rstrip(" :\"'("))[-1]
    rest = words["clause_end"].split(after, maxsplit=1)[0].partition(", ")[0]
    others = words["others"].search(clause.rpartition(", ")[2]) or words["condition"].match(rest)
    # A clause that names others, or a condition, and no owner, tells of others.
    of_others = others and not words["owner"].search(f"{clause} {rest}")
    mentioned = text[start] == '"' and in_line and not words["happened"].search(in_line)
    tale = possible or of_others or mentioned or words["told_after"].match(after)
    return Stance.TOLD if tale else Stance.STATED


@dataclass
class Quotations:
    """Knows the lines that tell of another text: items of a list of changes, quotations (``> …``), code."""

    alone: bool
    """The answer for a quotation without words above it."""
    _before: Sequence[bytes] = ()
    """The last lines before those that are looked at."""
    _lines: Sequence[bytes] = ()
    _fenced: bool = False
    """True if `_lines`, or those before them, have a block of code: most logs have none."""

    def is_of_another(self, lines: Sequence[bytes], index: int) -> bool:
        """Return True for an item, and for a quotation or code below words that tell of others."""
        if lines is not self._lines:
            self._lines, self._fenced = lines, b"```" in b"\n".join([*self._before, *lines])
        if not self._fenced and not is_quoted(lines[index]):
            return _CHANGE.match(lines[index].lower()) is not None
        above = self._list_above(lines, index)
        if is_quoted(lines[index]):
            words = next((line for line in reversed(above) if line.strip() and not is_quoted(line)), None)
            return self.alone if words is None else not _OWN.search(words.lower())
        fence = max((at for at, line in enumerate(above) if line.startswith(b"```")), default=0)
        words = next((line.rstrip() for line in reversed(above[:fence]) if line.strip()), b"")
        text = f'{words.decode(errors="replace").lower() if words.endswith(b":") else ":"} "'
        stance = read_stance(text, len(text) - 1, len(text), (0, len(text)))
        return stance is not Stance.STATED or _CHANGE.match(lines[index].lower()) is not None

    def leave(self, lines: Sequence[bytes], end: int) -> None:
        """Forget the lines before `end`, but for the last ones: the next ones come without them."""
        self._before = self._list_above(lines, end)

    def _list_above(self, lines: Sequence[bytes], index: int) -> Sequence[bytes]:
        return [*self._before, *lines[max(0, index - _QUOTATION) : index]][-_QUOTATION:]


def is_quoted(line: bytes) -> bool:
    """Return True for a line of a quotation in Markdown."""
    return line.lstrip().startswith((b">", b"&gt;"))


def _find_quotation(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the place of the quotation or of the message with its error's name that holds a place."""
    first = max(0, start - 2 * _CLAUSE)
    opening, closing = text.rfind('"', first, start), text.find('"', end, end + 2 * _CLAUSE)
    if opening >= 0 and text.count('"', first, start) % 2 == 1:
        return opening, closing + 1 if closing >= 0 else end
    name = load_patterns("stance.yaml")["error_name"].search(text, first, start)
    return (name.start() if name else start), end


def is_possible(text: str, start: int) -> bool:
    """Return True if a text in lower case says that what begins at `start` may happen, not that it did."""
    return bool(load_patterns("stance.yaml")["possible"].search(text[max(0, start - _CLAUSE) : start]))


def split_prefix(line: bytes) -> tuple[str, str]:
    """Return the prefixes of a line, in lower case, and its words with single spaces.

    A line of decoration has no words.
    """
    text = _decode(line).replace("\r", " ").strip()
    if text[:1] == "#" and LINES["commented"].match(text):
        return "", ""
    if text[:1] == "{" and '"' in text:
        text = _read_json_message(text)
    if "\x1b" in text or "[" in text:
        text = LINES["ansi"].sub("", text)
    if "<" in text:
        text = LINES["tag"].sub(" ", text)
    if "&" in text:
        text = html.unescape(html.unescape(text))
    if "\\" in text:
        text = re.sub(r"\\[nrt]", " ", text)
        text = re.sub(r"\\([`*_\[\]#<>\"'~|-])", r"\1", text)
    text = text.translate(_STRIPPED).replace("**", "")
    if "\u2013" in text or "\u2014" in text:
        text = re.sub("(?<![^ ])[\u2013\u2014](?=[a-z])", "--", text)  # an option after a correction
    text = text if text.isascii() else re.sub(_SCRIPTS, " ", text)
    whole = text
    for _ in range(8):
        text = text.lstrip()
        prefix = LINES["prefix"].match(text)
        if prefix is None:
            break
        text = text[prefix.end() :]
    prefixes = whole[: len(whole) - len(text)].lower()
    if not text.strip("^~-=_|━─ "):
        return prefixes, ""
    return prefixes, " ".join(text.split())


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        # A character cut at the end of a piece, or another encoding: cp1252 is what Windows writes.
        return line.decode("cp1252", "replace")


def _read_json_message(text: str) -> str:
    """Return the message of a log line written as JSON, as docker and structured loggers do."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(entry, dict):
        for key in ("log", "message", "msg", "MESSAGE", "text"):
            if isinstance(message := entry.get(key), str):
                return message
    return text
