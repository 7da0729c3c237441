"""Sorting networks over the elements of a lane, as elementwise minima and maxima.

A lane's elements are a tuple of tensors of one shape, so every comparator is one `maximum` and one
`minimum` on registers: no shuffles, no shared memory. Shapes: rows, lanes of a row, width elements of a lane.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_lanes(x: tl.tensor, width: tl.constexpr) -> tl.tuple:
    """Take `x` [rows, lanes, width] apart into `width` tensors [rows, lanes]; `width` is a power of two."""
    if width == 1:
        parts = (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], width // 2, 2]))
        parts = split_lanes(even, width // 2) + split_lanes(odd, width // 2)
    return parts


@triton.jit
def _bitonic_merge(x: tl.tensor, width: tl.constexpr) -> tl.tuple:
    """Sort a bitonic tuple of `width` tensors, highest first."""
    if width == 1:
        merged = x
    else:
        half: tl.constexpr = width // 2
        high: tl.tuple = ()
        low: tl.tuple = ()
        for i in tl.static_range(half):
            high = high + (tl.maximum(x[i], x[i + half]),)
            low = low + (tl.minimum(x[i], x[i + half]),)
        merged = _bitonic_merge(high, half) + _bitonic_merge(low, half)
    return merged


@triton.jit
def _reverse(x: tl.tensor, width: tl.constexpr) -> tl.tuple:
    turned: tl.tuple = ()
    for i in tl.static_range(width):
        turned = turned + (x[width - 1 - i],)
    return turned


@triton.jit
def _sort4(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tuple:
    """Five comparators."""
    ab, ba = tl.maximum(a, b), tl.minimum(a, b)
    cd, dc = tl.maximum(c, d), tl.minimum(c, d)
    first, x = tl.maximum(ab, cd), tl.minimum(ab, cd)
    y, last = tl.maximum(ba, dc), tl.minimum(ba, dc)
    return (first, tl.maximum(x, y), tl.minimum(x, y), last)


@triton.jit
def _merge_sorted4(a: tl.tensor, b: tl.tensor) -> tl.tuple:
    """Batcher's odd-even merge of two sorted fours: nine comparators, 19 with the two sorts before."""
    p0, q0 = tl.maximum(a[0], b[0]), tl.minimum(a[0], b[0])
    p1, q1 = tl.maximum(a[1], b[1]), tl.minimum(a[1], b[1])
    p2, q2 = tl.maximum(a[2], b[2]), tl.minimum(a[2], b[2])
    p3, q3 = tl.maximum(a[3], b[3]), tl.minimum(a[3], b[3])
    r0, r1 = tl.maximum(q0, p2), tl.minimum(q0, p2)
    s0, s1 = tl.maximum(q1, p3), tl.minimum(q1, p3)
    return (
        p0,
        tl.maximum(p1, r0),
        tl.minimum(p1, r0),
        tl.maximum(s0, r1),
        tl.minimum(s0, r1),
        tl.maximum(s1, q2),
        tl.minimum(s1, q2),
        q3,
    )


@triton.jit
def sort_lane(x: tl.tensor, width: tl.constexpr) -> tl.tuple:
    """Sort a tuple of `width` tensors elementwise, highest first; `width` is a power of two."""
    if width == 1:
        ordered = x
    elif width == 2:
        ordered = (tl.maximum(x[0], x[1]), tl.minimum(x[0], x[1]))
    elif width == 4:
        ordered = _sort4(x[0], x[1], x[2], x[3])
    elif width == 8:
        ordered = _merge_sorted4(_sort4(x[0], x[1], x[2], x[3]), _sort4(x[4], x[5], x[6], x[7]))
    else:
        half: tl.constexpr = width // 2
        ordered = _bitonic_merge(sort_lane(x[:half], half) + _reverse(sort_lane(x[half:], half), half), width)
    return ordered
