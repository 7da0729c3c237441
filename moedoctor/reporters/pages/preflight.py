"""The page of `moedoctor preflight`: the answer, what to do, then what was asked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from moedoctor.diagnose.preflight.records import RULES, PreflightDocument, StartAnswer, Verdict
from moedoctor.reporters.page import (
    Block,
    Bullets,
    Fold,
    Heading,
    Item,
    Paragraph,
    Span,
    Step,
    Table,
    list_section,
    show_table,
)
from moedoctor.reporters.text import count_of

_ANSWERS = {
    Verdict.STARTS: "starts: yes",
    Verdict.REFUSED: "starts: no",
    Verdict.WRONG: "starts, and answers wrongly",
    Verdict.CANNOT_SAY: "cannot say",
}
_GIB = 2**30
_USUAL = ("None", "False", "1", "auto")
"""Values of a configuration that need no row."""


def build_preflight_page(document: PreflightDocument) -> list[Block]:
    """Return the answer to the command line as it was given, its comparison with others, and the details."""
    first, gpu = document.answers[0], document.gpu
    gpus = (
        f"{count_of(gpu['count'], 'GPU')}: compute capability {gpu['capability']}, {gpu['memory_gib']:g} GiB"
    )
    page: list[Block] = [
        Heading(f"moedoctor preflight: vLLM {first.release} on {gpus}", 1),
        Paragraph(Span(f"{_name_answer(first)}: {first.reason}", "bold")),
    ]
    if first.next_step:
        page.append(Step(first.next_step))
    page.append(Paragraph(Span(f"vllm serve {shlex.join(first.words)}", "code")))
    if document.notes:
        page.append(Bullets(document.notes))
    page += _list_findings(first)
    page += _compare(document)
    page += _describe(first)
    page += [Heading("Not seen by this command"), Bullets(document.not_seen)]
    return [*page, *list_section("Notes", first.notes)]


def summarize(document: PreflightDocument) -> str:
    """Return ``starts: no · vLLM 0.33.0 · 2 findings``."""
    first = document.answers[0]
    others = [answer.verdict is Verdict.STARTS for answer in document.answers[1:]]
    more = f" · {sum(others)} of {len(others)} others start" if others else ""
    return f"{_name_answer(first)} · vLLM {first.release} · {count_of(len(first.findings), 'finding')}{more}"


def _name_answer(answer: StartAnswer) -> str:
    lacks_memory = any(finding.rule == "kv-cache" for finding in answer.findings)
    if lacks_memory and answer.verdict is Verdict.STARTS:
        return "starts: with more memory"
    return _ANSWERS[answer.verdict]


def _list_findings(answer: StartAnswer) -> Iterator[Block]:
    """Give each finding; what the first lines say of it already is not said again."""
    for finding in answer.findings:
        is_answer = finding.message in answer.reason
        known = f"`moedoctor explain {finding.id}`" if finding.id else ""
        step = "" if finding.next_step == answer.next_step else finding.next_step
        labels = ("tensor", "vLLM", "known failure", "next")
        texts = (finding.tensor, finding.source, known, step)
        lines = [line for line in zip(labels, texts, strict=True) if line[1]]
        title = RULES[finding.rule][1] if is_answer else finding.message
        if lines or not is_answer:
            yield Item(finding.level, f"{finding.rule}: {title}", lines)


def _compare(document: PreflightDocument) -> Iterator[Block]:
    """Give the table of the other releases and sizes."""
    if len(document.answers) < 2:
        return
    yield Heading("Other releases and sizes")
    rows = []
    for answer in document.answers:
        weights = f"{max(answer.weight_bytes) / _GIB:.1f}" if answer.weight_bytes else ""
        reason = answer.reason if answer.findings else ""
        rows.append((answer.release, _read_sizes(answer), _name_answer(answer), weights, reason))
    yield Table(("vLLM", "sizes", "answer", "GiB a rank", "why"), list(dict.fromkeys(rows)))


def _read_sizes(answer: StartAnswer) -> str:
    """Return ``TP 2 EP``: a release that stops at its arguments reads no sizes."""
    line = " ".join(answer.words)
    sizes = re.findall(r"(?<!\S)(?:-tp|--tensor[-_]parallel[-_]size)[ =](\d+)", line) or ["1"]
    has_experts = re.search(r"(?<!\S)(?:-ep|--enable[-_]expert[-_]parallel)(?!\S)", line)
    return f"TP {sizes[-1]}{' EP' if has_experts else ''}"


def _describe(answer: StartAnswer) -> Iterator[Block]:
    if not answer.stages:  # it gave no answer
        return
    rows = [(row.stage, row.outcome, row.detail, f"{row.seconds:.1f}") for row in answer.stages]
    yield from show_table("Stages", ("stage", "outcome", "the server", "seconds, all ranks"), rows)
    layers = [(row.kind, row.method, row.backend or "–", str(row.count)) for row in answer.layers]
    yield from show_table("Layers", ("kind", "method", "backend", "layers"), layers)
    ranks = zip(answer.ranks, answer.weight_bytes, strict=False)
    memory = [(f"weights of rank {rank}", f"{size / _GIB:.2f} GiB") for rank, size in ranks]
    memory += answer.memory
    if answer.kv_tokens is not None:
        memory.append(("KV cache, if activations took nothing", f"{answer.kv_tokens:,} tokens"))
    yield from show_table("Memory", ("what", "size"), memory)
    facts = [
        (name.replace("_", " "), str(value))
        for name, value in answer.config.items()
        if str(value) not in _USUAL
    ]
    facts += answer.versions.items()
    facts += [
        ("seconds to import vLLM, and then to ask", f"{answer.import_seconds:.1f}, {answer.seconds:.1f}"),
        ("peak memory of the processes that asked, at most", f"{answer.peak_memory / _GIB:.2f} GiB"),
    ]
    yield Fold("What was asked", [Table(("fact", "value"), facts)])
    if answer.backends:
        columns = ("layers", "backend or kernel", "why")
        yield Fold("Backends and kernels that are not used", [Table(columns, answer.backends)])
    if answer.after:
        yield Fold("After loading, which never decides", [Bullets(answer.after)])
