"""The two matrix products of a MoE layer for many tokens, over tiles of the rows that share an expert.

Rows are those of `moe_rows.sort_kernel`: sorted by expert, each expert's ending at its offset. A launch is
over the slots of one group of experts, which writes its own rows and no others: a call in groups sorts once,
computes each row once, and adds up once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.activations import activate
from moedoctor.kernels.moe.rows import rows_of


@triton.jit
def _dot(a: tl.tensor, weight: tl.tensor, total: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """total [M, N] + a [M, K] times weight [N, K], transposed; `wide` where bfloat16 cannot be multiplied."""
    if wide:
        total += tl.dot(a.to(tl.float32), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(weight.to(a.dtype)), total)
    return total


@triton.jit
def _up_tile(
    row: tl.tensor,
    end: tl.tensor,
    slot: tl.tensor,
    column: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    order_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    activation: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """`rows` rows from `row` on, those before `end`, of `up_tiles_kernel`'s columns `column` [N]."""
    gated: tl.constexpr = activation == "silu"
    height: tl.constexpr = 2 * inner if gated else inner
    present = (column < inner) | (inner % columns == 0)
    place = tl.arange(0, depth)  # [K]
    from_ptr = weight_ptr + (slot * height + column[:, None]) * hidden + place[None, :]  # [N, K]
    line = row + tl.arange(0, rows)  # [M]
    inside = line < end
    token = tl.load(order_ptr + line, mask=inside, other=0) // top_k  # [M]
    a_ptr = x_ptr + token.to(tl.int64)[:, None] * hidden + place[None, :]  # [M, K]
    gate = tl.zeros([rows, columns], tl.float32)
    up = tl.zeros([rows, columns], tl.float32)
    for start in range(0, hidden, depth):
        real = (start + place < hidden) | (hidden % depth == 0)  # [K]
        weight = tl.load(from_ptr + start, mask=present[:, None] & real[None, :], other=0.0)  # [N, K]
        a = tl.load(a_ptr + start, mask=inside[:, None] & real[None, :], other=0.0)  # [M, K]
        gate = _dot(a, weight, gate, wide)
        if gated:
            beyond = from_ptr + start + inner * hidden  # [N, K]
            weight = tl.load(beyond, mask=present[:, None] & real[None, :], other=0.0)
            up = _dot(a, weight, up, wide)
    if has_scale:
        scale = tl.load(scale_ptr + slot)
        gate *= scale
        up *= scale
    if has_bias:
        bias = bias_ptr + slot * height + column  # [N]
        gate += tl.load(bias, mask=present, other=0.0).to(tl.float32)[None, :]
        if gated:
            up += tl.load(bias + inner, mask=present, other=0.0).to(tl.float32)[None, :]
    value = activate(gate, up, activation)  # [M, N]
    to_ptr = out_ptr + line.to(tl.int64)[:, None] * inner + column[None, :]  # [M, N]
    tl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=inside[:, None] & present[None, :])


@triton.jit
def up_tiles_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    activation: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    mapped: tl.constexpr,
    rows: tl.constexpr,
    tall: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    splits: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """`out` [T * K, inner]: activated first product of each row of the experts in these slots.

    `weight` [slots, 2 * inner, hidden], gate above up, for ``silu``; [slots, inner, hidden] for ``relu2``.
    `mapped`: `experts` int32 [slots] tells whom each slot holds, -1 for nobody; else slots are experts.
    Programs: (inner / columns * splits, slots); `splits` of them share the rows of an expert, tile by tile.
    A tile has `rows` rows, or `tall` where more are left.
    """
    slot = tl.program_id(1).to(tl.int64)
    row, end = rows_of(slot, experts_ptr, offsets_ptr, mapped)
    row += tl.program_id(0) % splits * tall
    column = tl.program_id(0) // splits * columns + tl.arange(0, columns)  # [N]
    while row < end:
        if tall > rows and end - row > rows:
            _up_tile(
                row,
                end,
                slot,
                column,
                x_ptr,
                weight_ptr,
                scale_ptr,
                bias_ptr,
                order_ptr,
                out_ptr,
                top_k,
                hidden,
                inner,
                activation,
                has_scale,
                has_bias,
                tall,
                columns,
                depth,
                wide,
            )
        else:
            _up_tile(
                row,
                end,
                slot,
                column,
                x_ptr,
                weight_ptr,
                scale_ptr,
                bias_ptr,
                order_ptr,
                out_ptr,
                top_k,
                hidden,
                inner,
                activation,
                has_scale,
                has_bias,
                rows,
                columns,
                depth,
                wide,
            )
        row += tall * splits


@triton.jit
def _down_tile(
    row: tl.tensor,
    end: tl.tensor,
    slot: tl.tensor,
    column: tl.tensor,
    h_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """As `_up_tile`, of `down_tiles_kernel`."""
    present = (column < hidden) | (hidden % columns == 0)
    place = tl.arange(0, depth)  # [K]
    from_ptr = weight_ptr + (slot * hidden + column[:, None]) * inner + place[None, :]  # [N, K]
    line = row + tl.arange(0, rows)  # [M]
    inside = line < end
    a_ptr = h_ptr + line.to(tl.int64)[:, None] * inner + place[None, :]  # [M, K]
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, inner, depth):
        real = (start + place < inner) | (inner % depth == 0)  # [K]
        a = tl.load(a_ptr + start, mask=inside[:, None] & real[None, :], other=0.0)  # [M, K]
        weight = tl.load(from_ptr + start, mask=present[:, None] & real[None, :], other=0.0)  # [N, K]
        total = _dot(a, weight, total, wide)
    if has_scale:
        total *= tl.load(scale_ptr + slot)
    if has_bias:
        bias = tl.load(bias_ptr + slot * hidden + column, mask=present, other=0.0)  # [N]
        total += bias.to(tl.float32)[None, :]
    to_ptr = out_ptr + line.to(tl.int64)[:, None] * hidden + column[None, :]  # [M, N]
    tl.store(to_ptr, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & present[None, :])


@triton.jit
def down_tiles_kernel(
    h_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    mapped: tl.constexpr,
    rows: tl.constexpr,
    tall: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    splits: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """`out` [T * K, hidden]: second product of each row of `h` [T * K, inner]. As `up_tiles_kernel`.

    Programs: (hidden / columns * splits, slots).
    """
    slot = tl.program_id(1).to(tl.int64)
    row, end = rows_of(slot, experts_ptr, offsets_ptr, mapped)
    row += tl.program_id(0) % splits * tall
    column = tl.program_id(0) // splits * columns + tl.arange(0, columns)  # [N]
    while row < end:
        if tall > rows and end - row > rows:
            _down_tile(
                row,
                end,
                slot,
                column,
                h_ptr,
                weight_ptr,
                scale_ptr,
                bias_ptr,
                out_ptr,
                hidden,
                inner,
                has_scale,
                has_bias,
                tall,
                columns,
                depth,
                wide,
            )
        else:
            _down_tile(
                row,
                end,
                slot,
                column,
                h_ptr,
                weight_ptr,
                scale_ptr,
                bias_ptr,
                out_ptr,
                hidden,
                inner,
                has_scale,
                has_bias,
                rows,
                columns,
                depth,
                wide,
            )
        row += tall * splits
