"""The matrix products of an MoE layer over tokens grouped by expert, with weights in bfloat16 or NVFP4.

NVFP4 weights are repacked so that a byte holds element j of two neighbouring blocks of 16 (low nibble: the
first block), which makes both halves of a tile contiguous pieces of the activations. A code is decoded by
putting its bits where a float32 has its own, which is right up to a power of two: see `decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

DECODE_SCALE = tl.constexpr(2.0**118)
"""What block scales are multiplied by on loading: the largest, 448, just does not overflow."""
REMAINING_SCALE = tl.constexpr(2.0**8)
"""The rest of the 2**126 by which the bits of a code, read as float32, are too small."""


@triton.jit
def decode(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """bfloat16 ``e2m1 * scale / 2**8`` of codes uint32 [N, C, 16] and scales [N, C] times DECODE_SCALE."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    values = bits.to(tl.float32, bitcast=True) * scales[:, :, None]  # [N, C, 16]
    return values.to(tl.bfloat16)


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """``total + a @ b``; `wide` is for Triton's interpreter, which cannot multiply bfloat16."""
    if wide:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _scales(scale_ptr: tl.tensor, place: tl.tensor, inside: tl.tensor) -> tl.tensor:
    raw = tl.load(scale_ptr + place, mask=inside, other=0)  # uint8 [N, C]
    return raw.to(tl.float8e4nv, bitcast=True).to(tl.float32) * DECODE_SCALE


@triton.jit
def _nvfp4_step(
    total: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    start: tl.tensor,
    depth: tl.constexpr,
    block_k: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    """`total` [M, N] plus the product of activations [M, block_k/2] each and one tile of the weight."""
    chunk = tl.arange(0, block_k // 32)  # [C]
    byte = tl.arange(0, 16)  # [16]
    inside = present[:, None] & (start + chunk * 32 < depth)[None, :]  # [N, C]
    place = rows[:, None] * (depth // 2) + (start // 2 + chunk * 16)[None, :]  # [N, C]
    packed = tl.load(
        weight_ptr + place[:, :, None] + byte[None, None, :], mask=inside[:, :, None], other=0
    ).to(tl.uint32)  # [N, C, 16]
    scale_place = rows[:, None] * (depth // 16) + (start // 16 + chunk * 2)[None, :]  # [N, C]
    first = decode(packed & 15, _scales(scale_ptr, scale_place, inside))
    second = decode(packed >> 4, _scales(scale_ptr, scale_place + 1, inside))
    size: tl.constexpr = rows.shape[0]
    total = _dot(low, tl.trans(tl.reshape(first, (size, block_k // 2))), total, wide)
    return _dot(high, tl.trans(tl.reshape(second, (size, block_k // 2))), total, wide)


@triton.jit
def _bf16_step(
    total: tl.tensor,
    values: tl.tensor,
    weight_ptr: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    start: tl.tensor,
    depth: tl.constexpr,
    block_k: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    column = start + tl.arange(0, block_k)  # [block_k]
    weight = tl.load(
        weight_ptr + rows[None, :] * depth + column[:, None],
        mask=present[None, :] & (column < depth)[:, None],
        other=0.0,
    )  # [block_k, N]
    return _dot(values, weight, total, wide)


@triton.jit
def _activated(first: tl.tensor, second: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    if activation == "relu2":
        kept = tl.maximum(first, 0.0)
        return kept * kept
    if activation == "gelu_tanh":
        inner = 0.7978845608028654 * (first + 0.044715 * first * first * first)
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        return 0.5 * first * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)) * second
    if activation == "silu":
        return first / (1.0 + tl.exp(-first)) * second
    return first


@triton.jit
def expert_product(
    a_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    global_ptr: tl.tensor,
    out_ptr: tl.tensor,
    router_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    width: tl.constexpr,
    depth: tl.constexpr,
    top_k: tl.constexpr,
    activation: tl.constexpr,
    nvfp4: tl.constexpr,
    planned: tl.constexpr,
    second: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """One tile of ``out = act(a @ weight.T)``, or with `second` of ``router * (a @ weight.T)``.

    `width` is the width of `out`, `depth` that of `a`. The first product reads tokens [T, depth] and writes
    rows in the order of experts; the second reads those and writes a row for each slot. `plan` [B, 3] holds
    expert, first row and rows of each block of tokens; without it each slot is a block.
    """
    block = tl.program_id(1)
    if planned:
        expert = tl.load(plan_ptr + block * 3).to(tl.int64)
        first_row = tl.load(plan_ptr + block * 3 + 1)
        rows = tl.load(plan_ptr + block * 3 + 2)
    else:
        expert = tl.load(ids_ptr + block).to(tl.int64)
        first_row = block
        rows = 1
    if expert < 0:
        return
    offset = tl.arange(0, block_m)  # [M]
    inside = offset < rows
    row = first_row + offset  # [M]
    slot = tl.load(order_ptr + row, mask=inside, other=0) if planned else row  # [M]
    source = row if second else slot // top_k  # [M]
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)  # [N]
    present = column < width
    gated: tl.constexpr = activation == "silu" or activation == "gelu_tanh"
    height: tl.constexpr = width * 2 if gated else width
    weight_row = expert * height + column  # [N]
    total = tl.zeros((block_m, block_n), tl.float32)
    other = tl.zeros((block_m, block_n), tl.float32)
    a_row = a_ptr + source.to(tl.int64)[:, None] * depth  # [M, 1]
    half = tl.arange(0, block_k // 2)  # [block_k / 2]
    for start in range(0, depth, block_k):
        if nvfp4:
            place = start + half // 16 * 32 + half % 16  # [block_k / 2]
            low = tl.load(a_row + place[None, :], mask=inside[:, None] & (place < depth)[None, :], other=0.0)
            place += 16
            high = tl.load(a_row + place[None, :], mask=inside[:, None] & (place < depth)[None, :], other=0.0)
            total = _nvfp4_step(
                total, low, high, weight_ptr, scale_ptr, weight_row, present, start, depth, block_k, wide
            )
            if gated:
                other = _nvfp4_step(
                    other,
                    low,
                    high,
                    weight_ptr,
                    scale_ptr,
                    weight_row + width,
                    present,
                    start,
                    depth,
                    block_k,
                    wide,
                )
        else:
            k = start + tl.arange(0, block_k)  # [block_k]
            values = tl.load(a_row + k[None, :], mask=inside[:, None] & (k < depth)[None, :], other=0.0)
            total = _bf16_step(total, values, weight_ptr, weight_row, present, start, depth, block_k, wide)
            if gated:
                other = _bf16_step(
                    other, values, weight_ptr, weight_row + width, present, start, depth, block_k, wide
                )
    if nvfp4:
        scale = tl.load(global_ptr + expert) * REMAINING_SCALE
        total *= scale
        other *= scale
    if second:
        total *= tl.load(router_ptr + slot, mask=inside, other=0.0)[:, None]
        target = slot
    else:
        total = _activated(total, other, activation)
        target = row
    tl.store(
        out_ptr + target.to(tl.int64)[:, None] * width + column[None, :],
        total.to(tl.bfloat16),
        mask=inside[:, None] & present[None, :],
    )


@triton.jit
def sum_slots(
    slots_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """out [T, width] = the sum of a token's rows of slots [T * top_k, width] whose id is not negative."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)  # [block]
    inside = column < width
    total = tl.zeros((block,), tl.float32)
    for k in range(top_k):
        slot = token * top_k + k
        id = tl.load(ids_ptr + slot + tl.zeros_like(column))  # [block], the same id: a mask of one shape
        used = inside & (id >= 0)
        total += tl.load(slots_ptr + slot * width + column, mask=used, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(tl.bfloat16), mask=inside)
