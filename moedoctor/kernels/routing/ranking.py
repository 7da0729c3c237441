"""From router logits to scores and to integer codes that sort as the routing rule orders experts.

Tiles are [lanes, rows, width]: element (lane, row, i) is column ``lane * width + i`` of a row. Lanes come
first because the compiler then gives each row to the lanes of one warp.

Shapes: rows (tokens of a program), lanes * width (experts, padded), top_k; picked results are [lanes, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(3.4028234663852886e38)
INFINITY_BITS = tl.constexpr(0x7F800000)

# Codes below every finite choice: that of a choice that is not finite, and that of what must not be
# chosen at all (padding, experts of groups that were not chosen).
NOT_FINITE = tl.constexpr(-0x7F800001)  # the code of -inf
ABSENT = tl.constexpr(-0x80000000)

# Under the policy "finite" NaN logits come in between. Without a bias they tie, so one code is enough; with
# one they keep the order of their choices: codes are then int64, and those of NaN logits are shifted.
NAN_LAST = tl.constexpr(-0x7FFFFFFF)
NAN_SHIFT = tl.constexpr(-(1 << 33))
ABSENT_LONG = tl.constexpr(-(1 << 34))


@triton.jit
def drop(code: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Return `code` if `kept`, else the code of what must not be chosen."""
    if code.dtype == tl.int64:
        return tl.where(kept, code, ABSENT_LONG)
    return tl.where(kept, code, ABSENT)


@triton.jit
def code_of(x: tl.tensor) -> tl.tensor:
    """Return int32 that sorts as the float32 does, except that -0.0 comes below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(code: tl.tensor) -> tl.tensor:
    """Invert `code_of`."""
    return (code ^ ((code >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sanitize(x: tl.tensor) -> tl.tensor:
    """Replace NaN and -Inf by the lowest finite float32, +Inf by the highest."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, LOWEST), HIGHEST), LOWEST)


@triton.jit
def _greater_or_nan(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def holds_non_finite(x: tl.tensor) -> tl.tensor:
    """Return True if `x` [lanes, rows, width] holds NaN or Inf: one instruction an element, one a warp."""
    peak = tl.reduce(tl.abs(x), 2, _greater_or_nan)  # [lanes, rows]; NaN if the lane holds one
    # As integers: NaN is above Inf, Inf above every number, and lanes are reduced in one step.
    return tl.max(tl.max(peak.to(tl.int32, bitcast=True), axis=0), axis=0) >= INFINITY_BITS


@triton.jit
def softmax_terms(x: tl.tensor) -> tl.tuple:
    """Return the maximum and the reciprocal sum of exponentials [rows] of `x` [lanes, rows, width].

    The reciprocal is NaN if a row holds a NaN or a +Inf, or nothing but -Inf.
    """
    top = tl.max(tl.max(x, axis=2), axis=0)  # [rows]
    total = tl.sum(tl.sum(tl.exp(x - top[None, :, None]), axis=2), axis=0)  # [rows]
    return top, 1.0 / total


@triton.jit
def score_of(
    x: tl.tensor, top: tl.tensor, reciprocal: tl.tensor, scoring: tl.constexpr, policy: tl.constexpr
) -> tl.tensor:
    """Return the scores of logits `x`; `top` and `reciprocal`, for softmax only, broadcast against it."""
    if scoring == "softmax":
        score = tl.exp(x - top) * reciprocal
    else:
        score = 1.0 / (1.0 + tl.exp(-x))
    if policy == "zero":
        # Neither activation gives an Inf: a +Inf logit makes a softmax row NaN, and sigmoid(+Inf) is 1.
        score = tl.where(score == score, score, 0.0)
    return score


@triton.jit
def choice_code(
    x: tl.tensor,
    present: tl.tensor,
    clean: tl.tensor,
    score: tl.tensor,
    bias: tl.tensor,
    has_bias: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """Return int32 or int64 codes that order the experts of each row, the best highest.

    `x` [lanes, rows, width] are the logits before the policy, `clean` those after it; `present` is false for
    padding. Without a policy NaN and +Inf come out as INFINITY_BITS or more,
    above every number.
    """
    if has_bias:
        choice = score + bias  # never -0.0, which would not tie with 0.0: no score is
    else:
        choice = score
    if policy == "none":
        return code_of(choice)
    if policy == "finite" and not has_bias:
        # If the row holds a non-finite logit, scores may have underflowed: the logits themselves rank.
        finite = tl.abs(x) <= HIGHEST  # false for NaN
        dirty = tl.max(tl.max((present & ~finite).to(tl.int32), axis=2), axis=0)  # [rows]
        # Logits, unlike scores, can be -0.0, which ties with 0.0.
        choice = tl.where(dirty[None, :, None] != 0, tl.where(clean == 0.0, 0.0, clean), choice)
    code = tl.where(tl.abs(choice) <= HIGHEST, code_of(choice), NOT_FINITE)
    if policy == "finite":
        if has_bias:
            code = tl.where(x == x, code.to(tl.int64), code.to(tl.int64) + NAN_SHIFT)
        else:
            code = tl.where(x == x, code, NAN_LAST)
    return code
