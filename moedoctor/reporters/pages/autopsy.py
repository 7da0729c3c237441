"""The page of `moedoctor autopsy`."""

from __future__ import annotations

from moedoctor.diagnose.autopsy.autopsy import AutopsyDocument, CallReplay, KernelFault
from moedoctor.diagnose.autopsy.known_tensors import TensorPlace
from moedoctor.reporters.page import Block, Bullets, Heading, Item, Paragraph, Span, Step, Table
from moedoctor.reporters.text import count_of
from moedoctor.text import join_some

_MOST_TENSORS = 4


def make_autopsy_page(document: AutopsyDocument) -> list[Block]:
    """Return the answer, each fault, what to do next, and what was read."""
    page: list[Block] = [Heading("moedoctor: autopsy", 1), Paragraph(Span(summarize(document), "bold"))]
    if document.replay:
        page.append(Paragraph(describe_replay(document.replay)))
    page += [Item("error", _name(fault), _list_lines(fault)) for fault in document.faults]
    notes = [
        f"{each.file}: {note}"
        for each in document.examined
        for note in (each.note, each.no_debugger and f"read without a debugger: {each.no_debugger}")
        if note
    ]
    page += [Bullets(notes)] if notes else []
    page += map(Step, document.next_steps)
    rows = [
        (each.file, each.kind, f"{each.gpu} ({each.capability})" if each.gpu else "–", each.driver or "–")
        for each in document.examined
        if each.kind != "capsule"
    ]
    capsules = sum(each.kind == "capsule" for each in document.examined)
    rows += [(count_of(capsules, "capsule"), "recorded calls", "–", "–")] if capsules else []
    page += [Heading("Read"), Table(("file", "kind", "GPU", "driver"), rows)]
    page += [Bullets(each.debugger) for each in document.examined if each.debugger]
    running = [name for each in document.examined for name in each.running if name]
    if running:
        page.append(Paragraph(f"On the GPU without a fault of their own: {join_some(running)}"))
    return page


def summarize(document: AutopsyDocument) -> str:
    """Return ``vllm::moe::topkGating faulted (illegal address): vLLM's routing …``."""
    if not document.faults:
        return "No kernel is known to have faulted"
    first = document.faults[0]
    others = len({(fault.symbol, fault.code) for fault in document.faults}) - 1
    more = f" · {count_of(others, 'more fault')}" if others else ""
    return f"{_name(first)} faulted ({first.exception}): {_name_owner(first)}{more}"


def describe_replay(replay: CallReplay) -> str:
    """Return ``MARLIN faults again on call 17 of LAYER; OURS and TRITON compute it``."""
    call = f"call {replay.call} of {replay.layer}, the last recorded one"
    if replay.problem:
        return f"Not computed again: {call}: {replay.problem}"
    others = [f"{join_some(replay.computed)} computed it"] if replay.computed else []
    others += replay.failed
    if replay.faulted:
        return "; ".join([f"{join_some(replay.faulted)} faulted again on {call}", *others])
    if not replay.computed:
        return "; ".join([f"No backend computed {call}", *others])
    return "; ".join(
        [f"No backend that runs here faults on {call}, alone: what ran before it matters", *others]
    )


def _name(fault: KernelFault) -> str:
    return fault.kernel or "A kernel without a name in the dump"


def _name_owner(fault: KernelFault) -> str:
    return fault.owner.what if fault.owner else "whose it is, no rule tells"


def _list_lines(fault: KernelFault) -> list[tuple[str, str]]:
    owner = fault.owner
    lines = [
        ("exception", f"{fault.exception} (CUDBG_EXCEPTION {fault.code})"),
        ("whose", _name_owner(fault)),
        ("installed here", owner and owner.installed and f"{owner.name} {owner.installed}"),
        ("mended in", owner and owner.mended),
        ("source", fault.source),
        ("in", fault.function),
    ]
    if fault.grid and fault.block_size and fault.block and fault.thread:
        grid, size = (" × ".join(map(str, each)) for each in (fault.grid, fault.block_size))
        thread, block = (",".join(map(str, each)) for each in (fault.thread, fault.block))
        lines.append(("launched", f"{grid} blocks of {size} threads"))
        lines.append(("first", f"thread {thread} of block {block}"))
    if fault.warps is not None and fault.blocks is not None:
        lines.append(("faulted", f"{count_of(fault.warps, 'warp')} in {count_of(fault.blocks, 'block')}"))
    lines += [
        ("address", fault.address),
        *(("tensor", _describe_place(tensor)) for tensor in fault.tensors[:_MOST_TENSORS]),
        ("symbol", fault.symbol if fault.symbol != fault.kernel else None),
        ("read in", fault.file if fault.line is None else f"{fault.file}:{fault.line}"),
    ]
    return [(label, text) for label, text in lines if text]


def _describe_place(tensor: TensorPlace) -> str:
    """Return ``w13_weight of LAYER: the address is 4,096 bytes past its end``."""
    if tensor.offset is None:
        return f"the kernel was given {tensor.name}"
    if tensor.offset < 0:
        return f"{tensor.name}: the address is {-tensor.offset:,} bytes before it"
    if tensor.offset < tensor.size:
        return f"{tensor.name}: the address is in it, at byte {tensor.offset:,} of {tensor.size:,}"
    return f"{tensor.name}: the address is {tensor.offset - tensor.size:,} bytes past its end"
