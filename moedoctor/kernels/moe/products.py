"""The two matrix products of a MoE layer in tiles, for tokens that share an expert.

There are two kernels, because two uses need different inner loops:

- `slot_product` for the slots of an expert cache: weights in bfloat16, float16, float32 or FP8, with biases.
  Rows are sorted by `sort_kernel`. Programs go over slots and loop over the rows of the slot's expert. So a
  launch over the slots of one group of experts writes the rows of that group and no others: a call in groups
  sorts once, computes each row once, and adds up once.
- `block_product` for a whole layer: weights in bfloat16, float16, FP8 or NVFP4, with biases. Programs go over
  the blocks of `plan_kernel`, or over single pairs. It computes transposed, ``out.T = weight @ a.T``: tensor
  cores take their left operand from registers, so a decoded weight goes there as it is, and tokens, which may
  be few, are the narrow side.

Shapes: T tokens, K top_k, depth and width (columns of an input and of its result: H hidden size and I
intermediate size, or the reverse). In a tile: M tokens, N columns of the result and K of the depth (BLOCK_M,
BLOCK_N, BLOCK_K), W words of a weight, G groups of 64 NVFP4 weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.e4m3 import decode_bytes, decode_every_other
from moedoctor.kernels.moe.nvfp4_words import REMAINING_SCALE, decode_block
from moedoctor.kernels.moe.rows import activate, fetch, row_and_column, rows_of


@triton.jit
def _slot_dot(a: tl.tensor, weight: tl.tensor, total: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Return total [M, N] + a [M, K] @ weight.T [K, N]; `wide` if bfloat16 cannot be multiplied."""
    weight = decode_bytes(weight)
    if wide:
        total += tl.dot(a.to(tl.float32), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(weight.to(a.dtype)), total)
    return total


@triton.jit
def _slot_tile(
    row: tl.tensor,
    end: tl.tensor,
    slot: tl.tensor,
    column: tl.tensor,
    pointers: tl.tuple,
    top_k: tl.tensor,
    width: tl.constexpr,
    depth: tl.constexpr,
    kind: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Compute BLOCK_M rows from `row` on, if before `end`, and the columns `column` [N] of `slot_product`."""
    a_ptr, weight_ptr, scale_ptr, bias_ptr, order_ptr, out_ptr = pointers
    activation: tl.constexpr = kind[0]
    second: tl.constexpr = kind[1]
    has_scale: tl.constexpr = kind[2]
    has_bias: tl.constexpr = kind[3]
    gated: tl.constexpr = activation != "relu2" and activation != "none"
    height: tl.constexpr = 2 * width if gated else width
    present = (column < width) | (width % BLOCK_N == 0)  # [N]
    k = tl.arange(0, BLOCK_K)  # [K]
    weight_at = weight_ptr + (slot * height + column[:, None]) * depth + k[None, :]  # [N, K]
    line = row + tl.arange(0, BLOCK_M)  # [M]
    inside = line < end  # [M]
    source = line  # [M]
    if not second:
        source = tl.load(order_ptr + line, mask=inside, other=0) // top_k
    a_at = a_ptr + source.to(tl.int64)[:, None] * depth + k[None, :]  # [M, K]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        real = (start + k < depth) | (depth % BLOCK_K == 0)  # [K]
        weight = tl.load(weight_at + start, mask=present[:, None] & real[None, :], other=0.0)  # [N, K]
        a = tl.load(a_at + start, mask=inside[:, None] & real[None, :], other=0.0)  # [M, K]
        total = _slot_dot(a, weight, total, wide)
        if gated:
            up_at = weight_at + start + width * depth  # [N, K]
            weight = tl.load(up_at, mask=present[:, None] & real[None, :], other=0.0)
            up = _slot_dot(a, weight, up, wide)
    if has_scale:
        scale = tl.load(scale_ptr + slot)
        total *= scale
        up *= scale
    if has_bias:
        bias_at = bias_ptr + slot * height + column  # [N]
        total += tl.load(bias_at, mask=present, other=0.0).to(tl.float32)[None, :]
        if gated:
            up += tl.load(bias_at + width, mask=present, other=0.0).to(tl.float32)[None, :]
    value = activate(total, up, activation)  # [M, N]
    to_ptr = out_ptr + line.to(tl.int64)[:, None] * width + column[None, :]  # [M, N]
    tl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=inside[:, None] & present[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def slot_product(
    a_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_experts: tl.tensor,
    top_k: tl.tensor,
    width: tl.constexpr,
    depth: tl.constexpr,
    activation: tl.constexpr,
    second: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    mapped: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    splits: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Write ``out = act(a @ weight.T)`` [rows, width] for the rows of the experts in these slots.

    The first product reads tokens [T, depth], the second the rows that the first wrote. `weight` [slots,
    width, depth], or [slots, 2 * width, depth] with the gate above up. `mapped`: `experts` int32 [slots]
    holds the expert in each slot, -1 for none; otherwise slots are experts. Programs: slots * (width /
    BLOCK_N) * splits; `splits` of them share the rows of an expert, tile by tile. A tile has BLOCK_M rows, or
    TALL_M if more are left.
    """
    slot_row, part = row_and_column((width + BLOCK_N - 1) // BLOCK_N * splits)
    slot = slot_row.to(tl.int64)
    row, end = rows_of(slot, experts_ptr, ends_ptr, num_experts, mapped)
    row += part % splits * TALL_M
    column = part // splits * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    pointers = (a_ptr, weight_ptr, scale_ptr, bias_ptr, order_ptr, out_ptr)
    kind: tl.constexpr = (activation, second, has_scale, has_bias)
    while row < end:
        if TALL_M > BLOCK_M and end - row > BLOCK_M:
            _slot_tile(
                row, end, slot, column, pointers, top_k, width, depth, kind, TALL_M, BLOCK_N, BLOCK_K, wide
            )
        else:
            _slot_tile(
                row, end, slot, column, pointers, top_k, width, depth, kind, BLOCK_M, BLOCK_N, BLOCK_K, wide
            )
        row += TALL_M * splits


@triton.jit
def _block_dot(weight: tl.tensor, a: tl.tensor, total: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Return total [N, M] + weight [N, K] @ a.T [K, M]; `wide` if bfloat16 cannot be multiplied.

    The weight gets the type of `a`: NVFP4 weights are decoded as bfloat16, and float16 holds them exactly.
    """
    if wide:
        weight = weight.to(tl.float32)
        a = a.to(tl.float32)
    return tl.dot(weight.to(a.dtype), tl.trans(a), total)


@triton.jit
def _nvfp4_parts(
    a_row: tl.tensor, inside: tl.tensor, start: tl.tensor, depth: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tuple:
    """Load BLOCK_K activations from `start` on: the blocks of 16 numbered 0, 4, 8..., then 1, 5, 9..."""
    k = tl.arange(0, BLOCK_K // 4)  # [BLOCK_K / 4]
    place = start + k // 16 * 64 + k % 16  # [BLOCK_K / 4]
    parts: tl.tuple = ()
    for _ in tl.static_range(4):
        mask = inside[:, None] & (place < depth)[None, :]  # [M, BLOCK_K / 4]
        parts = parts + (tl.load(a_row + place[None, :], mask=mask, other=0.0),)
        place += 16
    return parts


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
    BLOCK_K: tl.constexpr,
    wide: tl.constexpr,
    hopper: tl.constexpr,
) -> tl.tensor:
    """Return `total` [N, M] plus one tile of the weight by the activations, four of `parts` [M, BLOCK_K / 4].

    `rows` [N] are those of the weight, `group` is the first to read: see `nvfp4_words`.
    """
    groups: tl.constexpr = (depth + 63) // 64
    size: tl.constexpr = BLOCK_K // 64
    word = tl.arange(0, size * 8)  # [W]
    inside = present[:, None] & (group + word // 8 < groups)[None, :]  # [N, W]
    place = rows[:, None] * (groups * 8) + (group * 8 + word)[None, :]  # [N, W]
    words = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.uint32, bitcast=True)  # [N, W]
    each = group + tl.arange(0, size)  # [G]
    scale_place = rows[:, None] * groups + each[None, :]  # [N, G]
    inside = present[:, None] & (each < groups)[None, :]  # [N, G]
    scales = tl.load(scale_ptr + scale_place, mask=inside, other=0).to(tl.uint32, bitcast=True)  # [N, G]
    for block in tl.static_range(4):
        total = _block_dot(decode_block(words, scales, block, wide), parts[block], total, wide)
    return _finished(total, hopper)


@triton.jit
def _finished(total: tl.tensor, hopper: tl.constexpr) -> tl.tensor:
    """Return `total` after the tensor cores have read the decoded weights.

    Triton 3.6 lets Hopper's tensor cores read weights in registers when the next round of the loop may
    already write there (triton-lang/triton#9433). A use of the result, of no instruction, ends that.
    """
    if hopper:
        total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1)
    return total


@triton.jit
def _plain_step(
    total: tl.tensor,
    values: tl.tensor,
    weight_ptr: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    start: tl.tensor,
    depth: tl.constexpr,
    BLOCK_K: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    """Return `total` [N, M] plus one tile of the weight by the activations `values` [M, BLOCK_K]."""
    column = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    weight = tl.load(
        weight_ptr + rows[:, None] * depth + column[None, :],
        mask=present[:, None] & (column < depth)[None, :],
        other=0.0,
    )  # [N, BLOCK_K]
    return _block_dot(weight, values, total, wide)


@triton.jit
def _fp8_step(
    total: tl.tensor,
    values: tl.tensor,
    weight: tl.tuple,
    start: tl.tensor,
    depth: tl.constexpr,
    scale_columns: tl.constexpr,
    BLOCK_K: tl.constexpr,
    wide: tl.constexpr,
    hopper: tl.constexpr,
) -> tl.tensor:
    """As `_plain_step` with E4M3 weights, four in a word of int32.

    `weight`: its pointer, rows [N], which are present [N], and `scale_at` [N], pointers to the first scale of
    each row. A scale is for `scale_columns` columns of the weight. If those are all, it comes last.
    """
    weight_ptr, rows, present, scale_at = weight
    word = start // 4 + tl.arange(0, BLOCK_K // 4)  # [W]
    inside = present[:, None] & (word < depth // 4)[None, :]  # [N, W]
    place = rows[:, None] * (depth // 4) + word[None, :]  # [N, W]
    words = tl.load(weight_ptr + place, mask=inside, other=0).to(tl.uint32, bitcast=True)  # [N, W]
    half: tl.constexpr = values.dtype == tl.float16
    even = decode_every_other(words, 0, half, wide)  # [N, BLOCK_K / 2]
    odd = decode_every_other(words, 1, half, wide)  # [N, BLOCK_K / 2]
    at_end: tl.constexpr = scale_columns >= depth
    added = total if at_end else tl.zeros_like(total)  # [N, M]
    if BLOCK_K >= 32:
        # Two dots: to put the columns back in order, threads would have to exchange weights.
        even_values, odd_values = tl.split(tl.reshape(values, (values.shape[0], BLOCK_K // 2, 2)))
        added = _block_dot(odd, odd_values, _block_dot(even, even_values, added, wide), wide)
    else:  # tensor cores take no fewer than 16 columns
        joined = tl.reshape(tl.join(even, odd), (words.shape[0], BLOCK_K))  # [N, BLOCK_K]
        added = _block_dot(joined, values, added, wide)
    if not at_end:
        scale = tl.load(scale_at + start // scale_columns, mask=present, other=0.0)  # [N]
        added = total + added * scale[:, None]
    return _finished(added, hopper)


@triton.jit(do_not_specialize=["pairs"])
def block_product(
    a_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    global_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    pairs: tl.tensor,
    width: tl.constexpr,
    depth: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    activation: tl.constexpr,
    quantization: tl.constexpr,
    scales: tl.constexpr,
    has_bias: tl.constexpr,
    planned: tl.constexpr,
    second: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    depth_splits: tl.constexpr,
    wide: tl.constexpr,
    hopper: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Write one tile of ``out = act(a @ weight.T + bias)``.

    `width` is the width of `out`, `depth` that of `a`. The first product reads tokens [T, depth] and writes
    rows in the order of experts; the second reads those and writes a row for each pair. `plan` [B, 3] holds
    expert, first row and rows of each block of tokens; without it each pair is a block. `quantization` is
    ``none``, ``fp8`` or ``nvfp4``. `scales`: see `ExpertWeights.scale_layout`. `depth_splits` programs share
    the depth of the second product, each with an `out` [pairs, width] of its own, one after another.
    `early`: see `Tile.early`. Programs: (width / BLOCK_N, B, depth_splits).
    """
    # A launch begins when every program of the one before has waited, so all launches before that have ended.
    if early and not second:
        if planned:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Two dimensions: with one, ptxas unrolls the loop of the second product and needs too many registers.
    block, part = tl.program_id(1), tl.program_id(0)
    offset = tl.arange(0, BLOCK_M)  # [M]
    if planned:
        expert = tl.load(plan_ptr + block * 3).to(tl.int64)
        row = tl.load(plan_ptr + block * 3 + 1) + offset  # [M]
        rows = tl.load(plan_ptr + block * 3 + 2)
    else:
        expert = tl.load(ids_ptr + block).to(tl.int64)
        expert = tl.where(expert < num_experts, expert, -1)
        row = block + offset  # [M]
        rows = 1
    gated: tl.constexpr = activation != "relu2" and activation != "none"
    height: tl.constexpr = width * 2 if gated else width
    if early and second:
        if expert >= 0:
            first_row = expert * height + part * BLOCK_N
            count = tl.minimum(width - part * BLOCK_N, BLOCK_N)
            if quantization == "nvfp4":
                groups: tl.constexpr = (depth + 63) // 64
                fetch(weight_ptr + first_row * (groups * 8), 0, count * (groups * 32), BLOCK_N * groups * 32)
                fetch(scale_ptr + first_row * groups, 0, count * (groups * 4), BLOCK_N * groups * 4)
            else:
                size: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
                columns: tl.constexpr = depth // 4 if quantization == "fp8" else depth
                fetch(weight_ptr + first_row * columns, 0, count * (columns * size), BLOCK_N * columns * size)
        # Also without work: else the sum might end before the first product has.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if expert < 0:
        return
    inside = offset < rows
    pair = tl.load(order_ptr + row, mask=inside, other=0) if planned else row  # [M]
    source = row if second else pair // top_k  # [M]
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    present = column < width
    weight_row = expert * height + column  # [N]
    up_row = weight_row + width  # [N]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    a_row = a_ptr + source.to(tl.int64)[:, None] * depth  # [M, 1]
    halves: tl.constexpr = scales[0]
    scale_rows: tl.constexpr = scales[1]
    scale_columns: tl.constexpr = scales[2]
    high: tl.constexpr = (height // halves + scale_rows - 1) // scale_rows
    across: tl.constexpr = (depth + scale_columns - 1) // scale_columns
    # Rows of a half have scales of their own, also if the half ends inside a block.
    scale_at = global_ptr + (expert * (halves * high) + column // scale_rows) * across  # [N]
    up_at = scale_at  # [N]
    if gated:
        if halves == 2:
            up_at = scale_at + high * across
        else:
            up_at = global_ptr + (expert * high + (column + width) // scale_rows) * across
    begin = tl.program_id(2) * 0
    end = begin + depth
    if depth_splits > 1:
        span: tl.constexpr = (depth + BLOCK_K * depth_splits - 1) // (BLOCK_K * depth_splits) * BLOCK_K
        begin = tl.program_id(2) * span
        end = tl.minimum(begin + span, depth)
    for start in range(begin, end, BLOCK_K):
        if quantization == "nvfp4":
            parts = _nvfp4_parts(a_row, inside, start, depth, BLOCK_K)
            group = start // 64
            total = _nvfp4_step(
                total, parts, weight_ptr, scale_ptr, weight_row, present, group, depth, BLOCK_K, wide, hopper
            )
            if gated:
                up = _nvfp4_step(
                    up, parts, weight_ptr, scale_ptr, up_row, present, group, depth, BLOCK_K, wide, hopper
                )
        else:
            k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            values = tl.load(a_row + k[None, :], mask=inside[:, None] & (k < depth)[None, :], other=0.0)
            if quantization == "fp8":
                weight = (weight_ptr, weight_row, present, scale_at)
                total = _fp8_step(total, values, weight, start, depth, scale_columns, BLOCK_K, wide, hopper)
                if gated:
                    weight = (weight_ptr, up_row, present, up_at)
                    up = _fp8_step(up, values, weight, start, depth, scale_columns, BLOCK_K, wide, hopper)
            else:
                total = _plain_step(
                    total, values, weight_ptr, weight_row, present, start, depth, BLOCK_K, wide
                )
                if gated:
                    up = _plain_step(up, values, weight_ptr, up_row, present, start, depth, BLOCK_K, wide)
    if quantization != "none" and scale_columns >= depth:
        remaining: tl.constexpr = REMAINING_SCALE if quantization == "nvfp4" else 1.0
        total *= tl.load(scale_at, mask=present, other=0.0)[:, None] * remaining
        if gated:
            up *= tl.load(up_at, mask=present, other=0.0)[:, None] * remaining
    if has_bias:
        bias_at = bias_ptr + weight_row  # [N]
        once = column < tl.where(begin == 0, width, 0)  # [N]
        total += tl.load(bias_at, mask=once, other=0.0).to(tl.float32)[:, None]
        if gated:
            up += tl.load(bias_at + width, mask=present, other=0.0).to(tl.float32)[:, None]
    total = activate(total, up, activation)
    target = pair if second else row
    if depth_splits > 1:
        out_ptr += tl.program_id(2).to(tl.int64) * pairs * width
    tl.store(
        out_ptr + target.to(tl.int64)[:, None] * width + column[None, :],
        tl.trans(total.to(out_ptr.dtype.element_ty)),
        mask=inside[:, None] & present[None, :],
    )
