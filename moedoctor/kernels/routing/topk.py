"""Top-k routing of any kind: softmax or sigmoid, with or without bias, groups and a NaN policy.

Shapes as in `ranking`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.routing.ranking import (
    INFINITY_BITS,
    choice_code,
    drop,
    holds_non_finite,
    sanitize,
    score_of,
    softmax_terms,
)
from moedoctor.kernels.routing.selection import keep_best_groups, pick_experts


@triton.jit
def store_routes(
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    row: tl.tensor,
    tokens: tl.tensor,
    scale: tl.tensor,
    top_k: tl.constexpr,
    renormalize: tl.constexpr,
) -> None:
    """Write lanes 0..top_k-1 of `weights` and `ids` [lanes, rows] to rows `row` [rows] of the outputs."""
    column = tl.arange(0, weights.shape[0])[:, None]  # [lanes, 1]
    if renormalize:
        total = tl.sum(tl.where(column < top_k, weights, 0.0), axis=0)  # [rows]
        weights = weights / tl.where(total > 0.0, total, 1.0)[None, :]
    place = tl.max_contiguous(row.to(tl.int64)[None, :] * top_k + column, [1, 1])
    inside = (column < top_k) & (row < tokens)[None, :]
    tl.store(weights_ptr + place, weights * scale, mask=inside)
    tl.store(ids_ptr + place, ids, mask=inside)


@triton.jit
def route_rows(
    x: tl.tensor,
    expert: tl.tensor,
    present: tl.tensor,
    bias: tl.tensor,
    row_ptr: tl.tensor,
    stride_expert: tl.tensor,
    kind: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tuple:
    """Return weights and ids [lanes, rows] of float32 logits `x` [lanes, rows, width], and the highest code.

    Lane k holds the k-th best. Without a policy the highest code [rows] is at least INFINITY_BITS if a choice
    is NaN or +Inf.
    `expert` and `present` broadcast to `x`; `row_ptr` [rows] points at each row's first logit. `kind`: top_k,
    scoring, has_bias, groups and kept_groups.
    """
    top_k: tl.constexpr = kind[0]
    scoring: tl.constexpr = kind[1]
    has_bias: tl.constexpr = kind[2]
    groups: tl.constexpr = kind[3]
    clean = x
    if policy == "finite":
        clean = tl.where(present, sanitize(x), float("-inf"))
    if scoring == "softmax":
        top, reciprocal = softmax_terms(clean)  # [rows]
    else:
        top = tl.zeros([x.shape[1]], tl.float32)
        reciprocal = top
    score = score_of(clean, top[None, :, None], reciprocal[None, :, None], scoring, policy)
    code = choice_code(x, present, clean, score, bias, has_bias, policy)
    code = drop(code, present)
    if groups > 0:
        code = keep_best_groups(code, groups, kind[4], has_bias)
    ids, highest = pick_experts(code, expert, top_k)  # [lanes, rows], [rows]
    # Reading the chosen logits again is cheaper than carrying a second value through every pick.
    chosen = tl.load(row_ptr[None, :] + ids.to(tl.int64) * stride_expert).to(tl.float32)  # [lanes, rows]
    if policy == "finite":
        chosen = sanitize(chosen)
    return score_of(chosen, top[None, :], reciprocal[None, :], scoring, policy), ids, highest


@triton.jit
def topk_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    tokens: tl.tensor,
    stride_token: tl.tensor,
    stride_expert: tl.tensor,
    stride_bias: tl.tensor,
    scale: tl.tensor,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    scoring: tl.constexpr,
    has_bias: tl.constexpr,
    renormalize: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    group_size: tl.constexpr,
    padded_groups: tl.constexpr,
    policy: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Route `rows` tokens a program. Without groups, ``groups == 0`` and ``group_size == experts``."""
    column = (tl.arange(0, lanes)[:, None] * width + tl.arange(0, width)[None, :])[
        :, None, :
    ]  # [lanes, 1, width]
    if groups > 0:
        # Each group starts on a lane of its own: pad it to a power of two.
        span: tl.constexpr = lanes * width // padded_groups
        expert = column
        present = column < experts
        if span != group_size:
            expert = column // span * group_size + column % span
            present = (column % span < group_size) & (column // span < groups)
    else:
        expert = column
        present = column < experts
    row = tl.program_id(0) * rows + tl.arange(0, rows)  # [rows]
    # Rows past the end read the last row again: their results are not stored.
    row_ptr = logits_ptr + tl.minimum(row, tokens - 1).to(tl.int64) * stride_token  # [rows]
    x = tl.load(
        row_ptr[None, :, None] + expert.to(tl.int64) * stride_expert, mask=present, other=float("-inf")
    ).to(tl.float32)
    bias = x
    if has_bias:
        # One address a row, all the same: a tile of the logits' shape takes their layout.
        bias_at = (
            bias_ptr + expert.to(tl.int64) * stride_bias + tl.zeros([1, rows, 1], tl.int32)
        )  # [lanes, rows, width]
        bias = tl.load(bias_at, mask=present, other=0.0).to(tl.float32)
    # Rows of finite choices are routed alike under every policy: the rare other ones are routed again.
    kind: tl.constexpr = (top_k, scoring, has_bias, padded_groups, kept_groups)
    weights, ids, highest = route_rows(x, expert, present, bias, row_ptr, stride_expert, kind, "none")
    store_routes(weights_ptr, ids_ptr, weights, ids, row, tokens, scale, top_k, renormalize)
    if policy != "none":
        again = tl.max(highest, axis=0) >= INFINITY_BITS
        if policy == "finite" and not has_bias:
            # The policy ranks a row by its logits if one of them is Inf, which a score does not show.
            logits = x
            if experts != lanes * width:
                logits = tl.where(present, x, 0.0)  # padding is -Inf
            again = again | holds_non_finite(logits)
        if again:
            tl.debug_barrier()  # the same addresses are written again
            weights, ids, _ = route_rows(x, expert, present, bias, row_ptr, stride_expert, kind, policy)
            store_routes(weights_ptr, ids_ptr, weights, ids, row, tokens, scale, top_k, renormalize)
