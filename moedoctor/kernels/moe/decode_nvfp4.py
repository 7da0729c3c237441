"""An NVFP4 MoE layer for few tokens: each pair reads the weights of its expert once, in two launches.

Matrix-vector products with sums in float32. Tensor cores would compute with 16 tokens where there is one, and
a program of theirs waits for one step of the sum after the other. Here a program asks for the weights of a
step before it uses those of the step before. The second launch adds up a token's experts, so nothing is left
to a third. A weight takes 5 to 8 instructions.
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
    """Return (words uint32 [N, 8 * GROUPS], scales uint32 [N, GROUPS]) of `rows` from group `first` on."""
    groups: tl.constexpr = (depth + 63) // 64
    word = first * 8 + tl.arange(0, GROUPS * 8)  # [W]
    inside = present[:, None] & (word < groups * 8)[None, :]  # [N, W]
    words = tl.load(weight_ptr + rows[:, None] * (groups * 8) + word[None, :], mask=inside, other=0)
    group = first + tl.arange(0, GROUPS)  # [G]
    inside = present[:, None] & (group < groups)[None, :]  # [N, G]
    scales = tl.load(scale_ptr + rows[:, None] * groups + group[None, :], mask=inside, other=0)
    return words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)


@triton.jit
def _places(first: tl.tensor, block: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Return [16 * GROUPS]: where the weights of one block of each group are in a row."""
    k = tl.arange(0, GROUPS * 16)  # [16 * G]
    return (first + k // 16) * 64 + block * 16 + k % 16


@triton.jit
def nvfp4_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    activation: tl.constexpr,
    halves: tl.constexpr,
    has_bias: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Write `out` [T * K, I]: the activated first product of each pair; none for an id that is no expert.

    `weight` and `block_scale` are those of `pack_words` for [E, 2I, H], gate above up, or [E, I, H] for
    ``relu2``; `scale` [E * halves]. `early`: the next launch may begin. Programs: T * K * (I / BLOCK_N).
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    pair, part = row_and_column((intermediate_size + BLOCK_N - 1) // BLOCK_N)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert >= 0) & (expert < num_experts):
        gated: tl.constexpr = activation != "relu2"
        height: tl.constexpr = 2 * intermediate_size if gated else intermediate_size
        groups: tl.constexpr = (hidden_size + 63) // 64
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
        present = column < intermediate_size  # [N]
        row = expert * height + column  # [N]
        token_ptr = x_ptr + (pair // top_k).to(tl.int64) * hidden_size
        gate_sums = tl.zeros([BLOCK_N, GROUPS * 2], tl.float32)
        up_sums = tl.zeros([BLOCK_N, GROUPS * 2], tl.float32)
        up_row = row + intermediate_size  # [N]
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
            for block in tl.static_range(4):
                place = _places(first, block, GROUPS)  # [16 * G]
                x = tl.load(token_ptr + place, mask=place < hidden_size, other=0.0).to(tl.float32)[None, :]
                gate_sums = add_block(gate_sums, gate_words[0], gate_words[1], block, x)
                if gated:
                    up_sums = add_block(up_sums, up_words[0], up_words[1], block, x)
        gate = tl.sum(gate_sums, axis=1)  # [N]
        up = tl.sum(up_sums, axis=1)  # [N]
        gate *= tl.load(scale_ptr + expert * halves) * REMAINING_SCALE
        if gated:
            up *= tl.load(scale_ptr + expert * halves + (halves - 1)) * REMAINING_SCALE
        if has_bias:
            gate += tl.load(bias_ptr + row, mask=present, other=0.0).to(tl.float32)
            if gated:
                up += tl.load(bias_ptr + row + intermediate_size, mask=present, other=0.0).to(tl.float32)
        value = activate(gate, up, activation)  # [N]
        to_ptr = out_ptr + pair.to(tl.int64) * intermediate_size + column  # [N]
        tl.store(to_ptr, value.to(out_ptr.dtype.element_ty), mask=present)


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
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    has_bias: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """Write `out` [T, H]: the sum over a token's experts of topk_weight times second product, in float32.

    `h` [T * K, I]; `weight` and `block_scale` are those of `pack_words` for [E, H, I]; `scale` [E];
    `topk_weights` [T, K]. LANES: top_k, padded. `early`: the launch begins before `h` is there, and asks for
    weights meanwhile. Programs: T * (H / BLOCK_N).
    """
    groups: tl.constexpr = (intermediate_size + 63) // 64
    token_row, part = row_and_column((hidden_size + BLOCK_N - 1) // BLOCK_N)
    token = token_row.to(tl.int64)
    # One row of the tile for each column of the result and lane; lanes are the faster of the two.
    line = tl.arange(0, BLOCK_N * LANES)  # [N * L]
    lane = line % LANES  # [N * L]
    column = part * BLOCK_N + line // LANES  # [N * L]
    expert = tl.load(ids_ptr + token * top_k + lane, mask=lane < top_k, other=-1).to(tl.int64)
    held = (expert >= 0) & (expert < num_experts)  # [N * L]
    expert = tl.where(held, expert, 0)
    present = held & (column < hidden_size)  # [N * L]
    row = expert * hidden_size + column  # [N * L]
    each = tl.arange(0, LANES)  # [L]
    id_of = tl.load(ids_ptr + token * top_k + each, mask=each < top_k, other=-1)  # [L]
    real = (id_of >= 0) & (id_of < num_experts)  # [L]
    h_row = h_ptr + (token * top_k + each)[:, None] * intermediate_size  # [L, 1]
    sums = tl.zeros([BLOCK_N * LANES, GROUPS * 2], tl.float32)
    following = _load_words(weight_ptr, block_scale_ptr, row, present, 0, intermediate_size, GROUPS)
    if early:
        tl.extra.cuda.gdc_wait()
    for first in range(0, groups, GROUPS):
        words = following
        if groups > GROUPS:
            after = first + GROUPS
            following = _load_words(
                weight_ptr, block_scale_ptr, row, present, after, intermediate_size, GROUPS
            )
        for block in tl.static_range(4):
            place = _places(first, block, GROUPS)  # [16 * G]
            inside = real[:, None] & (place < intermediate_size)[None, :]  # [L, 16 * G]
            h = tl.load(h_row + place[None, :], mask=inside, other=0.0).to(tl.float32)  # [L, 16 * G]
            repeated = tl.broadcast_to(h[None, :, :], (BLOCK_N, LANES, GROUPS * 16))
            repeated = tl.reshape(repeated, (BLOCK_N * LANES, GROUPS * 16))
            sums = add_block(sums, words[0], words[1], block, repeated)
    product = tl.sum(sums, axis=1)  # [N * L]
    product *= tl.load(scale_ptr + expert, mask=held, other=0.0) * REMAINING_SCALE
    if has_bias:
        product += tl.load(bias_ptr + row, mask=present, other=0.0).to(tl.float32)
    topk_weight = tl.load(topk_weights_ptr + token * top_k + lane, mask=held, other=0.0).to(tl.float32)
    result = tl.sum(tl.reshape(product * topk_weight, (BLOCK_N, LANES)), axis=1)  # [N]
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    to_ptr = out_ptr + token * hidden_size + column  # [N]
    tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=column < hidden_size)
