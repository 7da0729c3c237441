"""What the NaN trace's kernels do with one row and with the record, whose layout this is.

The record of a trace is two int32 tensors. ``header`` [HEADER] holds the step; ``found`` [points, KINDS,
FIELDS] what was seen at each point.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP, ACTIVE, REAL, PADDED, SEQUENCE, STEPS, PADDED_STEPS, PAD_TOKENS = range(8)
STEPS_WITH = 8
"""Steps with something of each of KINDS; eight places from here, of which the last two stay 0."""
NOW = 16
"""The same for the step that runs."""
THROUGH = 24
"""Programs that are through with the launch that ends a step."""
MASKED = 25
"""Elements of the step's mask, 0 where the first REAL rows of PADDED are no padding."""
HEADER = 26
KINDS = 6
"""NaN in real rows, Inf in real rows, NaN in padding, Inf in padding, and both in rows that may be either."""
ROWS, STEPS_FOUND, FIRST_STEP, FIRST_SEQUENCE, LAST_STEP = range(5)
FIELDS = 5

_STEP, _ACTIVE, _REAL, _PADDED = (
    tl.constexpr(STEP),
    tl.constexpr(ACTIVE),
    tl.constexpr(REAL),
    tl.constexpr(PADDED),
)
_SEQUENCE, _STEPS, _PADDED_STEPS = tl.constexpr(SEQUENCE), tl.constexpr(STEPS), tl.constexpr(PADDED_STEPS)
_PAD_TOKENS, _STEPS_WITH, _NOW = tl.constexpr(PAD_TOKENS), tl.constexpr(STEPS_WITH), tl.constexpr(NOW)
_THROUGH, _MASKED = tl.constexpr(THROUGH), tl.constexpr(MASKED)
_KINDS, _FIELDS = tl.constexpr(KINDS), tl.constexpr(FIELDS)
_FIRST_STEP, _FIRST_SEQUENCE = tl.constexpr(FIRST_STEP), tl.constexpr(FIRST_SEQUENCE)
_LAST_STEP, _STEPS_FOUND = tl.constexpr(LAST_STEP), tl.constexpr(STEPS_FOUND)


@triton.jit
def _record(header_ptr: tl.tensor, entry_ptr: tl.tensor, kind: tl.tensor, step: tl.tensor) -> None:
    """One more row of `kind` at the entry [KINDS, FIELDS] of a point."""
    place = entry_ptr + kind * _FIELDS
    tl.atomic_add(place, 1)
    if tl.atomic_xchg(place + _LAST_STEP, step) != step:
        tl.atomic_add(place + _STEPS_FOUND, 1)
        # Kernels of a stream run in order, so the running number says which point was first.
        if tl.atomic_cas(place + _FIRST_STEP, 0, step) == 0:
            number = tl.atomic_add(header_ptr + _SEQUENCE, 1)
            tl.atomic_xchg(place + _FIRST_SEQUENCE, number + 1)
    tl.atomic_xchg(header_ptr + _NOW + kind, 1)


@triton.jit
def _kind_of(
    row: tl.tensor,
    rows: tl.tensor,
    header_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    elements: tl.tensor,
    group: tl.tensor,
    has_padding: tl.constexpr,
) -> tl.tensor:
    """0 for a real row of `rows`, 2 for padding, 4 where that is not known."""
    real, padded = tl.load(header_ptr + _REAL), tl.load(header_ptr + _PADDED)
    masked = tl.load(header_ptr + _MASKED)
    each = rows // tl.maximum(padded, 1)
    fits = (each * padded == rows) & ((each == 1) | (group == 0) | (each == group)) & (masked == 0)
    kind = tl.where(fits, (row // tl.maximum(each, 1) >= real).to(tl.int32) * 2, 4)
    kind = tl.where(real >= padded, 0, kind)
    if has_padding:
        # A graph that was captured with another mask reads nothing here.
        fits = masked == elements
        is_padding = tl.load(padding_ptr + row // tl.maximum(group, 1), mask=fits, other=0) != 0
        kind = tl.where(fits, is_padding.to(tl.int32) * 2, kind)
    return kind


@triton.jit
def watch_row(
    x_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    header_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    elements: tl.tensor,
    group: tl.tensor,
    columns: tl.constexpr,
    has_padding: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Look at one row of `x` [rows, columns] and record what is not finite at the entry of its point."""
    is_nan = tl.zeros([block], tl.int32)  # [block]
    is_inf = tl.zeros([block], tl.int32)  # [block]
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)  # [block]
        at = x_ptr + row * stride_row + column.to(tl.int64) * stride_column
        x = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)  # [block]
        is_nan = is_nan | (x != x).to(tl.int32)
        is_inf = is_inf | (tl.abs(x) == float("inf")).to(tl.int32)
    nan, inf = tl.max(is_nan, axis=0), tl.max(is_inf, axis=0)
    if nan + inf > 0:
        step = tl.load(header_ptr + _STEP)
        kind = _kind_of(row, rows, header_ptr, padding_ptr, elements, group, has_padding)
        if nan > 0:
            _record(header_ptr, entry_ptr, kind, step)
        if inf > 0:
            _record(header_ptr, entry_ptr, kind + 1, step)


@triton.jit
def end_step(header_ptr: tl.tensor) -> None:
    """Add up what the step showed; nothing where none runs."""
    active = tl.load(header_ptr + _ACTIVE)
    extra = tl.maximum(tl.load(header_ptr + _PADDED) - tl.load(header_ptr + _REAL), 0) * active
    kind = tl.arange(0, 8)  # [8]: KINDS and two that stay 0
    now = tl.atomic_add(header_ptr + _NOW + kind, 0)  # [8]: other programs of this launch wrote it
    seen = tl.load(header_ptr + _STEPS_WITH + kind) + now * active  # [8]
    tl.store(header_ptr + _STEPS_WITH + kind, seen)
    tl.store(header_ptr + _STEPS, tl.load(header_ptr + _STEPS) + active)
    tl.store(header_ptr + _PADDED_STEPS, tl.load(header_ptr + _PADDED_STEPS) + (extra > 0).to(tl.int32))
    tl.store(header_ptr + _PAD_TOKENS, tl.load(header_ptr + _PAD_TOKENS) + extra)
    tl.store(header_ptr + _ACTIVE, 0)
