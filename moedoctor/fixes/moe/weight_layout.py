"""Expert weights and block scales in the layout that a kernel reads. Convert once, when weights are loaded.

What checkpoints and kernels call by one name and mean differently:

| | checkpoint, vLLM's layer, Marlin | FlashInfer's and vLLM's CUTLASS kernels |
|---|---|---|
| first weight `w13` | gate half (w1) first | FlashInfer: up half (w3) first |
| global scale | multiplies codes back (`weight_scale_2`) | its reciprocal multiplies values forth |
| block scales | row by row; Marlin permutes its own | tiles of 128x4 |
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.nvfp4 import Nvfp4

TILE_ROWS, TILE_COLUMNS = 128, 4
_GROUP = 32


def put_up_first(w13: Weight) -> Weight:
    """Return `w13` [..., 2I, H] of a checkpoint (gate half first) with the up half first.

    FlashInfer reads it that way. Values and block scales are exchanged together. It is its own inverse.
    Raises ValueError for an odd number of rows. Source: flashinfer/fused_moe/core.py, `cutlass_fused_moe`.
    """
    if isinstance(w13, Nvfp4):
        return replace(w13, packed=_swap_halves(w13.packed), block_scales=_swap_halves(w13.block_scales))
    if isinstance(w13, Fp8):
        scale = _swap_halves(w13.scale) if w13.halves == 2 else w13.scale
        return replace(w13, values=_swap_halves(w13.values), scale=scale)
    return _swap_halves(w13)


def tile_scales(block_scales: torch.Tensor) -> torch.Tensor:
    """Return block scales [..., M, S] of a checkpoint in tiles of 128x4, as NVFP4 tensor cores read them.

    The result is [..., M', S'] with whole tiles, one after another along the columns. In a tile, row r and
    column c are at byte ``(r % 32) * 16 + (r // 32) * 4 + c``. The padding is zero, so that nothing which was
    in that memory before can reach a real row. One-byte types only.
    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    rows, columns = block_scales.shape[-2:]
    raw = block_scales.contiguous().view(torch.uint8)  # [..., M, S]
    padded = raw.new_zeros((*raw.shape[:-2], *pad_shape(rows, columns)))  # [..., M', S']
    padded[..., :rows, :columns] = raw
    tiles = padded.unflatten(-1, (-1, TILE_COLUMNS)).unflatten(-3, (-1, TILE_ROWS // _GROUP, _GROUP))
    # [..., row tile, group, row in group, column tile, column] -> what changes fastest comes last
    moved = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    tiled: torch.Tensor = moved.reshape(padded.shape).view(block_scales.dtype)
    return tiled


def flatten_scales(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return block scales [..., rows, columns] row by row: the inverse of `tile_scales`.

    Raises ValueError if `tiles` does not have the padded shape of [rows, columns].
    """
    tall, wide = pad_shape(rows, columns)
    if tuple(tiles.shape[-2:]) != (tall, wide):
        raise ValueError(f"tiles: expected [..., {tall}, {wide}], got {list(tiles.shape)}")
    raw = tiles.contiguous().view(torch.uint8)  # [..., M', S']
    inside = (tall // TILE_ROWS, wide // TILE_COLUMNS, _GROUP, TILE_ROWS // _GROUP, TILE_COLUMNS)
    # [..., row tile, column tile, row in group, group, column]
    moved = raw.reshape(*raw.shape[:-2], *inside).movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return moved.reshape(raw.shape)[..., :rows, :columns].contiguous().view(tiles.dtype)


def pad_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return (rows, columns) of the tiled array: whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    """Exchange the halves of the rows of `tensor` [..., 2I, H]."""
    rows = tensor.shape[-2]
    if rows % 2:
        raise ValueError(f"w13: expected an even number of rows, got {rows}")
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # torch cannot join 8-bit floats
    return torch.cat(raw.chunk(2, dim=-2)[::-1], dim=-2).view(tensor.dtype)
