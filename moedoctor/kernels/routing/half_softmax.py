"""Softmax top-k of bfloat16 and float16 logits without bias: the common router, and the fastest kernel.

A 16-bit logit and the expert's id fit one int32 key, so a comparator of the sorting network is two
instructions and a pick is one warp-wide integer maximum. Logits order experts as their scores do, except
if two different logits have one score; such rows are detected afterwards and routed again by score.
Shapes as in `ranking`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.routing.selection import pick_sorted
from moedoctor.kernels.routing.sorting import sort_lane, split_lanes
from moedoctor.kernels.routing.topk import route_rows, store_routes

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _order16(bits: tl.tensor) -> tl.tensor:
    """Map the 16 bits of a half-precision number, sign-extended to int32, to int32 that sorts the same way.

    It is its own inverse; a step of one is a step to the next representable number.
    """
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit
def _logit_of(order: tl.tensor, half: tl.constexpr) -> tl.tensor:
    """Invert `_order16`, to float32."""
    return _order16(order).to(tl.int16).to(half, bitcast=True).to(tl.float32)


@triton.jit
def _any(flags: tl.tensor) -> tl.tensor:
    """Return True if any of `flags` [lanes, rows] is set."""
    return tl.max(tl.max(flags.to(tl.int32), axis=0), axis=0) != 0


@triton.jit
def half_softmax_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    tokens: tl.tensor,
    stride_token: tl.tensor,
    stride_expert: tl.tensor,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    renormalize: tl.constexpr,
    policy: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Route `rows` tokens a program; experts <= lanes * width, top_k <= lanes."""
    expert = (tl.arange(0, lanes)[:, None] * width + tl.arange(0, width)[None, :])[
        :, None, :
    ]  # [lanes, 1, width]
    present = expert < experts
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # [rows]
    # Rows past the end read the last row again: their results are not stored.
    row_ptr = logits_ptr + tl.minimum(row, tokens - 1).to(tl.int64) * stride_token  # [rows]
    x = tl.load(
        row_ptr[None, :, None] + expert.to(tl.int64) * stride_expert, mask=present, other=float("-inf")
    )
    half: tl.constexpr = x.dtype

    # Padding is -inf with ids above all others: it sorts behind every expert of a row without NaN.
    key = (_order16(x.to(tl.int16, bitcast=True).to(tl.int32)) << 16) | (0xFFFF - expert)
    highest, picked = pick_sorted(sort_lane(split_lanes(key, width), width), width, top_k)
    lane = tl.arange(0, lanes)[:, None]  # [lanes, 1]
    order = picked >> 16  # [lanes, rows]
    top = _logit_of(highest >> 16, half)  # [rows]
    total = tl.sum(
        tl.sum(tl.exp2((x.to(tl.float32) - top[None, :, None]) * LOG2_E), axis=2), axis=0
    )  # [rows]
    reciprocal = 1.0 / total
    weights = tl.exp2((_logit_of(order, half) - top[None, :]) * LOG2_E) * reciprocal[None, :]
    below = tl.exp2((_logit_of(order - 1, half) - top[None, :]) * LOG2_E) * reciprocal[None, :]
    ids = 0xFFFF - (picked & 0xFFFF)
    store_routes(weights_ptr, ids_ptr, weights, ids, row, tokens, 1.0, top_k, renormalize)

    # What follows corrects rows, so that the others do not wait for it. Another expert's lower logit can
    # share the score of a chosen one only if the next lower number does. If softmax turned a row into NaN,
    # its weights are NaN in every lane and nothing is below them: the same test detects that.
    if policy == "none":
        doubtful = (lane < top_k) & (below >= weights)
    else:
        doubtful = (lane < top_k) & ~(below < weights)
    if _any(doubtful):
        tl.debug_barrier()  # the same addresses are written again
        lost = weights != weights
        if policy == "zero" and not _any(doubtful & ~lost):
            weights = tl.where(lost, 0.0, weights)
            ids = tl.where(lost, lane, ids)
            store_routes(weights_ptr, ids_ptr, weights, ids, row, tokens, 1.0, top_k, renormalize)
        else:
            kind: tl.constexpr = (top_k, "softmax", False, 0, 0)
            wide = x.to(tl.float32)
            weights, ids, _ = route_rows(wide, expert, present, 0.0, row_ptr, stride_expert, kind, policy)
            store_routes(weights_ptr, ids_ptr, weights, ids, row, tokens, 1.0, top_k, renormalize)
