"""What checkpoints and kernels call by one name and mean differently.

| | checkpoint, vLLM's layer, Marlin | FlashInfer's and vLLM's CUTLASS kernels |
|---|---|---|
| first weight `w13` | gate half (w1) first | FlashInfer: up half (w3) first |
| global scale | multiplies codes back (`weight_scale_2`) | its reciprocal multiplies values forth |
| block scales | row by row; Marlin permutes its own | swizzled 128x4 |
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import torch

from moedoctor.reference.nvfp4 import Nvfp4


class GateOrder(str, Enum):
    """Which half of `w13` [2I, H] comes first."""

    GATE_FIRST = "gate_first"
    """Checkpoints, vLLM's layer, Marlin, Triton."""
    UP_FIRST = "up_first"
    """FlashInfer's CUTLASS and TRT-LLM kernels."""


def swap_halves(w13: torch.Tensor) -> torch.Tensor:
    """[..., 2I, H] with the halves of the rows exchanged: one gate order made into the other."""
    if w13.shape[-2] % 2:
        raise ValueError(f"w13: expected an even number of rows, got {w13.shape[-2]}")
    return torch.cat(tuple(reversed(w13.chunk(2, dim=-2))), dim=-2)


def swap_gate_up(w13: Nvfp4) -> Nvfp4:
    """The same weight in the other gate order: values and block scales are exchanged together."""
    scales = swap_halves(w13.block_scales.view(torch.uint8)).view(w13.block_scales.dtype)
    return replace(w13, packed=swap_halves(w13.packed), block_scales=scales)


def encoding_scale(global_scale: torch.Tensor) -> torch.Tensor:
    """The scale that multiplies values before they are quantised: the reciprocal of `weight_scale_2`.

    FlashInfer's `global_sf`, compressed-tensors' `weight_global_scale` (448 * 6 / amax).
    """
    return 1.0 / global_scale


def gemm_alpha(input_scale: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """What a kernel with both operands in NVFP4 multiplies its sums by, of two dequantising scales."""
    return input_scale * weight_scale
