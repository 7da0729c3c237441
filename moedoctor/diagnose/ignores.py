"""Findings that somebody has accepted: ``--ignore ID=REASON until DATE``; and severities that fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TypeVar

from moedoctor.text import shorten, suggest_expected

SEVERITIES = ("error", "warning", "note")
"""The worst first."""
FAIL_ON = (*SEVERITIES, "never")
_UNTIL = re.compile(r"\buntil ([\d.:/-]+)\Z")
T = TypeVar("T")


class IgnoreError(Exception):
    """A rule that cannot be read; one line says what was expected."""


@dataclass(frozen=True)
class Ignore:
    id: str
    """The id of a finding, or the first words of a title without one."""
    reason: str
    until: str | None
    """The last day on which it holds, such as 2027-01-31."""

    def has_ended(self, today: date) -> bool:
        """Return True after the last day."""
        return self.until is not None and date.fromisoformat(self.until) < today

    def match(self, ids: Sequence[str], title: str) -> bool:
        """Return True for a finding with this id, or, without ids, with a title that begins with it."""
        if ids:
            return self.id in ids
        return re.match(rf"{re.escape(self.id)}(?!\w)", title, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Ignored:
    """A finding that a rule leaves out. It is shown with its reason, and does not fail."""

    id: str
    title: str
    reason: str
    until: str | None


def read_ignore(text: str, known: Sequence[str] = ()) -> Ignore:
    """Return the rule in ``ID=REASON`` or ``ID=REASON until 2027-01-31``. Raises IgnoreError.

    With `known`, another id is refused.
    """
    id, _, rest = map(str.strip, text.partition("="))
    end = _UNTIL.search(rest)
    until = end[1] if end else None
    reason = rest[: end.start()].rstrip(" \t\n,;") if end else rest
    if not id or not reason:
        raise IgnoreError(f"--ignore {shorten(text, 80)}: expected ID=REASON or 'ID=REASON until 2027-01-31'")
    if known and id not in known:
        raise IgnoreError(f"--ignore {shorten(id, 80)}: {suggest_expected(id, known)}")
    try:
        valid = until is None or date.fromisoformat(until).isoformat() == until
    except ValueError:
        valid = False
    if not valid:
        raise IgnoreError(f"--ignore {id}: until {until}: expected a date such as 2027-01-31")
    return Ignore(id, reason, until)


def sort_out(
    found: Sequence[T], rules: Sequence[Ignore], name: Callable[[T], tuple[Sequence[str], str]], today: date
) -> tuple[tuple[T, ...], tuple[Ignored, ...]]:
    """Return the findings that count, and those that a rule leaves out. `name` gives ids and title."""
    valid = [rule for rule in rules if not rule.has_ended(today)]
    kept, ignored = [], []
    for each in found:
        ids, title = name(each)
        rule = next((rule for rule in valid if rule.match(ids, title)), None)
        if rule is None:
            kept.append(each)
        else:
            ignored.append(Ignored(rule.id, title, rule.reason, rule.until))
    return tuple(kept), tuple(ignored)


def list_idle(rules: Sequence[Ignore], ignored: Sequence[Ignored], today: date) -> list[str]:
    """Return a line for each rule that has ended or that leaves nothing out."""
    used = {each.id for each in ignored}
    lines = []
    for rule in rules:
        if rule.has_ended(today):
            lines.append(f"--ignore {rule.id}: ended with {rule.until}, so that its findings count again")
        elif rule.id not in used:
            lines.append(f"--ignore {rule.id}: nothing that was found has this id")
    return lines


def fails(severity: str, fail_on: str) -> bool:
    """Return True if a finding of this severity gives exit code 1."""
    return fail_on != "never" and SEVERITIES.index(severity) <= SEVERITIES.index(fail_on)
