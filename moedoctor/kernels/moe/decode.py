"""A MoE layer for few tokens: each chosen expert's weights are read once, where they are.

Matrix-vector products, bound by memory: no sorting, no padding to tiles, no intermediate in low precision.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.activations import activate


@triton.jit
def up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    activation: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """`out` float32 [T * K, inner]: the activated first product of each pair of token and expert.

    `weight` [slots, 2 * inner, hidden], gate above up, for ``silu``; [slots, inner, hidden] for ``relu2``.
    Programs: (inner / rows, T * K). Pairs of slot -1 are not written.
    """
    gated: tl.constexpr = activation == "silu"
    height: tl.constexpr = 2 * inner if gated else inner
    pair = tl.program_id(1)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot >= 0:
        row = tl.program_id(0) * rows + tl.arange(0, rows)  # [rows]
        place = tl.arange(0, columns)  # [columns]
        from_ptr = weight_ptr + (slot * height + row[:, None]) * hidden + place[None, :]  # [rows, columns]
        token_ptr = x_ptr + (pair // top_k).to(tl.int64) * hidden + place  # [columns]
        first = tl.zeros([rows, columns], tl.float32)
        second = tl.zeros([rows, columns], tl.float32)
        for start in tl.static_range(0, hidden, columns):
            inside = start + place < hidden  # [columns]
            both = (row < inner)[:, None] & inside[None, :]  # [rows, columns]
            x = tl.load(token_ptr + start, mask=inside, other=0.0).to(tl.float32)[None, :]
            first += tl.load(from_ptr + start, mask=both, other=0.0).to(tl.float32) * x
            if gated:
                beyond = from_ptr + start + inner * hidden
                second += tl.load(beyond, mask=both, other=0.0).to(tl.float32) * x
        gate = tl.sum(first, axis=1)  # [rows]
        up = tl.sum(second, axis=1)  # [rows]
        if has_scale:
            scale = tl.load(scale_ptr + slot)
            gate *= scale
            up *= scale
        if has_bias:
            gate += tl.load(bias_ptr + slot * height + row, mask=row < inner, other=0.0).to(tl.float32)
            if gated:
                up += tl.load(bias_ptr + slot * height + inner + row, mask=row < inner, other=0.0).to(
                    tl.float32
                )
        tl.store(out_ptr + pair.to(tl.int64) * inner + row, activate(gate, up, activation), mask=row < inner)


@triton.jit
def down_kernel(
    h_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    lanes: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """`out` float32 [T, hidden]: the sum over a token's experts of share times second product.

    `h` float32 [T * K, inner], `weight` [slots, hidden, inner], `shares` [T, K]. Programs: (hidden / rows,
    T). `adds`: to what `out` holds.
    """
    token = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, lanes)  # [lanes]
    slot = tl.load(slots_ptr + token * top_k + lane, mask=lane < top_k, other=-1).to(tl.int64)
    held = slot >= 0
    if adds and tl.max(slot, axis=0) < 0:
        return  # nothing to add
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # [rows]
    place = tl.arange(0, columns)  # [columns]
    from_ptr = weight_ptr + (slot[:, None] * hidden + row[None, :])[:, :, None] * inner + place[None, None, :]
    h_at = h_ptr + (token * top_k + lane)[:, None] * inner + place[None, :]  # [lanes, columns]
    total = tl.zeros([lanes, rows, columns], tl.float32)
    real = held[:, None] & (row < hidden)[None, :]  # [lanes, rows]
    for start in tl.static_range(0, inner, columns):
        inside = start + place < inner  # [columns]
        h = tl.load(h_at + start, mask=held[:, None] & inside[None, :], other=0.0)  # [lanes, columns]
        weight = tl.load(from_ptr + start, mask=real[:, :, None] & inside[None, None, :], other=0.0)
        total += weight.to(tl.float32) * h[:, None, :]
    product = tl.sum(total, axis=2)  # [lanes, rows]
    if has_scale:
        product *= tl.load(scale_ptr + slot, mask=held, other=0.0)[:, None]
    if has_bias:
        at = bias_ptr + slot[:, None] * hidden + row[None, :]
        product += tl.load(at, mask=real, other=0.0).to(tl.float32)
    share = tl.load(shares_ptr + token * top_k + lane, mask=held, other=0.0).to(tl.float32)
    result = tl.sum(product * share[:, None], axis=0)  # [rows]
    to_ptr = out_ptr + token * hidden + row
    if adds:
        result += tl.load(to_ptr, mask=row < hidden, other=0.0)
    tl.store(to_ptr, result, mask=row < hidden)
