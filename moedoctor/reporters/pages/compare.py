"""The page of `moedoctor compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moedoctor.comparison import Comparison
from moedoctor.reporters.page import Block, Heading, Paragraph, Step, list_section
from moedoctor.reporters.text import count_of

GROUPS = ("regressions", "improvements", "notes")
_LISTED = 5


@dataclass(frozen=True)
class CompareDocument:
    """The changes between two reports, each a sentence."""

    command: ClassVar[str] = "compare"
    summary: ClassVar[Mapping[str, Any]] = {}
    baseline: str
    """The name of the report that was compared with."""
    current: str
    regressions: tuple[str, ...]
    improvements: tuple[str, ...]
    notes: tuple[str, ...]
    next_steps: tuple[str, ...]

    @classmethod
    def from_changes(cls, changed: Comparison, baseline: str, current: str) -> CompareDocument:
        """Return the document of two reports by their names."""
        changes: dict[str, Any] = {name: tuple(map(str, getattr(changed, name))) for name in GROUPS}
        return cls(baseline, current, **changes, next_steps=tuple(_suggest_steps(changed, current)))


def make_compare_page(document: CompareDocument) -> list[Block]:
    """Return what got worse, what got better, what else changed, and what to do."""
    page: list[Block] = [Heading(f"{document.current} compared with {document.baseline}", 1)]
    for name in GROUPS:
        page += list_section(name, getattr(document, name))
    page.append(Paragraph(summarize(document)))
    return [*page, *map(Step, document.next_steps)]


def summarize(document: CompareDocument) -> str:
    """Return ``1 regression, 0 improvements, 2 notes``."""
    return ", ".join(count_of(len(getattr(document, name)), name.removesuffix("s")) for name in GROUPS)


def _suggest_steps(changed: Comparison, current: str) -> Sequence[str]:
    ids = list(dict.fromkeys(change.scenario for change in changed.regressions if change.scenario))
    if not changed.regressions:
        if changed.improvements or changed.notes:
            return [f"nothing got worse; keep {current} as the baseline from now on"]
        return ["nothing changed; keep the baseline"]
    again = f"`moedoctor run {' '.join(ids[:_LISTED])}`" if ids else "the same command"
    steps = [f"run {again} once more on this machine; a figure that is worse only once may be noise"]
    return [*steps, *(f"`moedoctor explain {ids[0]}` says what it is" for _ in ids[:1])]
