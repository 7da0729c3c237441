"""Expert weights and scales in the layout that a kernel reads; done once, when weights are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from moedoctor.reference.conventions import swap_gate_up, swap_halves
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.reference.swizzle import swizzle, unswizzle


def up_first(w13: torch.Tensor | Nvfp4 | Fp8) -> torch.Tensor | Nvfp4 | Fp8:
    """`w13` [E, 2I, H] of a checkpoint (gate half first) with the up half first, as FlashInfer reads it.

    Values and block scales are exchanged together. Its own inverse. Raises ValueError for an odd number of
    rows. Source: flashinfer/fused_moe/core.py, `cutlass_fused_moe`.
    """
    if isinstance(w13, Nvfp4):
        return swap_gate_up(w13)
    if isinstance(w13, Fp8):
        return replace(w13, values=swap_halves(w13.values.view(torch.uint8)).view(w13.values.dtype))
    return swap_halves(w13)


def tiled_scales(block_scales: torch.Tensor) -> torch.Tensor:
    """Block scales [..., M, S] of a checkpoint in tiles of 128x4, as NVFP4 tensor cores read them.

    [..., M', S'] with whole tiles; the padding is zero, so that nothing which was in that memory before can
    reach a real row.
    """
    return swizzle(block_scales)


def linear_scales(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales [..., rows, columns] row by row, as checkpoints have them, of `tiled_scales`.

    Raises ValueError where `tiles` has not the size of whole tiles for so many rows and columns.
    """
    return unswizzle(tiles, rows, columns)
