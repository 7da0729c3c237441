"""Looks for NaN and Inf in a tensor's rows and counts them on the device, without the host.

`moedoctor.kernels.watch_row` says how the record is laid out. A launch while no step is active, such as a
warm-up, leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moedoctor.kernels.quick_launch import QuickLaunch, aligned, device_of
from moedoctor.kernels.watch_row import (
    _ACTIVE,
    _FIELDS,
    _KINDS,
    _MASKED,
    _NOW,
    _PADDED,
    _REAL,
    _STEP,
    _THROUGH,
    end_step,
    watch_row,
)


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
    block: tl.constexpr,
) -> None:
    """Look at one row of `x` [rows, columns]; an element of `padding` int8 [elements] says for `group` rows
    whether they are. `ends` ends the step."""
    if tl.load(header_ptr + _ACTIVE) != 0:
        row = tl.program_id(0).to(tl.int64)
        entry = found_ptr + point * _KINDS * _FIELDS
        watch_row(
            x_ptr,
            row,
            rows,
            stride_row,
            stride_column,
            header_ptr,
            entry,
            padding_ptr,
            elements,
            group,
            columns,
            has_padding,
            block,
        )
        # The last program to come here ends the step: all others have read and written what they had to.
        if ends:  # noqa: SIM102, for Triton evaluates both sides of `and`
            if tl.atomic_add(header_ptr + _THROUGH, 1) == rows - 1:
                tl.store(header_ptr + _THROUGH, 0)
                end_step(header_ptr)


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
        rows = tl.num_programs(0)
        a, b, c = (
            found_ptr + point_a * _KINDS * _FIELDS,
            found_ptr + point_b * _KINDS * _FIELDS,
            found_ptr + point_c * _KINDS * _FIELDS,
        )
        watch_row(a_ptr, row, rows, stride_a, 1, header_ptr, a, header_ptr, 0, 0, columns_a, False, block_a)
        watch_row(b_ptr, row, rows, stride_b, 1, header_ptr, b, header_ptr, 0, 0, columns_b, False, block_b)
        watch_row(c_ptr, row, rows, stride_c, 1, header_ptr, c, header_ptr, 0, 0, columns_c, False, block_c)


@triton.jit(do_not_specialize=["real", "padded"])
def begin_step_kernel(header_ptr: tl.tensor, real: tl.tensor, padded: tl.tensor) -> None:
    end_step(header_ptr)  # one that still runs, for the model raised
    tl.debug_barrier()
    tl.store(header_ptr + _STEP, tl.load(header_ptr + _STEP) + 1)
    tl.store(header_ptr + _REAL, real)
    tl.store(header_ptr + _PADDED, padded)
    tl.store(header_ptr + _MASKED, 0)
    tl.store(header_ptr + _NOW + tl.arange(0, 8), tl.zeros([8], tl.int32))
    tl.store(header_ptr + _ACTIVE, 1)


@triton.jit
def end_step_kernel(header_ptr: tl.tensor) -> None:
    end_step(header_ptr)


_watch_rows, _watch_three, _begin_step, _end_step = (
    QuickLaunch(one, triton.__version__)
    for one in (watch_rows_kernel, watch_three_kernel, begin_step_kernel, end_step_kernel)
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

    Each element of `padding` int8 [elements] stands for `group` rows in a row. Without it, `group` rows may
    belong to one of the step, or one, or with 0 any number. With `ends` the step is over after that; `x` must
    have a row and a column then.
    """
    rows, columns = x.shape
    if rows == 0 or columns == 0:
        return
    block = _block(columns)
    elements = 0 if padding is None else padding.numel()
    mask = header if padding is None else padding
    row, column = x.stride()
    kind = (columns, padding is not None, ends, block)
    with device_of(x):
        _watch_rows(
            (x.device, x.dtype, row, column, *kind, aligned(x, header, found, mask)),
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

    All have the same rows, at least one, and columns that lie side by side.
    """
    a, b, c = tensors
    blocks = [_block(one.shape[1]) for one in tensors]
    strides = [one.stride(0) for one in tensors]
    columns = [one.shape[1] for one in tensors]
    types = [one.dtype for one in tensors]
    with device_of(a):
        _watch_three(
            (a.device, *types, *strides, *columns, aligned(a, b, c, header, found)),
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


def _block(columns: int) -> int:
    return int(min(max(triton.next_power_of_2(columns), 32), 2048))


def launch_begin(header: torch.Tensor, real: int, padded: int) -> None:
    """A step begins, with `real` rows of `padded`."""
    with device_of(header):
        _begin_step((header.device, aligned(header)), 1, header, real, padded, num_warps=1)


def launch_end(header: torch.Tensor) -> None:
    """The step ends: what it showed is added up."""
    with device_of(header):
        _end_step((header.device, aligned(header)), 1, header, num_warps=1)
