"""The page of `moedoctor triage`."""

from __future__ import annotations

from moedoctor.diagnose.triage.triage import Triage
from moedoctor.entries import entries
from moedoctor.reporters.page import Block, Item, Paragraph, Span
from moedoctor.reporters.text import count_of


def triage_page(result: Triage) -> list[Block]:
    """Return an item a failure, each with its line and the next step."""
    page: list[Block] = [
        Item(
            finding.id,
            f"{entries()[finding.id].name}, confidence {finding.confidence:.2f}, line {finding.line}",
            [("", Span(finding.excerpt, "code")), ("next", finding.next_step)],
        )
        for finding in result.findings
    ]
    if not result.findings:
        page.append(
            Paragraph(
                "No known failure in this text. The server may still be broken in another way: "
                "`moedoctor list` shows the failures that are known."
            )
        )
    releases = f"The text names {result.releases}." if result.releases else "The text names no release."
    return [*page, Paragraph(f"{releases} {count_line(result)}.")]


def count_line(result: Triage) -> str:
    """Return ``2 known failures found``."""
    return f"{count_of(len(result.findings), 'known failure')} found"
