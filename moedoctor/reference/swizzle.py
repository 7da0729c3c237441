"""The 128x4 layout in which NVFP4 tensor cores read block scales.

Scales are stored in tiles of 128 rows and 4 columns, a tile after another along the columns. In a tile, row
r and column c lie at byte ``(r % 32) * 16 + (r // 32) * 4 + c``. Source: cuBLAS documentation, "1D Block
Scaling Factors Layout".
"""

from __future__ import annotations

import torch

TILE_ROWS, TILE_COLUMNS = 128, 4
_GROUP = 32


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of the swizzled array: whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """[..., M', S'] in tiles, of linear scales [..., M, S]; M' and S' are whole tiles, padding is zero.

    One-byte types only. The shape tells nothing of the order of the bytes in it.
    """
    rows, columns = scales.shape[-2:]
    tall, wide = padded_shape(rows, columns)
    raw = scales.contiguous().view(torch.uint8)  # [..., M, S]
    padded = raw.new_zeros((*raw.shape[:-2], tall, wide))  # [..., M', S']
    padded[..., :rows, :columns] = raw
    tiles = padded.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, TILE_ROWS // _GROUP, _GROUP))
    # [..., row tile, group, row in group, column tile, column] -> what changes fastest comes last
    moved = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    swizzled: torch.Tensor = moved.reshape(padded.shape).view(scales.dtype)
    return swizzled


def unswizzle(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Linear scales [..., rows, columns] of a swizzled array [..., M', S']: the inverse of `swizzle`.

    Raises ValueError where [M', S'] is not the padded shape of [rows, columns].
    """
    tall, wide = padded_shape(rows, columns)
    if tuple(swizzled.shape[-2:]) != (tall, wide):
        raise ValueError(f"swizzled: expected [..., {tall}, {wide}], got {list(swizzled.shape)}")
    raw = swizzled.contiguous().view(torch.uint8)  # [..., M', S']
    shape = (
        *raw.shape[:-2],
        tall // TILE_ROWS,
        wide // TILE_COLUMNS,
        _GROUP,
        TILE_ROWS // _GROUP,
        TILE_COLUMNS,
    )
    tiles = raw.reshape(shape)  # [..., row tile, column tile, row in group, group, column]
    moved = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return moved.reshape(raw.shape)[..., :rows, :columns].contiguous().view(swizzled.dtype)
