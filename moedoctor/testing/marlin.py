"""NVFP4 weights in the layout to which vLLM repacks them for MARLIN.

Source: ``gptq_marlin_repack`` and ``prepare_nvfp4_moe_layer_for_marlin`` of vLLM 0.33.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moedoctor.reference import e2m1
from moedoctor.reference.nvfp4 import Nvfp4

_SHIFT = 2.0**7
"""Keeps scales in the upper half of float16's exponents; smaller ones are lost."""
_FACTOR = 2.0**119
"""Makes up for `_SHIFT`, and for E2M1 codes that the kernel reads with the exponents of bfloat16."""


def repack(name: str, weight: Nvfp4) -> dict[str, Tensor]:
    """Return the tensors that a cache has of experts [E, N, K]; N is a multiple of 64, K of 16.

    `name` is int32 [E, K / 16, 2 * N]; ``_NAME.scale`` float8_e4m3fn [E, K / 16, N], in another code;
    ``_NAME.alpha_or_gscale`` float32 [E]. Raises ValueError for other sizes.
    """
    codes = e2m1.unpack(weight.packed)  # [E, N, K]
    experts, rows, cols = codes.shape
    if rows % 64 or cols % 16:
        raise ValueError(f"weight: expected N a multiple of 64 and K of 16; got {list(codes.shape)}")
    tiles, groups = cols // 16, rows // 64
    # A row is 64 * group + 16 * j + 8 * below + c; an input is 16 * tile + 8 * high + 2 * t + odd.
    shape = experts, groups, 4, 2, 8, tiles, 2, 4, 2  # [E, group, j, below, c, tile, high, t, odd]
    parts = codes.view(shape).permute(
        0, 5, 1, 4, 7, 2, 8, 3, 6
    )  # [E, tile, group, c, t, j, odd, below, high]
    parts = parts.flatten(-3).long()  # [E, tile, group, c, t, j, code]
    words = (parts << torch.arange(0, 32, 4, device=codes.device)).sum(-1)  # [E, tile, group, c, t, j]
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).int().view(experts, tiles, -1)
    scales = weight.block_scales.float()  # [E, N, K/16]
    largest = float(scales.max())
    more = 2.0 ** max(torch.tensor(448 / largest).log2().floor().item(), 0) if largest > 0 else 1.0
    halves = (scales * more * _SHIFT).half()  # [E, N, K/16]
    halves[halves < 2] = 0
    upper = (halves.view(torch.int16) >> 7).to(torch.uint8)  # [E, N, K/16]: float16 without sign
    upper = upper.view(experts, groups, 2, 2, 2, 8, tiles).permute(0, 6, 1, 5, 2, 4, 3)
    stored = upper.reshape(experts, tiles, rows).view(torch.float8_e4m3fn)
    factors = weight.global_scale.float() * (_FACTOR / more)  # [E]
    return {name: signed, f"_{name}.scale": stored, f"_{name}.alpha_or_gscale": factors}
