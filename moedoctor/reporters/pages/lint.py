"""The page of `moedoctor lint`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import moedoctor
from moedoctor.diagnose.checkpoint.findings import CHECKS, Lint, LintFinding
from moedoctor.reporters.page import Block, Bullets, Heading, Item, Paragraph, Span, Step, Table
from moedoctor.reporters.text import count_of
from moedoctor.text import escape


def lint_document(result: Lint, folder: str, code: int, repairable: Collection[str]) -> dict[str, Any]:
    """Return the JSON document. `folder` names the checkpoint; `repairable` are the checks with a repair."""
    findings = [
        {**finding.record(), "next_step": _next_step(finding, repairable)} for finding in result.findings
    ]
    return {
        "moedoctor": moedoctor.__version__,
        "command": "lint",
        "checkpoint": folder,
        "quantization": result.scheme,
        "findings": findings,
        "summary": {
            "shards": result.shards,
            "tensors": result.tensors,
            "block_scales_seen": round(result.block_scales_seen, 6),
            "patterns_not_read": list(result.not_read),
            "exit_code": code,
        },
    }


def lint_page(result: Lint, folder: str, repairable: Collection[str]) -> list[Block]:
    """Return a line for each kind of damage, the surest first, then their places, and what to do next."""
    page: list[Block] = [Heading(f"{escape(folder)}: {escape(result.scheme)}", 1)]
    if not result.damage:
        page.append(Paragraph("nothing wrong was found"))
    page += [_line(finding) for finding in result.findings]
    for finding in result.findings:
        page += _finding(finding)
    if result.not_read:
        patterns = (escape(pattern[:120]) for pattern in result.not_read)
        page.append(
            Bullets([f"not read: the pattern {name}; excluded modules were not checked" for name in patterns])
        )
    page.append(Paragraph(summary_line(result)))
    steps: dict[str, list[str]] = {}
    for finding in result.findings:
        steps.setdefault(_next_step(finding, repairable), []).append(finding.check)
    for step, checks in steps.items():
        page.append(Step(f"{step} ({', '.join(checks)})"))
    return page


def _next_step(finding: LintFinding, repairable: Collection[str]) -> str:
    """Return what to do about a finding. The repair is named only if this checkpoint has what it needs."""
    step = CHECKS[finding.check].next_step
    return (
        f"`--fix DIR` writes a repaired copy to a new folder; or {step}"
        if finding.check in repairable
        else step
    )


def _line(finding: LintFinding) -> Item:
    check = CHECKS[finding.check]
    name = f"{check.id} {check.what}" if check.id else check.what
    style = "remark" if check.remark else "damage"
    return Item(style, f"{name}: {count_of(finding.count, 'place')}", [("effect", check.effect)])


def _finding(finding: LintFinding) -> list[Block]:
    check = CHECKS[finding.check]
    line = "" if finding.line is None else f", line {finding.line}"
    # Names of tensors are the checkpoint's: what a terminal would act on is shown as an escape.
    rows = [[escape(place.tensor), escape(place.shard), escape(place.value)] for place in finding.places]
    blocks: list[Block] = [
        Heading((Span(finding.check, "note" if check.remark else "error"), line)),
        Table(("tensor", "file", "value"), rows),
    ]
    if more := finding.count - len(finding.places):
        blocks.append(Paragraph(f"and {count_of(more, 'more place')}"))
    return blocks


def summary_line(result: Lint) -> str:
    """Return ``1 kind of damage in 120 tensors of 2 files; 12.5% of the block scales were read``."""
    kinds = f"{len(result.damage)} {'kind' if len(result.damage) == 1 else 'kinds'} of damage"
    if remarks := len(result.findings) - len(result.damage):
        kinds += f" and {count_of(remarks, 'remark')}"
    share = result.block_scales_seen
    sampled = "" if share >= 1 else f"; {share:.1%} of the block scales were read"
    return f"{kinds} in {result.tensors:,} tensors of {result.shards} files{sampled}"
