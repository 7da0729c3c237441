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


def round_trip_in_groups(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return `x` [T, N] as a backend reads it that gives each row, or each `group` values, a scale.

    The scale is the largest value over 448, as in vLLM's ``per_token_group_quant_fp8``. The last group may
    be short.
    """
    size = group or x.shape[1]
    whole = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size))  # [T, G * size]
    padded = whole.unflatten(1, (-1, size))  # [T, G, size]
    scale = (padded.abs().amax(2, keepdim=True) / E4M3_MAX).clamp(min=1e-10)  # [T, G, 1]
    steps = (padded / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)  # [T, G, size]
    rounded: torch.Tensor = (steps.float() * scale).flatten(1)[:, : x.shape[1]]
    return rounded
