"""The page of `moedoctor lint`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import ClassVar

from moedoctor.diagnose.checkpoint.findings import CHECKS, Lint, LintFinding, Place
from moedoctor.diagnose.ignores import Ignore, Ignored, list_idle, sort_out
from moedoctor.reporters.page import Block, Bullets, Heading, Item, Paragraph, Span, Step, Table, list_section
from moedoctor.reporters.pages.check import list_ignored
from moedoctor.reporters.text import count_of
from moedoctor.text import escape


@dataclass(frozen=True)
class Evidence:
    """A problem, what it does, and where it is."""

    what: str
    effect: str
    remark: bool
    """True if healthy checkpoints have it, too."""
    count: int
    places: tuple[Place, ...]
    """The first ones."""


@dataclass(frozen=True)
class Row:
    """One kind of damage."""

    id: str
    check: str
    line: int | None
    evidence: Evidence
    confidence: float
    next_step: str
    level: str = field(default="error", metadata={"sparse": True})
    """``error``, ``warning`` or ``note``. Reports of older releases have no level."""


@dataclass(frozen=True)
class LintSummary:
    """The amount that was read."""

    shards: int
    tensors: int
    block_scales_seen: float
    """The share of the block scales that was read, 0 to 1."""
    patterns_not_read: tuple[str, ...]


@dataclass(frozen=True)
class LintDocument:
    """The damage of a checkpoint."""

    command: ClassVar[str] = "lint"
    checkpoint: str
    quantization: str
    findings: tuple[Row, ...]
    summary: LintSummary
    loaded_by: str = field(default="", metadata={"sparse": True})
    """The answer of the vLLM release that was asked to load the checkpoint; empty if none was."""
    ignored: tuple[Ignored, ...] = field(default=(), metadata={"sparse": True})
    """Findings that `--ignore` leaves out."""
    not_run: Mapping[str, str] = field(default_factory=dict, metadata={"sparse": True})
    """Check -> why it was not made."""
    not_looked_at: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    """The parts that this answer does not cover, each with the reason."""

    @classmethod
    def from_result(
        cls,
        result: Lint,
        folder: str,
        repairable: Collection[str],
        copy: str | None = None,
        *,
        rules: Sequence[Ignore] = (),
        today: date = date.max,
    ) -> LintDocument:
        """Return the document of a checkpoint in `folder`.

        `repairable` are the checks with a repair; with a repaired `copy`, those that the copy passes. `rules`
        leave findings out until their last day.
        """
        share = round(result.block_scales_seen, 6)
        summary = LintSummary(result.shards, result.tensors, share, tuple(result.not_read))
        found = [_make_row(each, repairable, copy) for each in result.findings]
        rows, ignored = sort_out(found, rules, lambda row: ((row.id, row.check), row.evidence.what), today)
        notes = (*_list_not_looked_at(result, folder), *list_idle(rules, ignored, today))
        return cls(folder, result.scheme, rows, summary, result.loaded_by, ignored, result.not_run, notes)

    @property
    def damage(self) -> tuple[Row, ...]:
        """The findings without mere remarks."""
        return tuple(row for row in self.findings if not row.evidence.remark)


def _list_not_looked_at(result: Lint, folder: str) -> Iterator[str]:
    yield "values of the weights: only headers, JSON files and scales were read"
    ask = f"moedoctor preflight --wheel FILE -- vllm serve {folder}"
    if result.loaded_by:
        yield f"other sizes, GPUs and releases: moedoctor preflight --sizes 8 -- vllm serve {folder}"
    elif result.names_of:
        yield f"shapes were not compared with what a vLLM release reads: {result.not_asked}; {ask}"
        yield f"names were compared with a table of vLLM {', '.join(result.names_of)}; others may differ"
    else:
        yield f"names and shapes were not compared with what a vLLM release reads: {result.not_asked}; {ask}"


def _make_row(finding: LintFinding, repairable: Collection[str], copy: str | None) -> Row:
    check = CHECKS[finding.check]
    evidence = Evidence(check.what, check.effect, check.remark, finding.count, tuple(finding.places))
    step = check.next_step
    if finding.check in repairable:  # this checkpoint has what the repair needs
        step = (
            f"use the repaired copy in {copy}"
            if copy
            else f"`--fix DIR` writes a repaired copy to a new folder; or {step}"
        )
    return Row(finding.id, finding.check, finding.line, evidence, check.confidence, step, check.level)


def make_lint_page(document: LintDocument) -> list[Block]:
    """Return a line for each kind of damage, the surest first, then their places, and what to do next."""
    findings = document.findings
    page: list[Block] = [Heading(f"{escape(document.checkpoint)}: {escape(document.quantization)}", 1)]
    if not document.damage:
        but = ", except for what is ignored" if document.ignored else ""
        page.append(Paragraph(f"nothing wrong was found in what was looked at{but}"))
    if document.loaded_by:
        page.append(Paragraph(escape(document.loaded_by)))
    page += [_make_item(finding) for finding in findings]
    for finding in findings:
        page += _show_finding(finding)
    if not_read := document.summary.patterns_not_read:
        patterns = (escape(pattern[:120]) for pattern in not_read)
        page.append(
            Bullets([f"not read: the pattern {name}; excluded modules were not checked" for name in patterns])
        )
    page += list_ignored(document.ignored)
    page += list_section("Not looked at", [*map(escape, document.not_looked_at)])
    page.append(Paragraph(summarize(document)))
    steps: dict[str, list[str]] = {}
    for finding in findings:
        steps.setdefault(finding.next_step, []).append(finding.check)
    for step, checks in steps.items():
        page.append(Step(f"{step} ({', '.join(checks)})"))
    return page


def _make_item(finding: Row) -> Item:
    evidence = finding.evidence
    known = "" if finding.id == finding.check else f"{finding.id} "
    title = f"{known}{evidence.what}: {count_of(evidence.count, 'place')}"
    word = "remark" if evidence.remark else "warning" if finding.level == "warning" else "damage"
    return Item(word, title, [("effect", evidence.effect)])


def _show_finding(finding: Row) -> list[Block]:
    evidence = finding.evidence
    line = "" if finding.line is None else f", line {finding.line}"
    # Names of tensors are the checkpoint's: what a terminal would act on is shown as an escape.
    rows = [[*map(escape, (place.tensor, place.shard, place.value))] for place in evidence.places]
    blocks: list[Block] = [
        Heading((Span(finding.check, "note" if evidence.remark else "error"), line)),
        Table(("tensor", "file", "value"), rows),
    ]
    if more := evidence.count - len(rows):
        blocks.append(Paragraph(f"and {count_of(more, 'more place')}"))
    return blocks


def summarize(document: LintDocument) -> str:
    """Return ``1 kind of damage in 120 tensors of 2 files; 12.5% of the block scales were read``."""
    wrong, summary = len(document.damage), document.summary
    kinds = f"{wrong} {'kind' if wrong == 1 else 'kinds'} of damage"
    if remarks := len(document.findings) - wrong:
        kinds += f" and {count_of(remarks, 'remark')}"
    if document.ignored:
        kinds += f", {len(document.ignored)} ignored,"
    share = summary.block_scales_seen
    sampled = "" if share >= 1 else f"; {share:.1%} of the block scales were read"
    files = count_of(summary.shards, "file")
    return f"{kinds} in {summary.tensors:,} tensors of {files}{sampled}"
