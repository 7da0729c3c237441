"""What a MoE layer needs around its two matrix products: the order of rows, and their sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_kernel(
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    place_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    count: tl.tensor,
    chunk: tl.constexpr,
) -> None:
    """A stable counting sort of `slots` [count], a program a slot.

    Writes `order` [count], the pairs by slot; `place` [count], where each pair went; `offsets` int32 [slots],
    where each slot's rows end. Pairs of slot -1 are left out.
    """
    mine = tl.program_id(0)
    lane = tl.arange(0, chunk)  # [chunk]
    before = count * 0
    number = count * 0
    start = count * 0
    while start < count:
        slots = tl.load(slots_ptr + start + lane, mask=start + lane < count, other=-1).to(tl.int32)
        before += tl.sum(((slots >= 0) & (slots < mine)).to(tl.int32), axis=0)
        number += tl.sum((slots == mine).to(tl.int32), axis=0)
        start += chunk
    tl.store(offsets_ptr + mine, before + number)
    if number > 0:
        start = count * 0
        while start < count:
            slots = tl.load(slots_ptr + start + lane, mask=start + lane < count, other=-1).to(tl.int32)
            hit = slots == mine
            row = before + tl.cumsum(hit.to(tl.int32), axis=0) - 1
            tl.store(order_ptr + row, start + lane, mask=hit)
            tl.store(place_ptr + start + lane, row, mask=hit)
            before += tl.sum(hit.to(tl.int32), axis=0)
            start += chunk


@triton.jit
def sum_kernel(
    product_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    place_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """`out` float32 [T, hidden]: the sum over a token's experts, in the order of its ids.

    `product` [rows, hidden] is the second product. Programs: (hidden / columns, T). `adds`: to what `out`
    holds.
    """
    token = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * columns + tl.arange(0, columns)  # [columns]
    inside = place < hidden
    total = tl.zeros([columns], tl.float32)
    for lane in tl.static_range(top_k):
        slot = tl.load(slots_ptr + token * top_k + lane).to(tl.int64)
        if slot >= 0:
            row = tl.load(place_ptr + token * top_k + lane).to(tl.int64)
            value = tl.load(product_ptr + row * hidden + place, mask=inside, other=0.0).to(tl.float32)
            if has_scale:
                value *= tl.load(scale_ptr + slot)
            if has_bias:
                value += tl.load(bias_ptr + slot * hidden + place, mask=inside, other=0.0).to(tl.float32)
            total += value * tl.load(shares_ptr + token * top_k + lane).to(tl.float32)
    to_ptr = out_ptr + token * hidden + place
    if adds:
        total += tl.load(to_ptr, mask=inside, other=0.0)
    tl.store(to_ptr, total, mask=inside)
