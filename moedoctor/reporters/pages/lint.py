"""The page of `moedoctor lint`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import moedoctor
from moedoctor.diagnose.checkpoint.findings import CHECKS, Lint, LintFinding
from moedoctor.reporters.page import Block, Bullets, Heading, Item, Paragraph, Span, Step, Table
from moedoctor.reporters.text import count_of
from moedoctor.text import escape


def lint_document(result: Lint, folder: str, code: int, repairable: Collection[str]) -> dict[str, Any]:
    """Return the JSON document; the page is made of it.

    `folder` names the checkpoint; `repairable` are the checks with a repair.
    """
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


def lint_page(document: Mapping[str, Any]) -> list[Block]:
    """Return a line for each kind of damage, the surest first, then their places, and what to do next."""
    findings = document["findings"]
    page: list[Block] = [Heading(f"{escape(document['checkpoint'])}: {escape(document['quantization'])}", 1)]
    if not damage(document):
        page.append(Paragraph("nothing wrong was found"))
    page += [_line(finding) for finding in findings]
    for finding in findings:
        page += _finding(finding)
    if not_read := document["summary"]["patterns_not_read"]:
        patterns = (escape(pattern[:120]) for pattern in not_read)
        page.append(
            Bullets([f"not read: the pattern {name}; excluded modules were not checked" for name in patterns])
        )
    page.append(Paragraph(summary_line(document)))
    steps: dict[str, list[str]] = {}
    for finding in findings:
        steps.setdefault(finding["next_step"], []).append(finding["check"])
    for step, checks in steps.items():
        page.append(Step(f"{step} ({', '.join(checks)})"))
    return page


def damage(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the findings without mere remarks."""
    return [finding for finding in document["findings"] if not finding["evidence"]["remark"]]


def _next_step(finding: LintFinding, repairable: Collection[str]) -> str:
    """Return what to do about a finding. The repair is named only if this checkpoint has what it needs."""
    step = CHECKS[finding.check].next_step
    return (
        f"`--fix DIR` writes a repaired copy to a new folder; or {step}"
        if finding.check in repairable
        else step
    )


def _line(finding: Mapping[str, Any]) -> Item:
    evidence = finding["evidence"]
    known = "" if finding["id"] == finding["check"] else f"{finding['id']} "
    title = f"{known}{evidence['what']}: {count_of(evidence['count'], 'place')}"
    return Item("remark" if evidence["remark"] else "damage", title, [("effect", evidence["effect"])])


def _finding(finding: Mapping[str, Any]) -> list[Block]:
    evidence = finding["evidence"]
    line = "" if finding["line"] is None else f", line {finding['line']}"
    # Names of tensors are the checkpoint's: what a terminal would act on is shown as an escape.
    rows = [[escape(place[key]) for key in ("tensor", "shard", "value")] for place in evidence["places"]]
    blocks: list[Block] = [
        Heading((Span(finding["check"], "note" if evidence["remark"] else "error"), line)),
        Table(("tensor", "file", "value"), rows),
    ]
    if more := evidence["count"] - len(rows):
        blocks.append(Paragraph(f"and {count_of(more, 'more place')}"))
    return blocks


def summary_line(document: Mapping[str, Any]) -> str:
    """Return ``1 kind of damage in 120 tensors of 2 files; 12.5% of the block scales were read``."""
    wrong, summary = len(damage(document)), document["summary"]
    kinds = f"{wrong} {'kind' if wrong == 1 else 'kinds'} of damage"
    if remarks := len(document["findings"]) - wrong:
        kinds += f" and {count_of(remarks, 'remark')}"
    share = summary["block_scales_seen"]
    sampled = "" if share >= 1 else f"; {share:.1%} of the block scales were read"
    files = count_of(summary["shards"], "file")
    return f"{kinds} in {summary['tensors']:,} tensors of {files}{sampled}"
