"""Looks for NaN and Inf in a tensor's rows and counts them on the device, without the host.

The record of a trace is two int32 tensors. ``header`` [HEADER] holds the step; ``found`` [points, KINDS,
FIELDS] what was seen at each point. A launch while no step is active, such as a warm-up, leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

STEP, ACTIVE, REAL, PADDED, SEQUENCE, STEPS, PADDED_STEPS, PAD_TOKENS = range(8)
STEPS_WITH = 8
"""Steps with NaN in real rows, Inf in real rows, NaN in padding, Inf in padding: four places from here."""
NOW = 12
"""The same for the step that runs."""
THROUGH = 16
"""Programs that are through with the launch that ends a step."""
HEADER = 17
KINDS = 4
"""NaN in real rows, Inf in real rows, NaN in padding, Inf in padding."""
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
_THROUGH = tl.constexpr(THROUGH)
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
def _watch_row(
    x_ptr: tl.tensor,
    row: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    header_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    padding_ptr: tl.tensor,
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
        kind = (row >= tl.load(header_ptr + _REAL)).to(tl.int32) * 2
        if has_padding:
            kind = (tl.load(padding_ptr + row) != 0).to(tl.int32) * 2
        if nan > 0:
            _record(header_ptr, entry_ptr, kind, step)
        if inf > 0:
            _record(header_ptr, entry_ptr, kind + 1, step)


@triton.jit
def _end_step(header_ptr: tl.tensor) -> None:
    """Add up what the step showed; nothing where none runs."""
    active = tl.load(header_ptr + _ACTIVE)
    extra = tl.maximum(tl.load(header_ptr + _PADDED) - tl.load(header_ptr + _REAL), 0) * active
    kind = tl.arange(0, 4)  # [KINDS]
    now = tl.atomic_add(header_ptr + _NOW + kind, 0)  # [KINDS]: other programs of this launch wrote it
    seen = tl.load(header_ptr + _STEPS_WITH + kind) + now * active  # [KINDS]
    tl.store(header_ptr + _STEPS_WITH + kind, seen)
    tl.store(header_ptr + _STEPS, tl.load(header_ptr + _STEPS) + active)
    tl.store(header_ptr + _PADDED_STEPS, tl.load(header_ptr + _PADDED_STEPS) + (extra > 0).to(tl.int32))
    tl.store(header_ptr + _PAD_TOKENS, tl.load(header_ptr + _PAD_TOKENS) + extra)
    tl.store(header_ptr + _ACTIVE, 0)


@triton.jit(do_not_specialize=["point", "rows"])
def watch_rows_kernel(
    x_ptr: tl.tensor,
    header_ptr: tl.tensor,
    found_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    point: tl.tensor,
    rows: tl.tensor,
    columns: tl.constexpr,
    has_padding: tl.constexpr,
    ends: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Look at one row of `x` [rows, columns]; `padding` int8 [rows] says which are. `ends` ends the step."""
    if tl.load(header_ptr + _ACTIVE) != 0:
        row = tl.program_id(0).to(tl.int64)
        entry = found_ptr + point * _KINDS * _FIELDS
        _watch_row(
            x_ptr,
            row,
            stride_row,
            stride_column,
            header_ptr,
            entry,
            padding_ptr,
            columns,
            has_padding,
            block,
        )
        # The last program to come here ends the step: all others have read and written what they had to.
        if ends:  # noqa: SIM102, for Triton evaluates both sides of `and`
            if tl.atomic_add(header_ptr + _THROUGH, 1) == rows - 1:
                tl.store(header_ptr + _THROUGH, 0)
                _end_step(header_ptr)


@triton.jit(do_not_specialize=["point_a", "point_b", "point_c"])
def watch_three_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    header_ptr: tl.tensor,
    found_ptr: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    stride_c: tl.tensor,
    point_a: tl.tensor,
    point_b: tl.tensor,
    point_c: tl.tensor,
    columns_a: tl.constexpr,
    columns_b: tl.constexpr,
    columns_c: tl.constexpr,
    block_a: tl.constexpr,
    block_b: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    """Look at one row of each of three tensors [rows, columns], whose columns lie side by side."""
    if tl.load(header_ptr + _ACTIVE) != 0:
        row = tl.program_id(0).to(tl.int64)
        a, b, c = (
            found_ptr + point_a * _KINDS * _FIELDS,
            found_ptr + point_b * _KINDS * _FIELDS,
            found_ptr + point_c * _KINDS * _FIELDS,
        )
        _watch_row(a_ptr, row, stride_a, 1, header_ptr, a, header_ptr, columns_a, False, block_a)
        _watch_row(b_ptr, row, stride_b, 1, header_ptr, b, header_ptr, columns_b, False, block_b)
        _watch_row(c_ptr, row, stride_c, 1, header_ptr, c, header_ptr, columns_c, False, block_c)


@triton.jit(do_not_specialize=["real", "padded"])
def begin_step_kernel(header_ptr: tl.tensor, real: tl.tensor, padded: tl.tensor) -> None:
    tl.store(header_ptr + _STEP, tl.load(header_ptr + _STEP) + 1)
    tl.store(header_ptr + _REAL, real)
    tl.store(header_ptr + _PADDED, padded)
    tl.store(header_ptr + _NOW + tl.arange(0, 4), tl.zeros([4], tl.int32))
    tl.store(header_ptr + _ACTIVE, 1)


@triton.jit
def end_step_kernel(header_ptr: tl.tensor) -> None:
    _end_step(header_ptr)


def launch_watch(
    x: torch.Tensor,
    header: torch.Tensor,
    found: torch.Tensor,
    point: int,
    padding: torch.Tensor | None,
    *,
    ends: bool = False,
) -> None:
    """Look at `x` [rows, columns], any floating type and strides, for the point with this number.

    With `ends` the step is over after that; `x` must have a row and a column then.
    """
    rows, columns = x.shape
    if rows == 0 or columns == 0:
        return
    block = _block(columns)
    with torch.cuda.device_of(x):
        watch_rows_kernel[(rows,)](
            x,
            header,
            found,
            header if padding is None else padding,
            x.stride(0),
            x.stride(1),
            point,
            rows,
            columns=columns,
            has_padding=padding is not None,
            ends=ends,
            block=block,
            num_warps=1 if block <= 512 else 4,
        )


def launch_watch_three(
    tensors: Sequence[torch.Tensor], header: torch.Tensor, found: torch.Tensor, points: Sequence[int]
) -> None:
    """Look at three tensors [rows, columns] in one launch, for the points with these numbers.

    All have the same rows, at least one, and columns that lie side by side.
    """
    a, b, c = tensors
    blocks = [_block(one.shape[1]) for one in tensors]
    with torch.cuda.device_of(a):
        watch_three_kernel[(a.shape[0],)](
            a,
            b,
            c,
            header,
            found,
            a.stride(0),
            b.stride(0),
            c.stride(0),
            *points,
            columns_a=a.shape[1],
            columns_b=b.shape[1],
            columns_c=c.shape[1],
            block_a=blocks[0],
            block_b=blocks[1],
            block_c=blocks[2],
            num_warps=1 if max(blocks) <= 512 else 4,
        )


def _block(columns: int) -> int:
    return int(min(max(triton.next_power_of_2(columns), 32), 2048))


def launch_begin(header: torch.Tensor, real: int, padded: int) -> None:
    """A step begins, with `real` rows of `padded`."""
    with torch.cuda.device_of(header):
        begin_step_kernel[(1,)](header, real, padded, num_warps=1)


def launch_end(header: torch.Tensor) -> None:
    """The step ends: what it showed is added up."""
    with torch.cuda.device_of(header):
        end_step_kernel[(1,)](header, num_warps=1)
