"""Asks workers on the CPU for a part of a call's missing experts, and adds what they computed.

Both kernels talk to the workers through `moedoctor.fixes.cache.host_workers.Box`, pinned memory of the host.
Everything that a request says is written before its stamp, and a sum is read only after every worker has
answered with that stamp.

Shapes: E experts, lanes (E padded to a power of two), T tokens, K ids a token, chunk (T * K padded to a power
of two), H hidden size, workers padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moedoctor.kernels.cache.lookup import _NEVER, _TOGETHER, LookupState, _rank, _real_ids
from moedoctor.kernels.device_guard import interprets, make_current
from moedoctor.kernels.expert_ids import as_int32

TRAP_SECONDS = 30
"""A GPU that waits longer ends with an error. The workers' watcher ends the process long before."""
_BLOCK = 1024
_PLACES = tl.constexpr(8)  # tokens of a row of ``Box.weights``


@triton.jit
def _order_memory(on_gpu: tl.constexpr) -> None:
    """Order what each thread read or wrote before, for the host too, before what comes after."""
    if on_gpu:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit(do_not_specialize=["share", "layer"])
def ask_kernel(
    ids_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    topk_weights_ptr: tl.tensor,
    x_ptr: tl.tensor,
    slot_of_ptr: tl.tensor,
    uses_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    state_ptr: tl.tensor,
    request_ptr: tl.tensor,
    head_ptr: tl.tensor,
    box_ids_ptr: tl.tensor,
    box_weights_ptr: tl.tensor,
    box_hidden_ptr: tl.tensor,
    share: tl.tensor,
    layer: tl.tensor,
    x_stride: tl.tensor,
    hidden_size: tl.constexpr,
    tokens: tl.constexpr,
    width: tl.constexpr,
    experts: tl.constexpr,
    lanes: tl.constexpr,
    chunk: tl.constexpr,
    together: tl.constexpr,
    block: tl.constexpr,
    on_gpu: tl.constexpr,
) -> None:
    """Ask for `share` / 256 of the experts of `ids` [T, K] that have no slot, the least used; one program.

    `kept` [T, K] gets the ids, with -1 where the workers were asked. `state` int64 [2] gets the request's
    stamp, and the number of experts asked for: if that is 0 no request is written. `x` is [T, H], of 16 bits.
    Experts that were asked for are counted in `uses` as the lookup counts others, so that frequent ones get a
    slot. `rows`, `uses` and `keys` as `lookup_kernel`; rows that are padding ask for nothing.
    """
    expert = tl.arange(0, lanes)  # [lanes]
    place = tl.arange(0, chunk)  # [chunk]
    count: tl.constexpr = tokens * width
    limit = _real_ids(rows_ptr, tl.full([], count, tl.int32), tl.full([], width, tl.int32))
    given = tl.load(ids_ptr + place, mask=place < count, other=-1)  # [chunk]
    ids = tl.where(place < limit, as_int32(given), -1)
    same = expert[:, None] == ids[None, :]  # [lanes, chunk]
    slot = tl.load(slot_of_ptr + expert, mask=expert < experts, other=0)  # [lanes]
    missing = (tl.max(same.to(tl.int32), axis=1) > 0) & (slot < 0)
    uses = tl.load(uses_ptr + expert, mask=expert < experts, other=0)  # [lanes]
    rank = _rank(tl.where(missing, uses, _NEVER), expert.to(tl.int64), keys_ptr, expert, lanes, together)
    asked = (tl.sum(missing.to(tl.int32), axis=0) * share + 128) // 256
    chosen = missing & (rank < asked)  # [lanes]
    away = tl.max((same & chosen[:, None]).to(tl.int32), axis=0) > 0  # [chunk]
    tl.store(kept_ptr + place, tl.where(away, -1, given), mask=place < count)
    tl.store(state_ptr + 1, asked.to(tl.int64))
    if asked > 0:
        tl.store(uses_ptr + expert, uses + 1, mask=chosen)
        tl.store(box_ids_ptr + rank, expert, mask=chosen)
        weight = tl.load(topk_weights_ptr + place, mask=place < count, other=0.0)  # [chunk]
        for token in range(tokens):
            of_token = same & ((place // width) == token)[None, :]  # [lanes, chunk]
            sums = tl.sum(tl.where(of_token, weight[None, :].to(tl.float32), 0.0), axis=1)  # [lanes]
            tl.store(box_weights_ptr + rank * _PLACES + token, sums, mask=chosen)
            for start in range(0, hidden_size, block):
                column = start + tl.arange(0, block)  # [block]
                inside = column < hidden_size
                x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0)
                tl.store(box_hidden_ptr + token * hidden_size + column, x, mask=inside)
        tl.store(head_ptr, layer)
        tl.store(head_ptr + 1, asked)
        tl.store(head_ptr + 2, tl.full([], tokens, tl.int32))
        stamp = tl.load(state_ptr) + 1
        tl.debug_barrier()
        tl.store(state_ptr, stamp)
        _order_memory(on_gpu)
        tl.store(request_ptr, stamp)


@triton.jit(do_not_specialize=["trap_ns"])
def add_kernel(
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    answers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_stride: tl.tensor,
    trap_ns: tl.tensor,
    hidden_size: tl.constexpr,
    workers: tl.constexpr,
    lanes: tl.constexpr,
    block: tl.constexpr,
    on_gpu: tl.constexpr,
) -> None:
    """Wait until all `workers` have answered the request of `state`; add `sums` [T, H] to `out` [T, H].

    A program has one row.
    """
    row = tl.program_id(0)
    if tl.load(state_ptr + 1) > 0:
        stamp = tl.load(state_ptr)
        worker = tl.arange(0, lanes)  # [lanes]
        mine = worker < workers
        if on_gpu:
            begin = globaltimer()
        answers = tl.load(answers_ptr + worker, mask=mine, other=0, volatile=True)  # [lanes]
        waits = tl.sum((mine & (answers != stamp)).to(tl.int32), axis=0)
        while waits > 0:
            answers = tl.load(answers_ptr + worker, mask=mine, other=0, volatile=True)
            waits = tl.sum((mine & (answers != stamp)).to(tl.int32), axis=0)
            if on_gpu:  # noqa: SIM102  Triton leaves out what follows in its interpreter
                if globaltimer() - begin > trap_ns:
                    tl.inline_asm_elementwise(
                        "trap; mov.b32 $0, $1;", "=r,r", [waits], tl.int32, is_pure=False, pack=1
                    )
        _order_memory(on_gpu)
        for start in range(0, hidden_size, block):
            column = start + tl.arange(0, block)  # [block]
            inside = column < hidden_size
            sums = tl.load(sums_ptr + row * hidden_size + column, mask=inside, other=0.0, volatile=True)
            at = out_ptr + row * out_stride + column
            out = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, (out + sums).to(out_ptr.dtype.element_ty), mask=inside)


def launch_ask(
    state: LookupState,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x: torch.Tensor,
    stamps: torch.Tensor,
    box: tuple[torch.Tensor, ...],
    share: int,
    layer: int,
) -> torch.Tensor:
    """Ask for `share` / `WHOLE_SHARE` of what is missing; return the ids [T, K] that are left, else -1.

    `box`: request, head, ids, weights and hidden of a ``Box`` as the GPU sees it; `stamps` int64 [2] on the
    device belongs to it. `ids` and `topk_weights` are contiguous.
    """
    kept = torch.empty_like(ids)  # [T, K]
    experts = state.slot_of.numel()
    lanes = triton.next_power_of_2(experts)
    tensors = ids, kept, topk_weights, x.view(torch.int16), state.slot_of, state.uses, state.keys, state.rows
    with make_current(ids):
        ask_kernel[(1,)](
            *tensors,
            stamps,
            *box[:-1],
            box[-1].view(torch.int16),
            share,
            layer,
            x.stride(0),
            hidden_size=x.shape[1],
            tokens=ids.shape[0],
            width=ids.shape[1],
            experts=experts,
            lanes=lanes,
            chunk=max(triton.next_power_of_2(ids.numel()), 2),
            together=lanes if lanes <= _TOGETHER else 32,
            block=_BLOCK,
            on_gpu=not interprets(),
        )
    return kept


def launch_add(out: torch.Tensor, sums: torch.Tensor, answers: torch.Tensor, stamps: torch.Tensor) -> None:
    """Wait for the answers to the last request of `stamps`, if any, and add `sums` to `out` [T, H]."""
    with make_current(out):
        add_kernel[(out.shape[0],)](
            *(out, sums, answers, stamps, out.stride(0), TRAP_SECONDS * 1_000_000_000),
            hidden_size=out.shape[1],
            workers=answers.numel(),
            lanes=max(triton.next_power_of_2(answers.numel()), 2),
            block=_BLOCK,
            on_gpu=not interprets(),
        )
