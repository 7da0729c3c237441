"""A MoE layer for few tokens: each pair reads the weights of its expert once, in place.

Matrix-vector products, bound by memory: no sorting, no padding to tiles, no intermediate in low precision.

Shapes: T tokens, K top_k, H hidden size, I intermediate size. In a program: N rows and K columns of a weight
that a step takes (BLOCK_N, BLOCK_K), L lanes (top_k padded to a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.e4m3 import decode_bytes
from moedoctor.kernels.moe.rows import activate, row_and_column


@triton.jit(do_not_specialize=["slots"])
def up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slots: tl.tensor,
    top_k: tl.tensor,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    activation: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write `out` float32 [T * K, I]: the activated first product of each pair.

    `weight` [slots, 2I, H], gate above up; [slots, I, H] for ``relu2``.
    Programs: T * K * (I / BLOCK_N). Pairs whose slot is below 0, or `slots` or more, are not written.
    """
    gated: tl.constexpr = activation != "relu2"
    height: tl.constexpr = 2 * intermediate_size if gated else intermediate_size
    pair, part = row_and_column((intermediate_size + BLOCK_N - 1) // BLOCK_N)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if (slot >= 0) & (slot < slots):
        row = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
        present = row < intermediate_size  # [N]
        k = tl.arange(0, BLOCK_K)  # [K]
        weight_at = weight_ptr + (slot * height + row[:, None]) * hidden_size + k[None, :]  # [N, K]
        token_at = x_ptr + (pair // top_k).to(tl.int64) * hidden_size + k  # [K]
        gate_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, hidden_size, BLOCK_K):
            inside = start + k < hidden_size  # [K]
            mask = present[:, None] & inside[None, :]  # [N, K]
            x = tl.load(token_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate_sums += decode_bytes(tl.load(weight_at + start, mask=mask, other=0.0)).to(tl.float32) * x
            if gated:
                up_at = weight_at + start + intermediate_size * hidden_size
                up_sums += decode_bytes(tl.load(up_at, mask=mask, other=0.0)).to(tl.float32) * x
        gate = tl.sum(gate_sums, axis=1)  # [N]
        up = tl.sum(up_sums, axis=1)  # [N]
        if has_scale:
            scale = tl.load(scale_ptr + slot)
            gate *= scale
            up *= scale
        if has_bias:
            bias_at = bias_ptr + slot * height + row  # [N]
            gate += tl.load(bias_at, mask=present, other=0.0).to(tl.float32)
            if gated:
                up += tl.load(bias_at + intermediate_size, mask=present, other=0.0).to(tl.float32)
        to_ptr = out_ptr + pair.to(tl.int64) * intermediate_size + row  # [N]
        tl.store(to_ptr, activate(gate, up, activation), mask=present)


@triton.jit(do_not_specialize=["slots"])
def down_kernel(
    h_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    topk_weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slots: tl.tensor,
    top_k: tl.constexpr,
    hidden_size: tl.constexpr,
    intermediate_size: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write `out` float32 [T, H]: the sum over a token's experts of topk_weight times second product.

    `h` float32 [T * K, I], `weight` [slots, H, I], `topk_weights` [T, K]. `adds`: adds to the values in
    `out`. Programs: T * (H / BLOCK_N). LANES: top_k, padded.
    """
    token_row, part = row_and_column((hidden_size + BLOCK_N - 1) // BLOCK_N)
    token = token_row.to(tl.int64)
    lane = tl.arange(0, LANES)  # [L]
    slot = tl.load(slots_ptr + token * top_k + lane, mask=lane < top_k, other=-1).to(tl.int64)
    held = (slot >= 0) & (slot < slots)  # [L]
    if adds and tl.max(held.to(tl.int32), axis=0) == 0:
        return  # nothing to add
    row = part * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    k = tl.arange(0, BLOCK_K)  # [K]
    weight_row = slot[:, None] * hidden_size + row[None, :]  # [L, N]
    weight_at = weight_ptr + weight_row[:, :, None] * intermediate_size + k[None, None, :]  # [L, N, K]
    h_at = h_ptr + (token * top_k + lane)[:, None] * intermediate_size + k[None, :]  # [L, K]
    sums = tl.zeros([LANES, BLOCK_N, BLOCK_K], tl.float32)
    real = held[:, None] & (row < hidden_size)[None, :]  # [L, N]
    for start in tl.static_range(0, intermediate_size, BLOCK_K):
        inside = start + k < intermediate_size  # [K]
        h = tl.load(h_at + start, mask=held[:, None] & inside[None, :], other=0.0)  # [L, K]
        weight = tl.load(weight_at + start, mask=real[:, :, None] & inside[None, None, :], other=0.0)
        sums += decode_bytes(weight).to(tl.float32) * h[:, None, :]
    product = tl.sum(sums, axis=2)  # [L, N]
    if has_scale:
        product *= tl.load(scale_ptr + slot, mask=held, other=0.0)[:, None]
    if has_bias:
        product += tl.load(bias_ptr + weight_row, mask=real, other=0.0).to(tl.float32)
    topk_weight = tl.load(topk_weights_ptr + token * top_k + lane, mask=held, other=0.0).to(tl.float32)
    result = tl.sum(product * topk_weight[:, None], axis=0)  # [N]
    to_ptr = out_ptr + token * hidden_size + row  # [N]
    if adds:
        result += tl.load(to_ptr, mask=row < hidden_size, other=0.0)
    tl.store(to_ptr, result, mask=row < hidden_size)
