"""The matrix products of an MoE layer over tokens grouped by expert, with weights in bfloat16 or NVFP4.

Both are computed transposed, ``out.T = weight @ a.T``: tensor cores take their left operand from registers,
so a decoded weight goes there as it is, and tokens, of which there may be few, are the narrow side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.activations import activate
from moedoctor.kernels.moe.nvfp4_words import REMAINING_SCALE, decode_block


@triton.jit
def _dot(weight: tl.tensor, a: tl.tensor, total: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """``total + weight @ a.T``; `wide` is for Triton's interpreter, which cannot multiply bfloat16."""
    if wide:
        weight = weight.to(tl.float32)
        a = a.to(tl.float32)
    return tl.dot(weight, tl.trans(a), total)


@triton.jit
def _nvfp4_step(
    total: tl.tensor,
    parts: tl.tuple,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    group: tl.tensor,
    depth: tl.constexpr,
    block_k: tl.constexpr,
    wide: tl.constexpr,
    hopper: tl.constexpr,
) -> tl.tensor:
    """`total` [N, M] plus one tile of the weight by the activations, four of `_parts` [M, block_k / 4].

    `rows` [N] are those of the weight, `group` is the first that is read: see `nvfp4_words`.
    """
    groups: tl.constexpr = (depth + 63) // 64
    size: tl.constexpr = block_k // 64
    word = tl.arange(0, size * 8)  # [W]
    inside = present[:, None] & (group + word // 8 < groups)[None, :]  # [N, W]
    place = rows[:, None] * (groups * 8) + (group * 8 + word)[None, :]  # [N, W]
    words = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.uint32, bitcast=True)  # [N, W]
    each = group + tl.arange(0, size)  # [G]
    scale_place = rows[:, None] * groups + each[None, :]  # [N, G]
    inside = present[:, None] & (each < groups)[None, :]  # [N, G]
    scales = tl.load(scale_ptr + scale_place, mask=inside, other=0).to(tl.uint32, bitcast=True)  # [N, G]
    for block in tl.static_range(4):
        total = _dot(decode_block(words, scales, block, wide), parts[block], total, wide)
    if hopper:
        # Triton 3.6 lets Hopper's tensor cores read weights in registers when the next round of the loop may
        # already write there (triton-lang/triton#9433). A use of the result, of no instruction, ends that.
        total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1)
    return total


@triton.jit
def _parts(
    a_row: tl.tensor, inside: tl.tensor, start: tl.tensor, depth: tl.constexpr, block_k: tl.constexpr
) -> tl.tuple:
    """Of block_k activations from `start` on the blocks of 16 0, 4, 8..., then 1, 5, 9... and so on."""
    k = tl.arange(0, block_k // 4)  # [block_k / 4]
    place = start + k // 16 * 64 + k % 16  # [block_k / 4]
    parts: tl.tuple = ()
    for _ in tl.static_range(4):
        mask = inside[:, None] & (place < depth)[None, :]  # [M, block_k / 4]
        parts = parts + (tl.load(a_row + place[None, :], mask=mask, other=0.0),)
        place += 16
    return parts


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
        weight_ptr + rows[:, None] * depth + column[None, :],
        mask=present[:, None] & (column < depth)[None, :],
        other=0.0,
    )  # [N, block_k]
    return _dot(weight, values, total, wide)


@triton.jit
def expert_product(
    a_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    global_ptr: tl.tensor,
    out_ptr: tl.tensor,
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
    hopper: tl.constexpr,
) -> None:
    """One tile of ``out = act(a @ weight.T)``.

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
    total = tl.zeros((block_n, block_m), tl.float32)
    other = tl.zeros((block_n, block_m), tl.float32)
    a_row = a_ptr + source.to(tl.int64)[:, None] * depth  # [M, 1]
    for start in range(0, depth, block_k):
        if nvfp4:
            parts = _parts(a_row, inside, start, depth, block_k)
            group = start // 64
            total = _nvfp4_step(
                total, parts, weight_ptr, scale_ptr, weight_row, present, group, depth, block_k, wide, hopper
            )
            if gated:
                beside = weight_row + width
                other = _nvfp4_step(
                    other, parts, weight_ptr, scale_ptr, beside, present, group, depth, block_k, wide, hopper
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
    total = activate(total, other, activation)
    target = slot if second else row
    tl.store(
        out_ptr + target.to(tl.int64)[:, None] * width + column[None, :],
        tl.trans(total.to(tl.bfloat16)),
        mask=inside[:, None] & present[None, :],
    )


@triton.jit
def sum_slots(
    slots_ptr: tl.tensor,
    router_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """out [T, width]: the sum of a token's rows of slots [T * top_k, width] whose id is not negative.

    Each is multiplied by its weight of router [T * top_k].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)  # [block]
    inside = column < width
    total = tl.zeros((block,), tl.float32)
    for k in range(top_k):
        slot = token * top_k + k
        id = tl.load(ids_ptr + slot + tl.zeros_like(column))  # [block], the same id: a mask of one shape
        used = inside & (id >= 0)
        value = tl.load(slots_ptr + slot * width + column, mask=used, other=0.0).to(tl.float32)  # [block]
        total += value * tl.where(used, tl.load(router_ptr + slot), 0.0)
    tl.store(out_ptr + token * width + column, total.to(tl.bfloat16), mask=inside)
