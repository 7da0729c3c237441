"""What a known failure looks like in text: clues, and the signatures that combine them.

A clue is a phrase and proves nothing alone. A signature names the clue that shows the failure, the clues that
must stand near it or anywhere in the text, what rules it out, and the releases that it needs. The phrases
come from the error messages in the sources of vLLM and FlashInfer and from how people describe a failure; the
comment above a signature names the thread or the fact. The families are in `signatures_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

WITHIN = 12
"""Lines that a clue may be away from the one it supports: a few paragraphs, or the top of a traceback."""


@dataclass(frozen=True)
class Clue:
    """A phrase to look for."""

    name: str
    needles: tuple[str, ...]
    """Lower-case phrases of which every match holds at least one, each starting where a word starts: the
    pattern is tried only where one is found."""
    pattern: str
    """A regular expression; repetitions in it are bounded, so that a search takes linear time."""
    cased: bool = False
    """Whether the pattern is about the text as written; otherwise it is about the text in lower case."""


@dataclass(frozen=True)
class Signature:
    """One way in which a text shows a known failure. Names in it are names of clues."""

    id: str
    shows: tuple[str, ...]
    """Any of these; its line is the one to report."""
    confidence: float
    """How often a text with this signature is about the failure: an estimate, above 0.5."""
    near: tuple[tuple[str, ...], ...] = ()
    """Of each group, one within `within` lines of the line shown."""
    within: int = WITHIN
    anywhere: tuple[tuple[str, ...], ...] = ()
    """Of each group, one somewhere in the text."""
    unless: tuple[str, ...] = ()
    """None of these anywhere."""
    unless_near: tuple[str, ...] = ()
    """None of these within `within` lines of the line shown."""
    since: str | None = None
    """The first vLLM release that can fail so; a text about older ones only is about something else."""
    fixed: str | None = None
    """The first vLLM release that cannot."""
    needs_version: bool = False
    """Whether a text that names no vLLM release is not enough."""
    flashinfer_fixed: str | None = None
    """The first FlashInfer release that cannot."""
    silent: bool = False
    """Wrong numbers and no crash: in a text about a crash only, it is not what the text is about."""


def either(first: str, second: str, gap: int) -> str:
    """A pattern for two patterns in either order, at most `gap` characters apart."""
    return f"(?:{first}).{{0,{gap}}}?(?:{second})|(?:{second}).{{0,{gap}}}?(?:{first})"


@cache
def clues() -> Mapping[str, Clue]:
    """Clue name -> clue, of all families."""
    from moedoctor.diagnose.triage.clues_common import CLUES

    found: dict[str, Clue] = {}
    for family in (CLUES, *(its_clues for its_clues, _ in _families())):
        for clue in family:
            if clue.name in found:
                raise ValueError(f"the clue {clue.name} is defined twice")
            found[clue.name] = clue
    return found


@cache
def signatures() -> tuple[Signature, ...]:
    """All signatures, in the order of the ids."""
    return tuple(sorted((one for _, family in _families() for one in family), key=lambda one: one.id))


def _families() -> tuple[tuple[Sequence[Clue], Sequence[Signature]], ...]:
    # Not at the top: each of them needs this module.
    from moedoctor.diagnose.triage import (
        signatures_backend,
        signatures_cache,
        signatures_offload,
        signatures_offload_effect,
        signatures_routing,
        signatures_scales,
    )

    return tuple(
        (family.CLUES, family.SIGNATURES)
        for family in (
            signatures_routing,
            signatures_offload,
            signatures_offload_effect,
            signatures_cache,
            signatures_scales,
            signatures_backend,
        )
    )
