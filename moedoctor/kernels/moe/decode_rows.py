"""A MoE layer for few tokens: each pair reads the weights of its expert once, in two launches.

Matrix-vector products with sums in float32. Tensor cores would compute with 16 tokens where there is one, and
a program of theirs waits for one step of the sum after the other. Here a program asks for the weights of a
step before it uses those of the step before. The second launch adds up a token's experts, so nothing is left
to a third. With `expert_splits` several programs share a token's experts, and the last to end adds up, always
in the same order.

Eight words of a row are a group, of which a thread has one half, 16 bytes: 64 NVFP4 weights in four blocks,
see `nvfp4_words`, or 32 FP8 weights, two blocks of 8 in each half. Both are decoded 2**8 times too small.

Decoded NVFP4 codes are as small as 2**-127, so their products with small values are subnormal numbers, which
have fewer bits. What a layer computes with comes out of a norm and is near 1; values between the products may
be far smaller, and are kept `larger` times as large if they are bfloat16, which has room for that.

Shapes: T tokens, K top_k, E experts, H hidden size, I intermediate size. In a program: N columns of the
result (BLOCK_N), G groups of a step (GROUPS), W = 8 * G words, L lanes (rows of values, an expert each).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe import e4m3
from moedoctor.kernels.moe.nvfp4_words import REMAINING_SCALE, add_block
from moedoctor.kernels.moe.rows import activate, row_and_column


@triton.jit
def _load_words(
    weight_ptr: tl.tensor,
    scale_row: tl.tensor,
    rows: tl.tensor,
    present: tl.tensor,
    first: tl.tensor,
    shape: tl.constexpr,
) -> tl.tuple:
    """Return (words uint32 [N, 8 * G], scales [N, 2 * G]) of `rows` from group `first` on.

    `shape`: depth, GROUPS, quantization and `ExpertWeights.scale_layout` of the weight.
    `scale_row` [N] points to the first scale of each row. The scales of an NVFP4 group, uint32, come twice,
    so that a thread with half of its words need not ask another thread. FP8 has a float32 for each half if
    a scale is for some `columns` only. Else they are zeros [1].
    """
    depth: tl.constexpr = shape[0]
    groups: tl.constexpr = shape[1]
    quantization: tl.constexpr = shape[2]
    columns: tl.constexpr = shape[3][2]
    width: tl.constexpr = (depth + 63) // 64 * 8 if quantization == "nvfp4" else depth // 4
    word = first * 8 + tl.arange(0, groups * 8)  # [W]
    inside = present[:, None] & (word < width)[None, :]  # [N, W]
    words = tl.load(weight_ptr + rows[:, None] * width + word[None, :], mask=inside, other=0)
    if quantization == "nvfp4":
        group = first + tl.arange(0, groups * 2) // 2  # [2 * G]
        inside = present[:, None] & (group < width // 8)[None, :]  # [N, 2 * G]
        loaded = tl.load(scale_row[:, None] + group[None, :], mask=inside, other=0)
        scales = loaded.to(tl.uint32, bitcast=True)
    elif columns < depth:
        column = first * 32 + tl.arange(0, groups * 2) * 16  # [2 * G]
        inside = present[:, None] & (column < depth)[None, :]  # [N, 2 * G]
        scales = tl.load(scale_row[:, None] + (column // columns)[None, :], mask=inside, other=0.0)
    else:
        scales = tl.zeros([1], tl.float32)
    return words.to(tl.uint32, bitcast=True), scales


@triton.jit
def _load_values(
    h_row: tl.tensor, real: tl.tensor, first: tl.tensor, block: tl.constexpr, shape: tl.constexpr
) -> tl.tensor:
    """Return [L, 16 * GROUPS] of the rows [L, 1]: the values for one block of each group from `first` on.

    For FP8 it is one block of each half of a group.
    """
    k = tl.arange(0, shape[1] * 16)  # [16 * G]
    if shape[2] == "nvfp4":
        place = (first + k // 16) * 64 + block * 16 + k % 16  # [16 * G]
    else:
        place = (first * 2 + k // 8) * 16 + block * 8 + k % 8  # [16 * G]
    return tl.load(h_row + place[None, :], mask=real[:, None] & (place < shape[0])[None, :], other=0.0)


@triton.jit
def _load_step(h_row: tl.tensor, real: tl.tensor, first: tl.tensor, shape: tl.constexpr) -> tl.tuple:
    """Return what `_load_values` does for each of four blocks, of FP8 for each of two."""
    blocks: tl.tuple = ()
    for block in tl.static_range(4 if shape[2] == "nvfp4" else 2):
        blocks = blocks + (_load_values(h_row, real, first, block, shape),)
    return blocks


@triton.jit
def _repeat(values: tl.tensor, rows: tl.constexpr) -> tl.tensor:
    """Return float32 [N, W] of `values` [L, W], again and again.

    L is as many rows as all threads hold at a time, or a multiple of it, so that each has what it needs: else
    steps would wait for shared memory.
    """
    lanes: tl.constexpr = values.shape[0]
    width: tl.constexpr = values.shape[1]
    repeated = tl.broadcast_to(values.to(tl.float32)[None, :, :], (rows // lanes, lanes, width))
    return tl.reshape(repeated, (rows, width))


@triton.jit
def _add_step(
    sums: tl.tensor, words: tl.tuple, values: tl.tuple, scaled: tl.constexpr, quantization: tl.constexpr
) -> tl.tensor:
    """Return `sums` [N, 2 * G] plus the products of a step's `words` and `values`, a [L, 16 * G] a block.

    Row n of the words is multiplied by row ``n % L`` of the values. `scaled`: FP8 words have scales.
    """
    rows: tl.constexpr = sums.shape[0]
    if quantization == "nvfp4":
        for block in tl.static_range(4):
            sums = add_block(sums, words[0], words[1], block, _repeat(values[block], rows))
    else:
        quarters = e4m3.split_words(words[0])
        before = tl.zeros_like(sums) if scaled else sums
        total = e4m3.add_block(before, quarters[0], quarters[1], _repeat(values[0], rows))
        total = e4m3.add_block(total, quarters[2], quarters[3], _repeat(values[1], rows))
        sums = tl.fma(total, words[1], sums) if scaled else total
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
def up_rows_kernel(
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
    quantization: tl.constexpr,
    scales: tl.constexpr,
    has_bias: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    larger: tl.constexpr,
    early: tl.constexpr,
    columns_ended: tl.constexpr,
) -> None:
    """Write `out` [T * K, I]: the activated first product of each pair with an expert, times `larger`.

    `weight` int32 and `block_scale` are those of `pack_words` for [E, 2I, H], gate above up, or [E, I, H] for
    ``relu2``; FP8 has four codes a word. `scale` and `scales`: see
    `ExpertWeights.scale_layout`. LANES: rows of the weight that all threads hold at a time. `early`: the next
    launch may begin, for which zeros are written to int32 `ended_ptr` [T, columns_ended]. Programs:
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
        in_group: tl.constexpr = 64 if quantization == "nvfp4" else 32
        groups: tl.constexpr = (hidden_size + in_group - 1) // in_group
        halves: tl.constexpr = scales[0]
        scale_rows: tl.constexpr = scales[1]
        columns: tl.constexpr = scales[2]
        scaled: tl.constexpr = quantization == "fp8" and columns < hidden_size
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
        if quantization == "nvfp4":
            gate_at, up_at = block_scale_ptr + row * groups, block_scale_ptr + up_row * groups  # [N] each
            gate_scale = tl.load(scale_ptr + expert * halves) * REMAINING_SCALE
            up_scale = tl.load(scale_ptr + expert * halves + (halves - 1)) * REMAINING_SCALE
        else:
            high: tl.constexpr = (height // halves + scale_rows - 1) // scale_rows
            across: tl.constexpr = (hidden_size + columns - 1) // columns
            # Rows of a half have scales of their own, also if the half ends inside a block of them.
            gate_at = scale_ptr + (expert * (halves * high) + column // scale_rows) * across  # [N]
            up_at = gate_at + high * across  # [N]
            if halves == 1:
                up_at = scale_ptr + (expert * high + (column + intermediate_size) // scale_rows) * across
            gate_scale = tl.full([BLOCK_N], REMAINING_SCALE, tl.float32)
            up_scale = gate_scale
            if not scaled:
                gate_scale *= tl.load(gate_at, mask=present, other=0.0)
                if gated:
                    up_scale *= tl.load(up_at, mask=present, other=0.0)
        gate_bias = tl.zeros([BLOCK_N], tl.float32)
        up_bias = gate_bias
        if has_bias:
            gate_bias = tl.load(bias_ptr + row, mask=present, other=0.0).to(tl.float32)  # [N]
            if gated:
                up_bias = tl.load(bias_ptr + up_row, mask=present, other=0.0).to(tl.float32)  # [N]
        shape: tl.constexpr = (hidden_size, GROUPS, quantization, scales)
        next_gate = _load_words(weight_ptr, gate_at, row, present, 0, shape)
        next_up = next_gate
        if gated:
            next_up = _load_words(weight_ptr, up_at, up_row, present, 0, shape)
        for first in range(0, groups, GROUPS):
            gate_words, up_words = next_gate, next_up
            # The next step's weights are asked for before this step's are used.
            if groups > GROUPS:
                after = first + GROUPS
                next_gate = _load_words(weight_ptr, gate_at, row, present, after, shape)
                if gated:
                    next_up = _load_words(weight_ptr, up_at, up_row, present, after, shape)
            x = _load_step(x_row, everywhere, first, shape)
            gate_sums = _add_step(gate_sums, gate_words, x, scaled, quantization)
            if gated:
                up_sums = _add_step(up_sums, up_words, x, scaled, quantization)
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
def _scale_rows(
    block_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    lines: tl.tuple,
    column: tl.tensor,
    hidden_size: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return where the first scale of each line is: in `block_scale`, for FP8 in `scale`."""
    if shape[2] == "nvfp4":
        at = block_scale_ptr + lines[2] * ((shape[0] + 63) // 64)
    else:
        scales: tl.constexpr = shape[3]
        high: tl.constexpr = (hidden_size + scales[1] - 1) // scales[1]
        across: tl.constexpr = (shape[0] + scales[2] - 1) // scales[2]
        at = scale_ptr + (lines[0] * high + column // scales[1]) * across
    return at


@triton.jit
def _factors(
    scale_ptr: tl.tensor,
    scale_row: tl.tensor,
    topk_weights_ptr: tl.tensor,
    lines: tl.tuple,
    place: tl.tensor,
    scaled: tl.constexpr,
    quantization: tl.constexpr,
) -> tl.tuple:
    """Return what products of `lines` are multiplied by: the scale of the weight, the weight of the pair."""
    if quantization == "nvfp4":
        scale = tl.load(scale_ptr + lines[0], mask=lines[1], other=0.0)
    elif not scaled:
        scale = tl.load(scale_row, mask=lines[1], other=0.0)
    else:
        scale = lines[1].to(tl.float32)
    return scale, tl.load(topk_weights_ptr + place, mask=lines[1], other=0.0).to(tl.float32)


@triton.jit
def down_rows_kernel(
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
    quantization: tl.constexpr,
    scales: tl.constexpr,
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

    `h` [T * K, I], times `larger`; the weight is [E, H, I], and its arguments as `up_rows_kernel`;
    `topk_weights` [T, K]. LANES: the experts of a token that a step takes, a power of two.
    `ahead`: values too are asked for a step ahead. `early`: the launch begins before `h` is there, and asks
    for weights meanwhile. `expert_splits` programs share the experts of a token; they need room for their
    sums in float32 `partial_ptr` [T, splits, H], and zeros in int32 `ended_ptr` [T, H / BLOCK_N]. Programs:
    T * (H / BLOCK_N) * splits.
    """
    in_group: tl.constexpr = 64 if quantization == "nvfp4" else 32
    groups: tl.constexpr = (intermediate_size + in_group - 1) // in_group
    columns: tl.constexpr = scales[2]
    scaled: tl.constexpr = quantization == "fp8" and columns < intermediate_size
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
    shape: tl.constexpr = (intermediate_size, GROUPS, quantization, scales)
    scale_row = _scale_rows(block_scale_ptr, scale_ptr, lines, column, hidden_size, shape)  # [N * L]
    following = _load_words(weight_ptr, scale_row, lines[2], present, 0, shape)
    factors = _factors(
        scale_ptr, scale_row, topk_weights_ptr, lines, token * top_k + lane, scaled, quantization
    )  # [N * L] each
    real = _lines(ids_ptr, token, each, each, top_k, num_experts, hidden_size)[1]  # [L]
    if early:
        tl.extra.cuda.gdc_wait()
    # Values and weights of the next step are asked for before those of this step are used.
    h_row = h_ptr + (token * top_k + each)[:, None] * intermediate_size  # [L, 1]
    next_h = _load_step(h_row, real, 0, shape)
    total = tl.zeros([BLOCK_N * LANES, GROUPS * 2], tl.float32)
    biases = tl.zeros([BLOCK_N * LANES], tl.float32)
    for turn in tl.static_range(turns):
        row, now, row_scales = lines[2], present, scale_row  # [N * L] each
        scale, share = factors
        sums = tl.zeros([BLOCK_N * LANES, GROUPS * 2], tl.float32)
        if steps > 1:
            for step in range(1, steps):
                words, h, first = following, next_h, step * GROUPS
                following = _load_words(weight_ptr, row_scales, row, now, first, shape)
                if ahead:
                    next_h = _load_step(h_row, real, first, shape)
                else:
                    h = _load_step(h_row, real, first - GROUPS, shape)
                sums = _add_step(sums, words, h, scaled, quantization)
        words, h = following, next_h
        if not ahead:
            h = _load_step(h_row, real, (steps - 1) * GROUPS, shape)
        if turn + 1 < turns:
            after = (turn + 1) * LANES
            lines = _lines(ids_ptr, token, after + lane, column, top_k, num_experts, hidden_size)
            present = lines[1] & (column < hidden_size)
            scale_row = _scale_rows(block_scale_ptr, scale_ptr, lines, column, hidden_size, shape)
            following = _load_words(weight_ptr, scale_row, lines[2], present, 0, shape)
            place = token * top_k + after + lane
            factors = _factors(scale_ptr, scale_row, topk_weights_ptr, lines, place, scaled, quantization)
            real = _lines(ids_ptr, token, after + each, each, top_k, num_experts, hidden_size)[1]
            h_row += LANES * intermediate_size
            if ahead:
                next_h = _load_step(h_row, real, 0, shape)
        sums = _add_step(sums, words, h, scaled, quantization)
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
