"""What a known failure looks like in text: clues, and the signatures that combine them.

A clue is a phrase and proves nothing alone. A signature names the clue that shows the failure, the clues that
must be near it or anywhere in the text, what rules it out, and the releases that it needs. `families/` has
them. Their phrases come from the error messages in the sources of vLLM and FlashInfer and from how people
describe a failure; the comment above a signature names the thread or the fact.
"""

from __future__ import annotations

from dataclasses import dataclass

WITHIN = 12
"""Lines that a clue may be away from the one it supports: a few paragraphs, or the top of a traceback."""


@dataclass(frozen=True)
class Clue:
    """A phrase to look for."""

    name: str
    needles: str
    """Lower-case phrases between ``|``. Every match of the pattern holds at least one, and each starts
    where a word starts: the pattern is tried only on text with a needle."""
    pattern: str
    """A regular expression; its repetitions are bounded, so that a search takes linear time."""
    cased: bool = False
    """Whether the pattern is tried on the text as written, not on the text in lower case."""


@dataclass(frozen=True)
class Signature:
    """One way in which a text shows a known failure. Names in it are names of clues."""

    id: str
    shows: tuple[str, ...]
    """Any of these clues; its line is reported."""
    confidence: float
    """How often a text with this signature is about the failure: an estimate, above 0.5."""
    near: tuple[tuple[str, ...], ...] = ()
    """One clue of each group must be within `within` lines of the line shown."""
    within: int = WITHIN
    anywhere: tuple[tuple[str, ...], ...] = ()
    """One clue of each group must be somewhere in the text."""
    unless: tuple[str, ...] = ()
    """None of these anywhere."""
    unless_near: tuple[str, ...] = ()
    """None of these within `within` lines of the line shown."""
    since: str | None = None
    """The first vLLM release that has the failure; a text about older ones only is about something else."""
    fixed: str | None = None
    """The first vLLM release without the failure."""
    needs_version: bool = False
    """Whether the text must name a vLLM release."""
    flashinfer_fixed: str | None = None
    """The first FlashInfer release without the failure."""
    silent: bool = False
    """Whether the failure is wrong numbers without a crash: a text about a crash only is not about it."""


def either(first: str, second: str, gap: int) -> str:
    """Return a pattern for two patterns in either order, at most `gap` characters apart."""
    return f"(?:{first}).{{0,{gap}}}?(?:{second})|(?:{second}).{{0,{gap}}}?(?:{first})"
