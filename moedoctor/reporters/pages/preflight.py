"""The page of `moedoctor preflight`: the answer, what to do, then what was asked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from moedoctor.diagnose.preflight.records import PreflightDocument, StartAnswer, Verdict
from moedoctor.reporters.page import Block, Bullets, Fold, Heading, Item, Paragraph, Span, Table
from moedoctor.reporters.text import count_of

_ANSWERS = {
    Verdict.STARTS: ("starts: yes", "good"),
    Verdict.REFUSED: ("starts: no", "error"),
    Verdict.WRONG: ("starts, and answers wrongly", "error"),
    Verdict.CANNOT_SAY: ("cannot say", "warning"),
}
_GIB = 2**30


def build_preflight_page(document: PreflightDocument) -> list[Block]:
    """Return the answer to the command line as it was given, its comparison with others, and the details."""
    first = document.answers[0]
    page: list[Block] = [
        Heading(f"moedoctor preflight: vLLM {first.release} on {_describe_gpu(document)}", 1),
        Paragraph(Span(f"{_ANSWERS[first.verdict][0]}: {first.reason}", "bold")),
    ]
    if first.next_step:
        page.append(Paragraph(f"Next: {first.next_step}"))
    page.append(Paragraph(Span(f"vllm serve {shlex.join(first.words)}", "code")))
    page += _list_findings(first)
    page += _compare(document)
    page += _describe(first)
    page += [Heading("Not seen by this command"), Bullets(document.not_seen)]
    if document.notes:
        page += [Heading("Notes"), Bullets(document.notes)]
    return page


def summarize(document: PreflightDocument) -> str:
    """Return ``starts: no · vLLM 0.33.0 · 2 findings``."""
    first = document.answers[0]
    return f"{_ANSWERS[first.verdict][0]} · vLLM {first.release} · {count_of(len(first.findings), 'finding')}"


def _describe_gpu(document: PreflightDocument) -> str:
    gpu = document.gpu
    return f"{gpu['count']} × compute capability {gpu['capability']}, {gpu['memory_gib']:g} GiB"


def _list_findings(answer: StartAnswer) -> Iterator[Block]:
    for finding in answer.findings:
        known = f"`moedoctor explain {finding.id}`" if finding.id else ""
        lines = [("tensor", finding.tensor), ("vLLM", finding.source)]
        lines += [("known failure", known), ("next", finding.next_step)]
        yield Item(finding.level, f"{finding.rule}: {finding.message}", [line for line in lines if line[1]])


def _compare(document: PreflightDocument) -> Iterator[Block]:
    """Give the table of the other releases and sizes."""
    if len(document.answers) < 2:
        return
    yield Heading("Other releases and sizes")
    rows = []
    for answer in document.answers:
        config = answer.config
        size = (
            f"TP {config['tensor_parallel']}{' EP' if config['expert_parallel'] else ''}"
            if config
            else _read_sizes(answer)
        )
        weights = f"{max(answer.weight_bytes) / _GIB:.1f}" if answer.weight_bytes else ""
        rows.append((answer.release, size, _ANSWERS[answer.verdict][0], weights, answer.reason))
    yield Table(("vLLM", "sizes", "answer", "GiB a rank", "why"), list(dict.fromkeys(rows)))


def _read_sizes(answer: StartAnswer) -> str:
    words = list(answer.words)
    place = (
        len(words) - 1 - words[::-1].index("--tensor-parallel-size")
        if "--tensor-parallel-size" in words
        else -1
    )
    size = words[place + 1] if 0 <= place < len(words) - 1 else "1"
    return f"TP {size}{' EP' if '--enable-expert-parallel' in words else ''}"


def _describe(answer: StartAnswer) -> Iterator[Block]:
    if answer.stages:
        yield Heading("Stages")
        rows = [(row.stage, row.outcome, row.detail, f"{row.seconds:.1f}") for row in answer.stages]
        yield Table(("stage", "outcome", "the server", "seconds, all ranks"), rows)
    if answer.layers:
        yield Heading("Layers")
        yield Table(
            ("kind", "method", "backend", "layers"),
            [(row.kind, row.method, row.backend or "–", str(row.count)) for row in answer.layers],
        )
    facts = [
        (name.replace("_", " "), str(value)) for name, value in answer.config.items() if value is not None
    ]
    ranks = zip(answer.ranks, answer.weight_bytes, strict=False)
    facts += [(f"weights of rank {rank}", f"{size / _GIB:.2f} GiB") for rank, size in ranks]
    facts += answer.memory
    if answer.kv_tokens is not None:
        facts.append(("KV cache, if activations took nothing", f"{answer.kv_tokens:,} tokens"))
    facts += [(name, version) for name, version in answer.versions.items()]
    facts.append(
        ("seconds to import vLLM, and then to ask", f"{answer.import_seconds:.1f}, {answer.seconds:.1f}")
    )
    facts.append(("peak memory of the processes that asked, at most", f"{answer.peak_memory / _GIB:.2f} GiB"))
    yield Fold("What was asked", [Table(("fact", "value"), facts)])
    if answer.backends:
        columns = ("layers", "backend or kernel", "why")
        yield Fold("Backends and kernels that are not used", [Table(columns, answer.backends)])
    if answer.after:
        yield Fold("After loading, which never decides", [Bullets(answer.after)])
    if answer.notes:
        yield Fold("Substituted answers", [Bullets(answer.notes)])
