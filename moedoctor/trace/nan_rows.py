"""Which rows of an output belong to which row of the step, by the output's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence


def row_dimensions(shape: Sequence[int], mask: Sequence[int] | None = None) -> Sequence[int]:
    """The dimensions of `shape` that make its rows: all but the last.

    Every element is a row of its own where there are fewer than two dimensions, and where a mask of two or
    more dimensions has the same shape.
    """
    if len(shape) < 2 or (mask is not None and len(mask) > 1 and tuple(shape) == tuple(mask)):
        return tuple(shape) or (1,)
    return tuple(shape[:-1])


def rows_each(rows: Sequence[int], mask: Sequence[int]) -> int:
    """How many rows in a row belong to each element of a mask; 0 where that cannot be told.

    `rows` are the dimensions that `row_dimensions` gives, batch first as the mask's. They must begin with the
    mask's own dimensions, or with one of as many elements: [B, T, heads] and [B * T, heads] do for a mask
    [B, T], [B, heads, T] does not, and neither does what could be that, because as many heads are there.
    """
    count, total = math.prod(mask), math.prod(rows)
    if not count or total % count:
        return 0
    if len(rows) == 1:
        return total // count
    if tuple(rows[: len(mask)]) == tuple(mask):
        cut = len(mask)
    elif len(mask) == 1:
        cut = next((one for one in range(1, len(rows) + 1) if math.prod(rows[:one]) == count), 0)
    else:
        cut = int(rows[0] == count)
    inner = {mask[-1], rows[cut - 1]} - {1}
    return total // count if cut and not inner.intersection(rows[cut:]) else 0


def group_of(rows: Sequence[int]) -> int:
    """How many rows in a row may belong to one row of a step whose number of rows only the device knows.

    As many as of the step are always right. 0: any number, for the rows have one dimension.
    """
    rows = [one for one in rows if one != 1]
    if len(rows) < 2:
        return 0
    first = 1 if len(rows) == 2 else 2  # [T, heads], or [B, T, heads, ...]
    return 1 if rows[first - 1] in rows[first:] else math.prod(rows[first:])
