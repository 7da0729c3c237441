"""FP8 weights and activations with one scale a tensor, as static per-tensor checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Fp8:
    """A stack of E4M3 matrices with a dequantising scale each."""

    values: torch.Tensor
    """float8_e4m3fn [E, N, K]"""
    scale: torch.Tensor
    """float32 [E]"""


def round_trip(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `x` as a backend with FP8 activations reads it: saturated, rounded, dequantized; float32."""
    steps = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)  # [...]
    return steps.to(torch.float8_e4m3fn).float() * scale
