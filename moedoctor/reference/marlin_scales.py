"""NVFP4 scales as vLLM's Marlin kernel holds them, and back.

Marlin multiplies 4-bit weights as bfloat16. Its block scales are unsigned, five exponent and three
mantissa bits, the upper byte of a float16 of ``scale * 2**7`` whose sign bit is shifted away; below that
it has only zero. Source: vLLM 0.21.0, quantization/utils/marlin_utils_fp4.py.
"""

from __future__ import annotations

import torch

_SHIFT = 2.0**7
_SMALLEST = 2.0
"""What is smaller than this after the shift becomes zero."""


def to_s0e5m3(scales: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """uint8, the shape of `scales` (E4M3, >= 0): the byte that Marlin holds for ``scale * factor``.

    `factor` is a power of two that the global scale is divided by. Raises ValueError for a negative scale,
    of which the format has none.
    """
    values = scales.float()  # [...]
    if bool((values < 0).any()):
        raise ValueError("scales: Marlin has no negative block scales")
    shifted = (values * factor * _SHIFT).half()  # [...]
    shifted = torch.where(shifted < _SMALLEST, torch.zeros_like(shifted), shifted)
    return ((shifted.view(torch.int16).to(torch.int32) << 1 >> 8) & 255).to(torch.uint8)


def from_s0e5m3(stored: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """float32: the scale that a byte of `to_s0e5m3` stands for."""
    half = ((stored.to(torch.int32) << 7) & 0x7FFF).to(torch.int16).view(torch.float16)  # [...]
    return half.float() / _SHIFT / factor


def common_factor(scales: torch.Tensor) -> float:
    """The power of two by which all scales of a layer may grow up to 448; 1.0 where all are zero."""
    largest = float(scales.float().max()) if scales.numel() else 0.0
    if largest <= 0:
        return 1.0
    return float(2.0 ** torch.floor(torch.log2(torch.tensor(448.0 / largest))).item())
