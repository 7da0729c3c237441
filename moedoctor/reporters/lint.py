"""The page of `moedoctor lint`."""

from __future__ import annotations

from typing import Any

import moedoctor
from moedoctor.diagnose.checkpoint.findings import CHECKS, Lint, LintFinding
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Span, Table
from moedoctor.reporters.text import count_of
from moedoctor.text import escape


def lint_document(result: Lint, folder: str, code: int) -> dict[str, Any]:
    """Return the JSON document; `folder` is the name of the checkpoint."""
    return {
        "moedoctor": moedoctor.__version__,
        "command": "lint",
        "checkpoint": folder,
        "quantization": result.scheme,
        "findings": [finding.record() for finding in result.findings],
        "summary": {
            "shards": result.shards,
            "tensors": result.tensors,
            "block_scales_seen": round(result.block_scales_seen, 6),
            "patterns_not_read": list(result.not_read),
            "exit_code": code,
        },
    }


def lint_page(result: Lint, folder: str) -> list[Block]:
    """Return a heading and a table of places for each kind of damage, and for each remark."""
    page: list[Block] = [Heading(f"{escape(folder)}: {escape(result.scheme)}", 1)]
    if not result.damage:
        page.append(Paragraph("nothing wrong was found"))
    for finding in result.findings:
        page += _finding(finding)
    if result.not_read:
        patterns = (escape(pattern[:120]) for pattern in result.not_read)
        page.append(
            Bullets([f"not read: the pattern {name}; excluded modules were not checked" for name in patterns])
        )
    return [*page, Paragraph(summary_line(result))]


def _finding(finding: LintFinding) -> list[Block]:
    check = CHECKS[finding.check]
    word = finding.id if check.id else "remark" if check.remark else ""
    places = count_of(finding.count, "place")
    line = "" if finding.line is None else f", line {finding.line}"
    # Names of tensors are the checkpoint's: what a terminal would act on is shown as an escape.
    rows = [[escape(place.tensor), escape(place.shard), escape(place.value)] for place in finding.places]
    return [
        Heading((Span(word, "note" if check.remark else "error"), f"{' ' if word else ''}{finding.check}")),
        Paragraph(f"{check.what}: {places}{line}, confidence {check.confidence:.2f}"),
        Table(("tensor", "file", "value"), rows),
        Paragraph((Span("next: ", "bold"), check.next_step)),
    ]


def summary_line(result: Lint) -> str:
    """Return ``1 kind of damage in 120 tensors of 2 files; 12.5% of the block scales were read``."""
    kinds = f"{len(result.damage)} {'kind' if len(result.damage) == 1 else 'kinds'} of damage"
    if remarks := len(result.findings) - len(result.damage):
        kinds += f" and {count_of(remarks, 'remark')}"
    share = result.block_scales_seen
    sampled = "" if share >= 1 else f"; {share:.1%} of the block scales were read"
    return f"{kinds} in {result.tensors:,} tensors of {result.shards} files{sampled}"
