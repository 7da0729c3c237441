"""The page of `moedoctor plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moedoctor.diagnose.plan.plan import GIB, MEASURED, Plan, PlanRequest
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Span, Step, Table
from moedoctor.reporters.text import count_of


@dataclass(frozen=True)
class PlanDocument:
    """A request for a plan, and its result."""

    command: ClassVar[str] = "plan"
    summary: ClassVar[Mapping[str, Any]] = {}
    inputs: PlanRequest
    plan: Plan


def make_plan_page(document: PlanDocument) -> list[Block]:
    """Return a table of what takes how much, and remarks."""
    request, result = document.inputs, document.plan
    shape = request.shape
    measured = "nothing was measured"
    if request.cpu_source == MEASURED:
        measured = "only the host's memory was measured"
    page: list[Block] = [Heading(f"plan for {shape.name}: computed from {shape.source}; {measured}", 1)]
    page.append(Paragraph(Span(summarize(document), "bold")))
    notes = result.notes
    if result.missing_bytes:  # the first notes are the answer, and what helps
        page.append(Step(notes[1]))
        notes = notes[2:]
    page.append(Table(("what", "how much", "how it is computed"), list(_list_rows(request, result)), "lrl"))
    page.append(Bullets(notes))
    return page


def summarize(document: PlanDocument) -> str:
    """Return what fits, or how much memory is missing."""
    result = document.plan
    if result.missing_bytes:
        return result.notes[0]
    weights = f"{_format_gib(result.on_device_bytes)} of weights on the GPU"
    kv = result.kv
    fits = "fits" if kv.concurrency >= 1 else "does not fit"
    if kv.concurrency >= 1 and result.workspace.bytes is None:
        fits = "fits before the workspace, which is not known"
    if kv.concurrency >= 1 and any(note.startswith("loading: ") for note in result.notes):
        fits = "fits only after loading, which needs more than the GPU has (MD026)"
    return (
        f"{fits}: {weights}, {kv.tokens_printed_from_0_21:,} KV tokens, {kv.concurrency:.2f} requests at once"
    )


def _list_rows(request: PlanRequest, result: Plan) -> Iterator[tuple[str, str, str]]:
    kv, traffic, experts, gib = result.kv, result.traffic, request.shape.experts, _format_gib
    rest = f" in {request.other_scheme}"
    if request.built_bytes is not None:
        rest = ": the rest of vLLM's parameters"
    elif request.checkpoint_bytes is not None:
        rest = ": the checkpoint's rest"
    held = f"{experts.count} layers × {experts.layer.experts} experts in {request.scheme}"
    if request.tensor_parallel > 1:
        yield "GPUs", f"{request.tensor_parallel}", "every size is of each GPU"
        held += f", 1/{request.tensor_parallel} of each"
    yield "expert weights", gib(result.expert_bytes), held
    yield "other weights", gib(result.other_bytes), f"attention, shared experts, embeddings{rest}"
    if result.on_host_bytes:
        yield "weights on the host", gib(result.on_host_bytes), "pinned memory that the host must have"
    if result.host_peak_how is not None:
        yield "host while loading, at most", gib(result.host_peak_bytes), result.host_peak_how
    yield "weights on the GPU", gib(result.on_device_bytes), "with the slots of an expert cache, if any"
    yield f"workspace of {request.backend}", gib(result.workspace.bytes), result.workspace.how
    if result.repack_how is not None:
        how = f"beside the weights, while vLLM loads (MD026): {result.repack_how}"
        yield f"repacking for {request.backend}", gib(result.repack_bytes), how
    if result.budget_bytes is not None:
        yield "GPU budget", gib(result.budget_bytes), f"memory × utilization {request.utilization:g}"
    if result.missing_bytes:
        yield "missing", gib(result.missing_bytes), "what weights and workspace take beyond the budget"
    blocks = f"{kv.blocks:,} blocks of {kv.block_bytes:,} bytes"
    yield "KV memory", gib(result.available_kv_bytes), blocks
    groups = f"{count_of(kv.groups, 'group')} of {kv.layers_per_group} layers"
    yield "KV block", f"{kv.block_size:,} tokens", groups
    yield "KV of one token", f"{kv.bytes_per_token:,} bytes", f"attention layers only, {request.kv_type}"
    if kv.state_bytes_per_request:
        state = f"{kv.state_bytes_per_request / (1 << 20):.1f} MiB"
        yield "state of one request", state, "recurrent layers"
    yield "KV tokens", f"{kv.tokens_printed_to_0_20:,}", "as vLLM 0.17.1 to 0.20.0 print them"
    yield "KV tokens", f"{kv.tokens_printed_from_0_21:,}", "as vLLM 0.21.0 and newer print them"
    yield "concurrency", f"{kv.concurrency:.2f}", f"requests of {request.context:,} tokens at once"
    yield "PCIe per token", f"{traffic.bytes_per_token / 1e6:,.1f} MB", traffic.how
    if traffic.tokens_per_second is not None:
        name, limit = "bound by PCIe", "nothing with this traffic is faster"
        if not traffic.is_bound:
            name = "estimate by PCIe"
            limit = "for uniform routing: no bound, real routing is faster or slower"
        speed = f"one request at {request.bandwidth / 1e9:.1f} GB/s ({request.bandwidth_source}); {limit}"
        yield name, f"{traffic.tokens_per_second:.1f} tokens/s", speed
    if traffic.both_tokens_per_second is not None and request.cpu_bandwidth is not None:
        how = (
            f"the CPU computes {traffic.cpu_share:.2f} of the misses at "
            f"{request.cpu_bandwidth / 1e9:.1f} GB/s ({request.cpu_source}), "
            "if host memory carries that beside the bus"
        )
        name = "bound by both" if traffic.is_bound else "estimate by both"
        yield name, f"{traffic.both_tokens_per_second:.1f} tokens/s", how


def _format_gib(size: int | None) -> str:
    return "not known" if size is None else f"{size / GIB:.2f} GiB"
