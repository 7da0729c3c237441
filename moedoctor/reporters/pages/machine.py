"""The machine that a report is of, and how the report was made: what every page has behind a click."""

from __future__ import annotations

from collections.abc import Mapping

from moedoctor.reporters.page import Block, Fold, Paragraph, Preformatted, Table
from moedoctor.reporters.text import list_figures


def make_environment_table(environment: Mapping[str, object]) -> list[Block]:
    """Return the facts about the machine, all of them, behind a click."""
    return [Fold("Environment", [Table(("fact", "value"), list(list_figures(environment)))])]


def make_origin_table(origin: Mapping[str, object] | None) -> list[Block]:
    """Return when and how a report was made, behind a click; nothing for a report of an older release."""
    if not origin:
        return []
    facts = {name: value for name, value in origin.items() if name != "again"}
    blocks: list[Block] = [Table(("fact", "value"), list(list_figures(facts)))]
    again = origin.get("again")
    if isinstance(again, (list, tuple)) and again:
        blocks += [Paragraph("To make it again:"), Preformatted("\n".join(map(str, again)))]
    return [Fold("How this report was made", blocks)]
