"""An NVFP4 MoE layer for few tokens: each pair reads the weights of its expert once, in two launches.

Matrix-vector products with sums in float32. Tensor cores would compute with 16 tokens where there is one, and
a program of theirs waits for one step of the sum after the other. Here a program asks for the weights of a
step before it uses those of the step before. The second launch adds up a token's experts, so nothing is left
to a third. With `expert_splits` several programs share a token's experts, and the last to end adds up, always
in the same order.

Decoded codes are as small as 2**-127, so their products with small values are subnormal numbers, which have
fewer bits. What a layer computes with comes out of a norm and is near 1; values between the products may be
far smaller, and are kept `larger` times as large if they are bfloat16, which has room for that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.nvfp4_words import REMAINING_SCALE, add_block
from moedoctor.kernels.moe.rows import activate, row_and_column


@triton.jit
def _load_words(
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    first: tl.tensor,
    depth: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tuple:
    """Return (words uint32 [N, 8 * GROUPS], scales uint32 [N, 2 * GROUPS]) of `rows` from group `first` on.

    The scales of a group come twice, so that a thread with half of its words need not ask another thread.
    """
    groups: tl.constexpr = (depth + 63) // 64
    word = first * 8 + tl.arange(0, GROUPS * 8)  # [W]
    inside = present[:, None] & (word < groups * 8)[None, :]  # [N, W]
    words = tl.load(weight_ptr + rows[:, None] * (groups * 8) + word[None, :], mask=inside, other=0)
    group = first + tl.arange(0, GROUPS * 2) // 2  # [2 * G]
    inside = present[:, None] & (group < groups)[None, :]  # [N, 2 * G]
    scales = tl.load(scale_ptr + rows[:, None] * groups + group[None, :], mask=inside, other=0)
    return words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)


@triton.jit
def _places(first: tl.tensor, block: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Return [16 * GROUPS]: where the weights of one block of each group are in a row."""
    k = tl.arange(0, GROUPS * 16)  # [16 * G]
    return (first + k // 16) * 64 + block * 16 + k % 16


@triton.jit
def _load_values(
    h_row: tl.tensor,
    real: tl.tensor,
    first: tl.tensor,
    block: tl.constexpr,
    depth: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return [L, 16 * GROUPS] of the rows [L, 1]: the values for one block of each group from `first` on."""
    place = _places(first, block, GROUPS)  # [16 * G]
    return tl.load(h_row + place[None, :], mask=real[:, None] & (place < depth)[None, :], other=0.0)


@triton.jit
def _load_step(
    h_row: tl.tensor, real: tl.tensor, first: tl.tensor, depth: tl.constexpr, GROUPS: tl.constexpr
) -> tl.tuple:
    """Return what `_load_values` does for each of the four blocks."""
    return (
        _load_values(h_row, real, first, 0, depth, GROUPS),
        _load_values(h_row, real, first, 1, depth, GROUPS),
        _load_values(h_row, real, first, 2, depth, GROUPS),
        _load_values(h_row, real, first, 3, depth, GROUPS),
    )


@triton.jit
def _add_step(sums: tl.tensor, words: tl.tuple, values: tl.tuple) -> tl.tensor:
    """Return `sums` [N, 2 * G] plus the products of a step's `words` and `values`, four of [L, 16 * G].

    Row n of the words is multiplied by row ``n % L`` of the values. L is as many rows as all threads hold at
    a time, or a multiple of it, so that each has what it needs: else steps would wait for shared memory.
    """
    rows: tl.constexpr = sums.shape[0]
    lanes: tl.constexpr = values[0].shape[0]
    width: tl.constexpr = values[0].shape[1]
    for block in tl.static_range(4):
        part = values[block].to(tl.float32)  # [L, 16 * G]
        repeated = tl.broadcast_to(part[None, :, :], (rows // lanes, lanes, width))
        repeated = tl.reshape(repeated, (rows, width))  # [N, 16 * G]
        sums = add_block(sums, words[0], words[1], block, repeated)
    return sums


@triton.jit
def _zero_share(
    ended_ptr: tl.tensor, count: tl.constexpr, program: tl.tensor, programs: tl.constexpr
) -> None:
    """Write zeros to this program's share of `count` numbers, which `programs` programs divide."""
    each: tl.constexpr = (count + programs - 1) // programs
    place = tl.arange(0, triton.next_power_of_2(each))
    index = program * each + place
    tl.store(ended_ptr + index, tl.zeros_like(index), mask=(place < each) & (index < count))


@triton.jit
def nvfp4_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    activation: tl.constexpr,
    halves: tl.constexpr,
    has_bias: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    larger: tl.constexpr,
    early: tl.constexpr,
    columns_ended: tl.constexpr,
) -> None:
    """Write `out` [T * K, I]: the activated first product of each pair with an expert, times `larger`.

    `weight` and `block_scale` are those of `pack_words` for [E, 2I, H], gate above up, or [E, I, H] for
    ``relu2``; `scale` [E * halves]. LANES: rows of the weight that all threads hold at a time. `early`: the
    next launch may begin, for which zeros are written to int32 `ended_ptr` [T, columns_ended]. Programs:
    T * K * (I / BLOCK_N).
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    parts: tl.constexpr = (intermediate_size + BLOCK_N - 1) // BLOCK_N
    pair, part = row_and_column(parts)
    if columns_ended > 0:
        of_token = ended_ptr + pair // top_k * columns_ended
        _zero_share(of_token, columns_ended, pair % top_k * parts + part, top_k * parts)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert >= 0) & (expert < num_experts):
        gated: tl.constexpr = activation != "relu2"
        height: tl.constexpr = 2 * intermediate_size if gated else intermediate_size
        groups: tl.constexpr = (hidden_size + 63) // 64
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
        present = column < intermediate_size  # [N]
        row = expert * height + column  # [N]
        token_ptr = x_ptr + (pair // top_k).to(tl.int64) * hidden_size
        x_row = token_ptr + tl.zeros([LANES], tl.int32)[:, None]  # [L, 1]: the same row L times
        everywhere = tl.full([LANES], True, tl.int1)  # [L]
        gate_sums = tl.zeros([BLOCK_N, GROUPS * 2], tl.float32)
        up_sums = tl.zeros([BLOCK_N, GROUPS * 2], tl.float32)
        up_row = row + intermediate_size  # [N]
        # What the end needs is asked for here, where nothing waits for it.
        gate_scale = tl.load(scale_ptr + expert * halves) * REMAINING_SCALE
        up_scale = gate_scale
        gate_bias = tl.zeros([BLOCK_N], tl.float32)
        up_bias = gate_bias
        if has_bias:
            gate_bias = tl.load(bias_ptr + row, mask=present, other=0.0).to(tl.float32)  # [N]
        if gated:
            up_scale = tl.load(scale_ptr + expert * halves + (halves - 1)) * REMAINING_SCALE
            if has_bias:
                up_bias = tl.load(bias_ptr + up_row, mask=present, other=0.0).to(tl.float32)  # [N]
        next_gate = _load_words(weight_ptr, block_scale_ptr, row, present, 0, hidden_size, GROUPS)
        next_up = next_gate
        if gated:
            next_up = _load_words(weight_ptr, block_scale_ptr, up_row, present, 0, hidden_size, GROUPS)
        for first in range(0, groups, GROUPS):
            gate_words, up_words = next_gate, next_up
            # The next step's weights are asked for before this step's are used.
            if groups > GROUPS:
                after = first + GROUPS
                next_gate = _load_words(weight_ptr, block_scale_ptr, row, present, after, hidden_size, GROUPS)
                if gated:
                    next_up = _load_words(
                        weight_ptr, block_scale_ptr, up_row, present, after, hidden_size, GROUPS
                    )
            x = _load_step(x_row, everywhere, first, hidden_size, GROUPS)
            gate_sums = _add_step(gate_sums, gate_words, x)
            if gated:
                up_sums = _add_step(up_sums, up_words, x)
        gate = tl.sum(gate_sums, axis=1) * gate_scale + gate_bias  # [N]
        up = tl.sum(up_sums, axis=1) * up_scale + up_bias  # [N]
        value = activate(gate, up, activation) * larger  # [N]
        to_ptr = out_ptr + pair.to(tl.int64) * intermediate_size + column  # [N]
        tl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=present)


@triton.jit
def _lines(
    ids_ptr: tl.tensor,
    token: tl.tensor,
    lane: tl.tensor,
    column: tl.tensor,
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
) -> tl.tuple:
    """Return for column `column` of the token's expert `lane`: the expert, whether there is one, the row."""
    expert = tl.load(ids_ptr + token * top_k + lane, mask=lane < top_k, other=-1).to(tl.int64)
    held = (expert >= 0) & (expert < num_experts)
    expert = tl.where(held, expert, 0)
    return expert, held, expert * hidden_size + column


@triton.jit
def _factors(
    scale_ptr: tl.tensor, topk_weights_ptr: tl.tensor, lines: tl.tuple, place: tl.tensor
) -> tl.tuple:
    """Return what products of `lines` are multiplied by: the scale of the weight, the weight of the pair."""
    scale = tl.load(scale_ptr + lines[0], mask=lines[1], other=0.0)
    return scale, tl.load(topk_weights_ptr + place, mask=lines[1], other=0.0).to(tl.float32)


@triton.jit
def nvfp4_down_kernel(
    h_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    topk_weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    has_bias: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    expert_splits: tl.constexpr,
    ahead: tl.constexpr,
    larger: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Write `out` [T, H]: the sum over a token's experts of topk_weight times second product, in float32.

    `h` [T * K, I], times `larger`; `weight` and `block_scale` are those of `pack_words` for [E, H, I];
    `scale` [E]; `topk_weights` [T, K]. LANES: the experts of a token that a step takes, a power of two.
    `ahead`: values too are asked for a step ahead. `early`: the launch begins before `h` is there, and asks
    for weights meanwhile. `expert_splits` programs share the experts of a token; they need room for their
    sums in float32 `partial_ptr` [T, splits, H], and zeros in int32 `ended_ptr` [T, H / BLOCK_N]. Programs:
    T * (H / BLOCK_N) * splits.
    """
    groups: tl.constexpr = (intermediate_size + 63) // 64
    steps: tl.constexpr = (groups + GROUPS - 1) // GROUPS
    turns: tl.constexpr = (top_k + LANES * expert_splits - 1) // (LANES * expert_splits)
    parts: tl.constexpr = (hidden_size + BLOCK_N - 1) // BLOCK_N
    token_row, piece = row_and_column(parts * expert_splits)
    part, split = piece // expert_splits, piece % expert_splits
    token = token_row.to(tl.int64)
    # One row of the tile for each column of the result and lane; lanes are the faster of the two.
    line = tl.arange(0, BLOCK_N * LANES)  # [N * L]
    start = split * (turns * LANES)
    lane, column = start + line % LANES, part * BLOCK_N + line // LANES  # [N * L] each
    each = start + tl.arange(0, LANES)  # [L]
    lines = _lines(ids_ptr, token, lane, column, top_k, num_experts, hidden_size)
    present = lines[1] & (column < hidden_size)  # [N * L]
    following = _load_words(weight_ptr, block_scale_ptr, lines[2], present, 0, intermediate_size, GROUPS)
    factors = _factors(scale_ptr, topk_weights_ptr, lines, token * top_k + lane)  # [N * L] each
    real = _lines(ids_ptr, token, each, each, top_k, num_experts, hidden_size)[1]  # [L]
    if early:
        tl.extra.cuda.gdc_wait()
    # Values and weights of the next step are asked for before those of this step are used.
    h_row = h_ptr + (token * top_k + each)[:, None] * intermediate_size  # [L, 1]
    next_h = _load_step(h_row, real, 0, intermediate_size, GROUPS)
    total = tl.zeros([BLOCK_N * LANES, GROUPS * 2], tl.float32)
    biases = tl.zeros([BLOCK_N * LANES], tl.float32)
    for turn in tl.static_range(turns):
        row, now = lines[2], present  # [N * L] each
        scale, share = factors
        sums = tl.zeros([BLOCK_N * LANES, GROUPS * 2], tl.float32)
        if steps > 1:
            for step in range(1, steps):
                words, h, first = following, next_h, step * GROUPS
                following = _load_words(
                    weight_ptr, block_scale_ptr, row, now, first, intermediate_size, GROUPS
                )
                if ahead:
                    next_h = _load_step(h_row, real, first, intermediate_size, GROUPS)
                else:
                    h = _load_step(h_row, real, first - GROUPS, intermediate_size, GROUPS)
                sums = _add_step(sums, words, h)
        words, h = following, next_h
        if not ahead:
            h = _load_step(h_row, real, (steps - 1) * GROUPS, intermediate_size, GROUPS)
        if turn + 1 < turns:
            after = (turn + 1) * LANES
            lines = _lines(ids_ptr, token, after + lane, column, top_k, num_experts, hidden_size)
            present = lines[1] & (column < hidden_size)
            following = _load_words(
                weight_ptr, block_scale_ptr, lines[2], present, 0, intermediate_size, GROUPS
            )
            factors = _factors(scale_ptr, topk_weights_ptr, lines, token * top_k + after + lane)
            real = _lines(ids_ptr, token, after + each, each, top_k, num_experts, hidden_size)[1]
            h_row += LANES * intermediate_size
            if ahead:
                next_h = _load_step(h_row, real, 0, intermediate_size, GROUPS)
        sums = _add_step(sums, words, h)
        factor = scale * (REMAINING_SCALE / larger) * share  # [N * L]
        total = tl.fma(sums, tl.broadcast_to(factor[:, None], sums.shape), total)
        if has_bias:
            biases += share * tl.load(bias_ptr + row, mask=now, other=0.0).to(tl.float32)
    result = tl.sum(total, axis=1) + biases  # [N * L]
    result = tl.sum(tl.reshape(result, (BLOCK_N, LANES)), axis=1)  # [N]
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    to_ptr = out_ptr + token * hidden_size + column  # [N]
    inside = column < hidden_size  # [N]
    if expert_splits == 1:
        tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        partial_row = partial_ptr + token * (expert_splits * hidden_size) + column  # [N]
        tl.store(partial_row + split * hidden_size, result, mask=inside)
        tl.debug_barrier()  # all threads have written before one of them says so
        before = tl.atomic_add(ended_ptr + token * parts + part, 1, sem="acq_rel", scope="gpu")
        if before == expert_splits - 1:
            result = tl.zeros([BLOCK_N], tl.float32)
            for other in tl.static_range(expert_splits):
                # Past the L1 cache, which does not see what other programs write.
                result += tl.load(
                    partial_row + other * hidden_size, mask=inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=inside)
