"""NVFP4: E2M1 values, an E4M3 scale for each 16 of them, and one float32 scale over all.

A value is ``code * block_scale * global_scale``. The global scale here *dequantizes*, as
checkpoints call `weight_scale_2` and `input_scale`. Some kernels want its reciprocal (FlashInfer's
`global_sf`, compressed-tensors' `weight_global_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moedoctor.reference import e2m1
from moedoctor.reference.fp8 import E4M3_MAX

BLOCK = 16
"""Values that share a block scale, along the last dimension."""


@dataclass(frozen=True)
class Nvfp4:
    """A quantized matrix [N, K], or a stack of them [E, N, K] with a global scale each."""

    packed: torch.Tensor
    """uint8 [..., N, K/2], the even element in the low nibble"""
    block_scales: torch.Tensor
    """float8_e4m3fn [..., N, K/16], row by row (not swizzled)"""
    global_scale: torch.Tensor
    """float32 [...]: a scalar for a matrix, [E] for a stack; [E, 2] if gate and up have their own"""


def quantize(w: torch.Tensor, global_scale: torch.Tensor | float | None = None) -> Nvfp4:
    """Return `w` [N, K] or [E, N, K] as NVFP4; K must be a multiple of 16, values finite.

    Without a `global_scale` each matrix gets amax / (448 * 6), so that its largest block scale is 448, but at
    least the smallest normal float32. A given scale (a float, a scalar or [E]) is used unchanged; block
    scales then saturate at 448 and values at 6. Raises ValueError for another K, for matrices without rows
    and without a scale, for values that are not finite and for a scale that is not positive.
    """
    if w.ndim < 2 or w.shape[-1] % BLOCK or not w.shape[-1]:
        raise ValueError(f"w: expected [..., N, K] with K a multiple of {BLOCK}, got {list(w.shape)}")
    if not w.shape[-2] and global_scale is None:
        raise ValueError(f"w: expected at least one row to take a global scale from, got {list(w.shape)}")
    if not bool(w.isfinite().all()):
        raise ValueError("w: expected finite values")
    blocks = w.double().unflatten(-1, (-1, BLOCK))  # [..., N, K/16, 16]
    scale = _check_global_scale(w, global_scale)  # [...]
    amax = blocks.abs().amax(-1)  # [..., N, K/16]
    block_scales = (amax / e2m1.MAX / scale.double()[..., None, None]).clamp(max=E4M3_MAX)  # [..., N, K/16]
    stored = block_scales.float().to(torch.float8_e4m3fn)  # [..., N, K/16]
    step = stored.double() * scale.double()[..., None, None]  # [..., N, K/16]
    steps = torch.where(step[..., None] > 0, blocks / step[..., None], 0.0)  # [..., N, K/16, 16]
    return Nvfp4(e2m1.pack(e2m1.encode(steps.flatten(-2))), stored, scale)


def dequantize(q: Nvfp4) -> torch.Tensor:
    """Return float32 [..., N, K]. The product of code and block scale is exact, so it is rounded once."""
    codes = e2m1.decode(e2m1.unpack(q.packed)).unflatten(-1, (-1, BLOCK))  # [..., N, K/16, 16]
    exact = codes * q.block_scales.float()[..., None]  # [..., N, K/16, 16]
    values: torch.Tensor = (exact * q.global_scale[..., None, None, None]).flatten(-2)
    return values


def round_trip(x: torch.Tensor, global_scale: torch.Tensor | float) -> torch.Tensor:
    """Return `x` [T, K] as a backend with 4-bit activations reads it: quantized and dequantized, float32.

    `global_scale` is the checkpoint's `input_scale`. Values saturate as in `quantize`.
    """
    return dequantize(quantize(x, global_scale))


def _check_global_scale(w: torch.Tensor, given: torch.Tensor | float | None) -> torch.Tensor:
    if given is None:
        amax = w.abs().amax((-2, -1)).float()  # [...]
        # A subnormal scale loses digits or becomes zero, and the block scales are divided by it.
        scale = (amax / (E4M3_MAX * e2m1.MAX)).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(amax > 0, scale, 1.0)
    scale = torch.as_tensor(given, dtype=torch.float32, device=w.device).expand(w.shape[:-2]).clone()
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError("global_scale: expected positive finite values")
    return scale
