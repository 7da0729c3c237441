"""What a MoE layer needs around its two matrix products: the order of rows, and their sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def sort_kernel(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    place_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    count: tl.tensor,
    chunk: tl.constexpr,
) -> None:
    """A stable counting sort of `ids` [count], a program an expert.

    Writes `order` [count], the pairs by expert; `place` [count], where each pair went; `offsets` int32 [E],
    where each expert's rows end. Pairs whose id is no expert are left out.
    """
    mine = tl.program_id(0)
    lane = tl.arange(0, chunk)  # [chunk]
    before = count * 0
    number = count * 0
    start = count * 0
    while start < count:
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < count, other=-1).to(tl.int32)
        before += tl.sum(((ids >= 0) & (ids < mine)).to(tl.int32), axis=0)
        number += tl.sum((ids == mine).to(tl.int32), axis=0)
        start += chunk
    tl.store(offsets_ptr + mine, before + number)
    if number > 0:
        start = count * 0
        while start < count:
            ids = tl.load(ids_ptr + start + lane, mask=start + lane < count, other=-1).to(tl.int32)
            hit = ids == mine
            row = before + tl.cumsum(hit.to(tl.int32), axis=0) - 1
            tl.store(order_ptr + row, start + lane, mask=hit)
            tl.store(place_ptr + start + lane, row, mask=hit)
            before += tl.sum(hit.to(tl.int32), axis=0)
            start += chunk


@triton.jit
def rows_of(
    slot: tl.tensor,
    experts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    mapped: tl.constexpr,
) -> tl.tuple:
    """(first, end) of the rows whose expert is in `slot`."""
    expert = slot.to(tl.int32)
    if mapped:
        expert = tl.load(experts_ptr + slot)
    end = tl.load(offsets_ptr + expert, mask=expert >= 0, other=0)
    return tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0), end


@triton.jit(do_not_specialize=["experts"])
def sum_kernel(
    product_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    place_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    experts: tl.tensor,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    adds: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """`out` float32 [T, hidden]: the sum over a token's experts, in the order of its ids.

    `product` [rows, hidden] is the second product. Programs: (hidden / columns, T). `adds`: to what `out`
    holds.
    """
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * columns + tl.arange(0, columns)  # [columns]
    inside = column < hidden
    total = tl.zeros([columns], tl.float32)
    for lane in tl.static_range(top_k):
        expert = tl.load(ids_ptr + token * top_k + lane)
        if (expert >= 0) & (expert < experts):
            row = tl.load(place_ptr + token * top_k + lane).to(tl.int64)
            value = tl.load(product_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
            total += value * tl.load(shares_ptr + token * top_k + lane).to(tl.float32)
    to_ptr = out_ptr + token * hidden + column
    if adds:
        total += tl.load(to_ptr, mask=inside, other=0.0)
    tl.store(to_ptr, total, mask=inside)
