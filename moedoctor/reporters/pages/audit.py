"""The page of `moedoctor audit`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moedoctor.diagnose.cuda.audit import FATES, NO_TOOL, AuditItem
from moedoctor.fixes.arch import FLASHINFER_LIST, ArchDecision, resolve_arch
from moedoctor.fixes.arch.targets import Capability, Target, parse_capability, show
from moedoctor.reporters import page as blocks
from moedoctor.text import join_some

_NONE = "–"
_CUDA = (13, 0)
"""The toolkit that advice names."""
_MOST_FILES = 30
_MOST_TARGETS = 12
_ALWAYS = ("loads", "compiled", "missing")
"""Rows that the summary counts even if there is none."""


@dataclass(frozen=True)
class AuditFinding:
    """A file that the GPU cannot use."""

    id: str
    line: None
    evidence: str
    confidence: float
    next_step: str


@dataclass(frozen=True)
class AuditSummary:
    """Files by what the GPU does with them."""

    loads: int
    compiled: int
    missing: int
    not_needed: int
    for_some: int
    lacking: int
    """Compiled without instructions that they need."""
    skipped: int


@dataclass(frozen=True)
class AuditDocument:
    """The device code in files, and what a GPU does with it."""

    command: ClassVar[str] = "audit"
    capability: str | None
    tool: str | None
    items: tuple[AuditItem, ...]
    findings: tuple[AuditFinding, ...]

    @classmethod
    def from_items(
        cls, items: tuple[AuditItem, ...], gpu: Capability | None, tool: str | None
    ) -> AuditDocument:
        findings = tuple(
            AuditFinding("MD004", None, f"{item.path}: {describe_verdict(item)}", 1.0, step)
            for item in items
            for step in _suggest_steps([item], gpu)
        )
        return cls(show(gpu) if gpu else None, tool, items, findings)

    @property
    def summary(self) -> AuditSummary:
        verdicts = Counter(item.verdict for item in self.items)
        lacking = sum(bool(item.lacks) for item in self.items)
        skipped = sum(bool(item.skipped) for item in self.items)
        return AuditSummary(**{fate: verdicts[fate] for fate in FATES}, lacking=lacking, skipped=skipped)

    @property
    def wrong(self) -> list[AuditItem]:
        """The files that the GPU cannot use."""
        return [item for item in self.items if item.is_wrong]


def audit_page(document: AuditDocument, *, brief: bool = False) -> list[blocks.Block]:
    """Return a table of files, the counts, and what to do about each kind of finding.

    A `brief` page has some 30 files, those that the GPU cannot use first, and some targets of each.
    """
    gpu = parse_capability(document.capability) if document.capability else None
    where = f"on a GPU of {show(gpu)}" if gpu else "no GPU named: give one with --sm, such as 12.0"
    tool = document.tool or f"no cuobjdump: {NO_TOOL}"
    page: list[blocks.Block] = [blocks.Heading(f"device code, {where} ({tool})", 1)]
    rows: list[tuple[blocks.Text, ...]] = []
    items = sorted(document.items, key=lambda item: not item.is_wrong) if brief else document.items
    for item in items[: _MOST_FILES if brief else None]:
        name = f"{item.path} ({item.module})" if item.module else item.path
        word = blocks.Span(describe_verdict(item), "missing" if item.is_wrong else "")
        rows.append((name, *_list_kernels(item, _MOST_TARGETS if brief else len(item.images)), word))
    if rows:
        page.append(blocks.Table(("file", "runs there" if gpu else "targets", "does not", "verdict"), rows))
    else:
        page.append(blocks.Paragraph("no shared object, cubin, wheel or build file found"))
    if len(rows) < len(items):
        wrong = (
            f"{len(document.wrong)} are missing or lack instructions" if document.wrong else "none is wrong"
        )
        left = f"… {len(items) - len(rows)} more files: of the {len(items)} files, {wrong}"
        page.append(blocks.Paragraph(f"{left}; --format json or markdown --full lists all"))
    page.append(blocks.Paragraph(summarize(document)))
    return [*page, *map(blocks.Step, _suggest_steps(document.items, gpu))]


def summarize(document: AuditDocument) -> str:
    """Return how many files load, are compiled, have nothing, lack something or were skipped."""
    counts = document.summary
    fates = ((fate, getattr(counts, fate)) for fate in FATES)
    words = [f"{count} {FATES[fate]}" for fate, count in fates if count or fate in _ALWAYS]
    return " · ".join(
        [*words, f"{counts.lacking} compiled without what they need", f"{counts.skipped} skipped"]
    )


def describe_verdict(item: AuditItem) -> str:
    """Return what the GPU does with a file, in words."""
    if item.skipped:
        return f"skipped: {item.skipped}"
    if item.verdict is None:
        return item.note or "not judged"
    words = FATES[item.verdict]
    if item.lacks:
        words += f", but compiled without {', '.join(item.lacks)}"
    return f"{words}; {item.note}" if item.note else words


def _list_kernels(item: AuditItem, most: int) -> tuple[str, str]:
    """Return (what runs on the GPU, what does not), such as ``SASS 120f ×19, PTX 80``.

    Without a GPU, everything is in the first.
    """
    runs: list[str] = []
    rest: list[str] = []
    for image in sorted(item.images, key=lambda each: (each.kind != "sass", Target.parse(each.target))):
        count = f" ×{image.count}" if image.count > 1 else ""
        (rest if image.verdict == "missing" else runs).append(f"{image.kind.upper()} {image.target}{count}")
    return join_some(runs, most) or _NONE, join_some(rest, most) or _NONE


def _suggest_steps(items: Sequence[AuditItem], gpu: Capability | None) -> Iterator[str]:
    """Give what to do about each kind of finding, once."""
    if gpu is None:
        return
    missing = [item for item in items if item.verdict == "missing"]
    for remedy in dict.fromkeys(_suggest_remedy(item, gpu) for item in missing):
        yield f"MD004: what is missing fails with `no kernel image is available`; {remedy}"
    if any(item.lacks for item in items):
        target = _find_target(gpu)
        entry = f"{FLASHINFER_LIST}{f'={target.list_entry}' if target else ' with the suffix'}"
        yield (
            "MD004: kernels built for a target without suffix end in a compiler error or in output that is "
            f"never written; remove the module's folder and set {entry}"
        )


def _suggest_remedy(item: AuditItem, gpu: Capability) -> str:
    """Return how to get kernels for the GPU into what was audited: a cache, vLLM, or another file."""
    if item.module:
        return f"remove the module's folder and start with {FLASHINFER_LIST} unset, so that it is built again"
    package = item.path.partition(".whl!")[0].rpartition("/")[2].lower()
    folders = item.path.partition("!")[2] or item.path
    if "vllm" in folders.split("/")[:-1] or package.startswith("vllm-"):
        return (
            f"install a vLLM wheel whose kernels include {show(gpu)}, or build vLLM from source with "
            f"TORCH_CUDA_ARCH_LIST={show(gpu)}"
        )
    if package.startswith("flashinfer"):
        return f"install the FlashInfer package for a CUDA release that knows {show(gpu)}"
    if item.source == "cubins":
        return f"get the cubins for {show(gpu)} from where these come from"
    if (target := _find_target(gpu)) is None:
        return f"build it again for compute capability {show(gpu)}"
    return f"build it again with CUDA {show(_CUDA)} or later and {target.gencode}"


def _find_target(gpu: Capability) -> ArchDecision | None:
    """Return what MoE kernels are compiled for, with the suffix they need; None for an unknown GPU."""
    with contextlib.suppress(ValueError):
        return resolve_arch(gpu, _CUDA)
    return None
