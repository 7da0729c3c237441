"""Counts the rows of a tensor that hold NaN or Inf, on the device and without the host, for the NaN trace.

The record of a trace is two int32 tensors. ``header`` [HEADER] holds the step, ``found`` [points, KINDS,
FIELDS] the rows at each point. A launch while no step is active, such as a warm-up, leaves no trace.

Shapes: a program has one of rows, and BLOCK of its columns at once; padding has an element for group rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from packaging.version import Version

from moedoctor.kernels.device_guard import make_current

# Places of `header`, as in `moedoctor.trace.nan_state`, which is also used without Triton.
_STEP, _ACTIVE, _REAL, _PADDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_SEQUENCE, _STEPS, _PADDED_STEPS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
_PAD_TOKENS = tl.constexpr(7)
_STEPS_WITH = tl.constexpr(8)
"""Steps with something of each kind; eight places from here, the last two of which stay 0."""
_NOW = tl.constexpr(16)
"""The same for the running step."""
_THROUGH = tl.constexpr(24)
"""Programs that are through with the launch that ends a step."""
_MASKED = tl.constexpr(25)
"""Elements of the step's mask, 0 if the first REAL rows of PADDED are not padding."""
_KINDS = tl.constexpr(6)
"""NaN in real rows, Inf in real rows, NaN in padding, Inf in padding, and both in rows that may be either."""
_STEPS_FOUND, _FIRST_STEP, _FIRST_SEQUENCE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LAST_STEP, _FIELDS = tl.constexpr(4), tl.constexpr(5)

_OLDEST_TRITON = Version("3.6")
"""The oldest Triton for which launching a compiled form was tested."""


class QuickLaunch:
    """A kernel that keeps its compiled forms under a key of the caller's, so that a launch is short.

    Triton finds the compiled form anew at each launch, from every argument. That takes longer than small
    kernels do and, outside of CUDA graphs, adds to each step. The key must hold everything that Triton
    compiles for: types, constants, and for the arguments that it specializes whether a number is 1 or a
    multiple of 16.
    `triton_version`: before 3.6 nothing is kept, because a compiled form took other arguments then.
    """

    def __init__(self, kernel: Any, triton_version: str) -> None:
        self._kernel = kernel
        self._keeps = Version(triton_version) >= _OLDEST_TRITON
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: int, *arguments: Any, num_warps: int) -> None:
        """Launch `grid` programs; `arguments` are all of the kernel's, in its order."""
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(grid, 1, 1)](*arguments)
            return
        compiled = self._kernel[(grid,)](*arguments, num_warps=num_warps)
        if compiled is not None and self._keeps:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled


def check_alignment(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Return for each tensor whether it begins at a multiple of 16 bytes, for a key."""
    return tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)


@triton.jit
def _record(header_ptr: tl.tensor, entry_ptr: tl.tensor, kind: tl.tensor, step: tl.tensor) -> None:
    """Count one more row of `kind` at the entry [KINDS, FIELDS] of a point."""
    place = entry_ptr + kind * _FIELDS
    tl.atomic_add(place, 1)
    if tl.atomic_xchg(place + _LAST_STEP, step) != step:
        tl.atomic_add(place + _STEPS_FOUND, 1)
        # Kernels of a stream run in order, so the running number shows which point was first.
        if tl.atomic_cas(place + _FIRST_STEP, 0, step) == 0:
            number = tl.atomic_add(header_ptr + _SEQUENCE, 1)
            tl.atomic_xchg(place + _FIRST_SEQUENCE, number + 1)
    tl.atomic_xchg(header_ptr + _NOW + kind, 1)


@triton.jit
def _kind_of(
    row: tl.tensor,
    rows: tl.tensor,
    header_ptr: tl.tensor,
    padding: tl.tuple,
    has_padding: tl.constexpr,
) -> tl.tensor:
    """Return 0 for a real row of `rows`, 2 for padding, 4 if that is not known."""
    padding_ptr, elements, group = padding
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
def _watch_row(
    x_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    record: tl.tuple,
    point: tl.tensor,
    padding: tl.tuple,
    columns: tl.constexpr,
    has_padding: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Look at one row of `x` [rows, columns] and record at its point's entry if it is not finite.

    `record`: header and found. `padding`: the mask, its elements and the group of each.
    """
    header_ptr, found_ptr = record
    entry_ptr = found_ptr + point * _KINDS * _FIELDS
    is_nan = tl.zeros([BLOCK], tl.int32)  # [BLOCK]
    is_inf = tl.zeros([BLOCK], tl.int32)  # [BLOCK]
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        at = x_ptr + row * stride_row + column.to(tl.int64) * stride_column
        x = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)  # [BLOCK]
        is_nan = is_nan | (x != x).to(tl.int32)
        is_inf = is_inf | (tl.abs(x) == float("inf")).to(tl.int32)
    nan, inf = tl.max(is_nan, axis=0), tl.max(is_inf, axis=0)
    if nan + inf > 0:
        step = tl.load(header_ptr + _STEP)
        kind = _kind_of(row, rows, header_ptr, padding, has_padding)
        if nan > 0:
            _record(header_ptr, entry_ptr, kind, step)
        if inf > 0:
            _record(header_ptr, entry_ptr, kind + 1, step)


@triton.jit
def _end(header_ptr: tl.tensor) -> None:
    """Add the step's results to the totals; does nothing if no step runs."""
    active = tl.load(header_ptr + _ACTIVE)
    extra = tl.maximum(tl.load(header_ptr + _PADDED) - tl.load(header_ptr + _REAL), 0) * active
    kind = tl.arange(0, 8)  # [8]: KINDS and two that stay 0
    now = tl.atomic_add(header_ptr + _NOW + kind, 0)  # [8]: other programs of this launch wrote it
    steps_with = tl.load(header_ptr + _STEPS_WITH + kind) + now * active  # [8]
    tl.store(header_ptr + _STEPS_WITH + kind, steps_with)
    tl.store(header_ptr + _STEPS, tl.load(header_ptr + _STEPS) + active)
    tl.store(header_ptr + _PADDED_STEPS, tl.load(header_ptr + _PADDED_STEPS) + (extra > 0).to(tl.int32))
    tl.store(header_ptr + _PAD_TOKENS, tl.load(header_ptr + _PAD_TOKENS) + extra)
    tl.store(header_ptr + _ACTIVE, 0)


@triton.jit(do_not_specialize=["point", "rows", "elements", "group"])
def watch_rows_kernel(
    x_ptr: tl.tensor,
    header_ptr: tl.tensor,
    found_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    point: tl.tensor,
    rows: tl.tensor,
    elements: tl.tensor,
    group: tl.tensor,
    columns: tl.constexpr,
    has_padding: tl.constexpr,
    ends: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Look at one row of `x` [rows, columns].

    Each element of `padding` int8 [elements] is for `group` rows and not 0 if they are padding. `ends` ends
    the step.
    """
    if tl.load(header_ptr + _ACTIVE) != 0:
        row = tl.program_id(0).to(tl.int64)
        record, padding = (header_ptr, found_ptr), (padding_ptr, elements, group)
        _watch_row(
            x_ptr, row, rows, stride_row, stride_column, record, point, padding, columns, has_padding, BLOCK
        )
        # The last program to come here ends the step: all others have read and written what they had to.
        if ends:  # noqa: SIM102, for Triton evaluates both sides of `and`
            if tl.atomic_add(header_ptr + _THROUGH, 1) == rows - 1:
                tl.store(header_ptr + _THROUGH, 0)
                _end(header_ptr)


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
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Look at one row of each of three tensors [rows, columns], whose columns are side by side."""
    if tl.load(header_ptr + _ACTIVE) != 0:
        row = tl.program_id(0).to(tl.int64)
        rows = tl.num_programs(0)
        record, padding = (header_ptr, found_ptr), (header_ptr, 0, 0)
        _watch_row(a_ptr, row, rows, stride_a, 1, record, point_a, padding, columns_a, False, BLOCK_A)
        _watch_row(b_ptr, row, rows, stride_b, 1, record, point_b, padding, columns_b, False, BLOCK_B)
        _watch_row(c_ptr, row, rows, stride_c, 1, record, point_c, padding, columns_c, False, BLOCK_C)


@triton.jit(do_not_specialize=["real", "padded"])
def begin_step_kernel(header_ptr: tl.tensor, real: tl.tensor, padded: tl.tensor) -> None:
    _end(header_ptr)  # a step that still runs because the model raised
    tl.debug_barrier()
    tl.store(header_ptr + _STEP, tl.load(header_ptr + _STEP) + 1)
    tl.store(header_ptr + _REAL, real)
    tl.store(header_ptr + _PADDED, padded)
    tl.store(header_ptr + _MASKED, 0)
    tl.store(header_ptr + _NOW + tl.arange(0, 8), tl.zeros([8], tl.int32))
    tl.store(header_ptr + _ACTIVE, 1)


@triton.jit
def end_step_kernel(header_ptr: tl.tensor) -> None:
    _end(header_ptr)


_watch_rows, _watch_three, _begin_step, _end_step = (
    QuickLaunch(kernel, triton.__version__)
    for kernel in (watch_rows_kernel, watch_three_kernel, begin_step_kernel, end_step_kernel)
)


def launch_watch(
    x: torch.Tensor,
    header: torch.Tensor,
    found: torch.Tensor,
    point: int,
    padding: torch.Tensor | None,
    *,
    group: int = 0,
    ends: bool = False,
) -> None:
    """Look at `x` [rows, columns], any floating type and strides, for the point with this number.

    Each element of `padding` int8 [elements] is for `group` neighboring rows. Without it, 1 or `group` rows
    may belong to a row of the step, or with 0 any number. With `ends` the step is over after that; `x` must
    then have a row and a column.
    """
    rows, columns = x.shape
    if rows == 0 or columns == 0:
        return
    block = _choose_block(columns)
    elements = 0 if padding is None else padding.numel()
    mask = header if padding is None else padding
    row, column = x.stride()
    kind = (columns, padding is not None, ends, block)
    with make_current(x):
        _watch_rows(
            (x.device, x.dtype, row, column, *kind, check_alignment(x, header, found, mask)),
            rows,
            x,
            header,
            found,
            mask,
            row,
            column,
            point,
            rows,
            elements,
            group if group or not elements else max(rows // elements, 1),
            *kind,
            num_warps=1 if block <= 512 else 4,
        )


def launch_watch_three(
    tensors: Sequence[torch.Tensor], header: torch.Tensor, found: torch.Tensor, points: Sequence[int]
) -> None:
    """Look at three tensors [rows, columns] in one launch, for the points with these numbers.

    All have the same rows, at least one, and columns that are side by side.
    """
    a, b, c = tensors
    columns = [tensor.shape[1] for tensor in tensors]
    strides = [tensor.stride(0) for tensor in tensors]
    types = [tensor.dtype for tensor in tensors]
    blocks = [_choose_block(width) for width in columns]
    with make_current(a):
        _watch_three(
            (a.device, *types, *strides, *columns, check_alignment(a, b, c, header, found)),
            a.shape[0],
            a,
            b,
            c,
            header,
            found,
            *strides,
            *points,
            *columns,
            *blocks,
            num_warps=1 if max(blocks) <= 512 else 4,
        )


def _choose_block(columns: int) -> int:
    return int(min(max(triton.next_power_of_2(columns), 32), 2048))


def launch_begin(header: torch.Tensor, real: int, padded: int) -> None:
    """Begin a step with `real` rows of `padded`."""
    with make_current(header):
        _begin_step((header.device, check_alignment(header)), 1, header, real, padded, num_warps=1)


def launch_end(header: torch.Tensor) -> None:
    """End the step and add its results to the totals."""
    with make_current(header):
        _end_step((header.device, check_alignment(header)), 1, header, num_warps=1)
