"""The page of `moedoctor compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.comparison import Comparison
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Step
from moedoctor.reporters.text import count_of

GROUPS = ("regressions", "improvements", "notes")
_LISTED = 5


def compare_document(changed: Comparison, baseline: str, current: str) -> dict[str, Any]:
    """Return the JSON document of two reports by their names; the page is made of it."""
    return {
        "command": "compare",
        "baseline": baseline,
        "current": current,
        **{name: [str(change) for change in getattr(changed, name)] for name in GROUPS},
        "next_steps": _next_steps(changed, current),
        "summary": {"exit_code": 1 if changed.regressions else 0},
    }


def compare_page(document: Mapping[str, Any]) -> list[Block]:
    """Return what got worse, what got better, what else changed, and what to do."""
    page: list[Block] = [Heading(f"{document['current']} compared with {document['baseline']}", 1)]
    for name in GROUPS:
        if document[name]:
            page += [Heading(name), Bullets(document[name])]
    page.append(Paragraph(summary_line(document)))
    return [*page, *map(Step, document["next_steps"])]


def summary_line(document: Mapping[str, Any]) -> str:
    """Return ``1 regression, 0 improvements, 2 notes``."""
    return ", ".join(count_of(len(document[name]), name.removesuffix("s")) for name in GROUPS)


def _next_steps(changed: Comparison, current: str) -> Sequence[str]:
    ids = list(dict.fromkeys(change.scenario for change in changed.regressions if change.scenario))
    if not changed.regressions:
        if changed.improvements or changed.notes:
            return [f"nothing got worse; keep {current} as the baseline from now on"]
        return ["nothing changed; keep the baseline"]
    again = f"`moedoctor run {' '.join(ids[:_LISTED])}`" if ids else "the same command"
    steps = [f"run {again} once more on this machine; a figure that is worse only once may be noise"]
    return [*steps, *(f"`moedoctor explain {ids[0]}` says what it is" for _ in ids[:1])]
