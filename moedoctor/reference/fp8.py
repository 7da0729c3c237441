"""FP8 weights with scales of several kinds, and activations with one scale a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Fp8:
    """A stack of E4M3 matrices with dequantizing scales."""

    values: torch.Tensor
    """float8_e4m3fn [E, N, K]"""
    scale: torch.Tensor
    """float32 [E], [E, halves], or with a block [E, halves * rows of scales, columns of scales]"""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None if all of a matrix, or of a half, do."""
    halves: int = 1
    """2 if gate and up have scales of their own, so that no block holds rows of both."""

    def dequantize(self, expert: int) -> torch.Tensor:
        """Return float32 [N, K]: one matrix."""
        rows, columns = self.values.shape[1:]
        height, width = self.block or (rows // self.halves, columns)
        scale = self.scale[expert].float().reshape(self.halves, -1, -(-columns // width))
        spread = scale.repeat_interleave(height, 1)[:, : rows // self.halves]  # [halves, N / halves, *]
        spread = spread.repeat_interleave(width, 2)[..., :columns].flatten(0, 1)  # [N, K]
        return self.values[expert].float() * spread


def round_trip(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `x` as a backend with FP8 activations reads it: saturated, rounded, dequantized; float32."""
    steps = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)  # [...]
    return steps.to(torch.float8_e4m3fn).float() * scale
