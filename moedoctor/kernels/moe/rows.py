"""The kernels around the matrix products of a MoE layer: pairs grouped by expert, activation, weighted sum.

A pair is one token with one of its experts; pair p belongs to token p // top_k. An id below 0, or from the
number of experts or slots on, is no expert: no kernel reads a weight, a scale or a row for it, and its pair
adds nothing.

Shapes: T tokens, K top_k, E experts, pairs = T * K, CHUNK ids that are read at once. A row is a place in the
order by expert.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_and_column(columns: tl.constexpr) -> tl.tuple:
    """Return the row and the column of this program in a grid of `columns` columns, one row after another.

    Such a grid has one dimension, because the second and third of CUDA's end at 65,535.
    """
    program = tl.program_id(0)
    return program // columns, program % columns


@triton.jit
def fetch(at: tl.tensor, first: tl.tensor, end: tl.tensor, most: tl.constexpr) -> None:
    """Ask for bytes `first` to `end` from the pointer `at` on, at most `most`, in the L2 cache.

    Nothing waits for them.
    """
    lines: tl.constexpr = triton.next_power_of_2((most + 127) // 128)
    offset = tl.minimum(first + tl.arange(0, lines) * 128, end - 1)  # [lines], bytes
    address = at.to(tl.int64) + offset
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def activate(gate: tl.tensor, up: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """Return act(gate) * up for ``silu``, ``gelu`` or ``gelu_tanh``; ``relu2`` of `gate`; or `gate`."""
    if activation == "silu":
        value = gate * tl.sigmoid(gate) * up
    elif activation == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif activation == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        value = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)) * up
    elif activation == "relu2":
        positive = tl.maximum(gate, 0.0)
        value = positive * positive
    else:
        value = gate
    return value


@triton.jit
def _count_pairs(ids_ptr: tl.tensor, pairs: tl.tensor, expert: tl.tensor, CHUNK: tl.constexpr) -> tl.tuple:
    """Return (pairs of the experts below `expert`, pairs of `expert`). Ids below 0 are no expert."""
    place = tl.arange(0, CHUNK)  # [CHUNK]
    lower = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    start = pairs * 0
    while start < pairs:
        # In their own type: an id that int32 cannot hold would be another expert's.
        ids = tl.load(ids_ptr + start + place, mask=start + place < pairs, other=-1)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        equal += (ids == expert).to(tl.int32)
        start += CHUNK
    return tl.sum(lower, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _write_order(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_ptr: tl.tensor,
    pairs: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    has_row: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the pairs of `expert` to `order` from row `first` on, and with `has_row` the row of each pair."""
    place = tl.arange(0, CHUNK)  # [CHUNK]
    start = pairs * 0
    while start < pairs:
        ids = tl.load(ids_ptr + start + place, mask=start + place < pairs, other=-1)
        hit = (ids == expert).to(tl.int32)  # [CHUNK]
        row = first + tl.cumsum(hit, axis=0) - 1  # [CHUNK]
        tl.store(order_ptr + row, start + place, mask=hit != 0)
        if has_row:
            tl.store(row_ptr + start + place, row, mask=hit != 0)
        first += tl.sum(hit, axis=0)
        start += CHUNK


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    pairs: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Sort the pairs by expert: a stable counting sort of `ids` [pairs], one program an expert.

    Writes `order` [pairs], the pairs by expert; `row` [pairs], the row of each pair; `ends` int32 [E], the
    end of each expert's rows. Pairs whose id is not an expert are left out: their places in `row`, and the
    last ones of `order`, are not written.

    Example: three experts, ids [[2, 0], [-1, 2], [0, 2]], so pairs 0 to 5 have 2, 0, -1, 2, 0, 2. Then
    order = [1, 4, 0, 3, 5, ?], row = [2, 0, ?, 3, 1, 4] and ends = [2, 2, 5].
    """
    expert = tl.program_id(0)
    first, number = _count_pairs(ids_ptr, pairs, expert, CHUNK)
    tl.store(ends_ptr + expert, first + number)
    if number > 0:
        _write_order(ids_ptr, order_ptr, row_ptr, pairs, expert, first, True, CHUNK)


@triton.jit
def rows_of(
    slot: tl.tensor,
    experts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_experts: tl.tensor,
    mapped: tl.constexpr,
) -> tl.tuple:
    """Return (first, end) of the rows of the expert in `slot`, in the order of `sort_kernel`.

    Both are 0 if `experts` holds no expert for the slot.
    """
    expert = slot.to(tl.int32)
    if mapped:
        expert = tl.load(experts_ptr + slot)
        expert = tl.where(expert < num_experts, expert, -1)
    end = tl.load(ends_ptr + expert, mask=expert >= 0, other=0)
    return tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), end


@triton.jit
def plan_kernel(
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_experts: tl.constexpr,
    by_row: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Sort the pairs by expert and divide them into blocks, one program an expert.

    Writes `order` [pairs] as `sort_kernel` does, and `plan` int32 [blocks, 3]: (expert or -1, first row,
    rows). Every expert has a piece of the plan that is long enough whatever the others have, so that programs
    need not wait for each other: a block for each of its rows (`by_row`), or the full blocks that its rows
    can end and one more. `early`: see `Tile.early`.

    Example, the ids of `sort_kernel`'s with BLOCK_M = 2: `plan_blocks` makes 6 // 2 + 3 = 6 blocks. Experts
    0, 1, 2 have rows 0-1, none and 2-4. Their pieces are blocks 0-1, 2 and 3-5, because an expert's first
    block is its first row // 2 + its number. So plan is [0, 0, 2], -1, -1, [2, 2, 2], [2, 4, 1], -1.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    row, number = _count_pairs(ids_ptr, pairs, expert, CHUNK)
    block = row if by_row else row // BLOCK_M + expert
    stop = row + number if by_row else (row + number) // BLOCK_M + expert + 1
    if expert == num_experts - 1:
        stop = blocks
    done = number * 0
    while block < stop:
        tl.store(plan_ptr + block * 3, tl.where(done < number, expert, -1))
        tl.store(plan_ptr + block * 3 + 1, row + done)
        tl.store(plan_ptr + block * 3 + 2, tl.minimum(number - done, BLOCK_M))
        done += BLOCK_M
        block += 1
    if number > 0:
        _write_order(ids_ptr, order_ptr, order_ptr, pairs, expert, row, False, CHUNK)


@triton.jit(do_not_specialize=["num_experts"])
def sum_kernel(
    product_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    row_ptr: tl.tensor,
    topk_weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_experts: tl.tensor,
    top_k: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    has_row: tl.constexpr,
    adds: tl.constexpr,
    BLOCK_N: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Write `out` [T, width]: the weighted sum over a token's experts, in the order of its ids, in float32.

    `product` [parts, pairs, width] has a row for each pair, with `has_row` at the row of `sort_kernel`; the
    parts are added. Pairs whose id is not an expert are left out. `adds`: adds to the values in `out`.
    `early`: see `Tile.early`. Programs: T * (width / BLOCK_N).
    """
    if early:
        tl.extra.cuda.gdc_wait()
    token_row, column_block = row_and_column((width + BLOCK_N - 1) // BLOCK_N)
    pairs = tl.num_programs(0).to(tl.int64) // ((width + BLOCK_N - 1) // BLOCK_N) * top_k
    token = token_row.to(tl.int64)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = column < width
    total = tl.zeros([BLOCK_N], tl.float32)
    for lane in tl.static_range(top_k):
        pair = token * top_k + lane
        expert = tl.load(ids_ptr + pair)
        known = (expert >= 0) & (expert < num_experts)
        row = pair
        if has_row:
            row = tl.load(row_ptr + pair, mask=known, other=0).to(tl.int64)
        # A mask and no branch, so that the loads of all lanes can be under way at once.
        mask = column < tl.where(known, width, 0)  # [BLOCK_N]
        value = tl.load(product_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        for part in tl.static_range(1, parts):
            value += tl.load(product_ptr + (part * pairs + row) * width + column, mask=mask, other=0.0)
        total += value * tl.load(topk_weights_ptr + pair, mask=known, other=0.0).to(tl.float32)
    to_ptr = out_ptr + token * width + column  # [BLOCK_N]
    if adds:
        total += tl.load(to_ptr, mask=inside, other=0.0)
    tl.store(to_ptr, total.to(out_ptr.dtype.element_ty), mask=inside)
