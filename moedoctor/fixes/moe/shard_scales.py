"""Shards that are no multiple of a block of scales, or of a kernel's tiles (MD022)."""

from __future__ import annotations

import math

import torch


def take_shard_scales(
    scales: torch.Tensor, block: tuple[int, int], rows: range, columns: range
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the scales of one shard of a weight, and the size of the blocks that they are for.

    Args:
        scales: float32 [ceil(N / block_n), ceil(K / block_k)] of the whole weight [N, K].
        block: (block_n, block_k) of `scales`.
        rows: The rows of the shard, such as ``range(192, 384)``.
        columns: Its columns.

    The new blocks are the largest that divide the old ones, the shard and its beginning: each lies in one old
    block, whose scale it has. So nothing is rounded, and every shard of the same size gets the same blocks.
    """
    units, taken = [], scales
    for dim, (size, part) in enumerate(zip(block, (rows, columns), strict=True)):
        unit = math.gcd(size, len(part), part.start)
        starts = torch.arange(part.start, part.stop, unit, device=scales.device)
        taken = taken.index_select(dim, starts // size)
        units.append(unit)
    return taken, (units[0], units[1])


def expand_scales(scales: torch.Tensor, unit: tuple[int, int]) -> torch.Tensor:
    """Return a scale for each weight of a shard [N, K] that is a multiple of `unit`."""
    return scales.repeat_interleave(unit[0], 0).repeat_interleave(unit[1], 1)


def pad_to_tiles(weight: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Return a weight [N, K] with zeros up to whole tiles, which no product of experts shows.

    Gate and up are padded apart: together, up would begin in gate's zeros.
    """
    rows, columns = (-size % unit for size, unit in zip(weight.shape, tile, strict=True))
    return torch.nn.functional.pad(weight, (0, columns, 0, rows))
