"""A catalogue entry in words: one Markdown file with a head, read strictly.

The head, between two lines ``---``, begins with the lines of `HEAD` in this order, and then says by which
rules `moedoctor check` knows that the failure can strike (`entries.rules` reads those). The body has
the sections of `SECTIONS`, each once and in this order. `list` and `explain` need no more than this.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from moedoctor.text import TextFileError

HEAD = ("id", "name", "title", "where", "fixed")
"""The lines that a head begins with."""
SECTIONS = ("What happens", "Who is affected", "How to see it", "Fix", "Links")
"""The headings of an entry."""

_FENCE = "---"
_ID = re.compile(r"MD\d{3}")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_LINK = re.compile(r"- (https://[^\s<>\"'`]+)(?: (\S.*))?")


@dataclass(frozen=True)
class Link:
    """Where more is said about a failure."""

    url: str
    text: str
    """What is there, in a few words."""


@dataclass(frozen=True)
class Entry:
    """One known failure in words, in Markdown."""

    id: str
    """``MD001`` …"""
    name: str
    title: str
    """The failure in one line."""
    where: str
    """What it strikes, in a few words."""
    fixed: str
    """The first release without it, or ``no``."""
    mechanism: str
    affected: str
    """Releases, GPUs and settings."""
    detection: str
    fix: str
    """What the fix is and where it landed."""
    links: tuple[Link, ...]
    rules: str
    """The rest of the head, YAML that `moedoctor.entries.rules` reads."""
    rules_line: int
    """Where that begins in the file."""


def parse_entry(text: str) -> Entry:
    """The entry that `text` holds. Raises TextFileError, with the line, for anything else."""
    lines = text.splitlines()
    if not lines or lines[0] != _FENCE or _FENCE not in lines[1:]:
        raise TextFileError(1, f"has no head, expected it between two lines {_FENCE}")
    end = lines.index(_FENCE, 1)
    if end <= len(HEAD):
        raise TextFileError(end + 1, f"ends too early, expected a head with {', '.join(HEAD)} and rules")
    head = [_head(lines, number, key) for number, key in enumerate(HEAD, start=1)]
    for number, (value, pattern) in enumerate(zip(head, (_ID, _NAME), strict=False), start=2):
        if pattern.fullmatch(value) is None:
            raise TextFileError(number, f"'{value}', expected text like {pattern.pattern}")
    sections = _sections(lines, end + 1)
    texts = [text for _, text in sections.values()]
    return Entry(
        id=head[0],
        name=head[1],
        title=head[2],
        where=head[3],
        fixed=head[4],
        mechanism=texts[0],
        affected=texts[1],
        detection=texts[2],
        fix=texts[3],
        links=tuple(_links(*sections["Links"])),
        rules="\n".join(lines[1 + len(HEAD) : end]),
        rules_line=2 + len(HEAD),
    )


def _head(lines: list[str], index: int, key: str) -> str:
    found, _, value = lines[index].partition(": ")
    if found != key or not value.strip():
        raise TextFileError(index + 1, f"'{lines[index]}', expected '{key}: …'")
    if not value.startswith('"'):
        return value.strip()
    try:
        return str(json.loads(value))
    except ValueError:
        raise TextFileError(index + 1, f"{value} is not closed or holds an unknown escape") from None


def _sections(lines: list[str], start: int) -> dict[str, tuple[int, str]]:
    """Heading -> (line of its text, its text); `start` is the first index behind the head."""
    headings = [index for index in range(start, len(lines)) if lines[index].startswith("## ")]
    named = tuple(lines[index][3:] for index in headings)
    if named != SECTIONS:
        line = headings[0] + 1 if headings else len(lines)
        raise TextFileError(line, f"has the sections {', '.join(named)}, expected {', '.join(SECTIONS)}")
    if any(line.strip() for line in lines[start : headings[0]]):
        raise TextFileError(start + 1, "has text before its first section")
    found = {}
    for name, begin, end in zip(named, headings, [*headings[1:], len(lines)], strict=True):
        text = "\n".join(lines[begin + 1 : end]).strip()
        if not text:
            raise TextFileError(begin + 1, f"the section {name} is empty")
        found[name] = (begin + 2, text)
    return found


def _links(first: int, text: str) -> list[Link]:
    found = []
    for number, line in enumerate(text.splitlines(), start=first):
        match = _LINK.fullmatch(line)
        if match is None or match[2] is None:
            raise TextFileError(number, f"'{line}', expected '- https://… what is there'")
        found.append(Link(match[1], match[2]))
    return found
