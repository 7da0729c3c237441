"""Makes the scales of NVFP4 and FP8 checkpoints usable when they are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from moedoctor.reference import e2m1
from moedoctor.reference.fp8 import E4M3_MAX
from moedoctor.reference.nvfp4 import Nvfp4

_SMALLEST = 2.0**-126


def rescale(gate: Nvfp4, up: Nvfp4) -> Nvfp4:
    """Return ``w13`` [E, 2I, H] of both halves [E, I, H] with a common global scale, the larger of the two.

    The block scales of the other half are multiplied by the ratio and rounded to E4M3 again, which moves them
    by at most 1/16; packed values stay as they are. Raises ValueError for a scale that is not positive.
    """
    _check(gate, up)
    common = torch.maximum(gate.global_scale, up.global_scale)  # [E]
    halves = []
    for half in (gate, up):
        ratio = (half.global_scale.double() / common.double())[:, None, None]  # [E, 1, 1]
        scales = half.block_scales.double() * ratio  # [E, I, H/16]
        halves.append(scales.float().to(half.block_scales.dtype))
    packed = torch.cat((gate.packed, up.packed), 1)  # [E, 2I, H/2]
    return Nvfp4(
        packed, torch.cat([scales.view(torch.uint8) for scales in halves], 1).view(halves[0].dtype), common
    )


def fold(gate: Nvfp4, up: Nvfp4, down: Nvfp4) -> tuple[Nvfp4, Nvfp4]:
    """Return ``w13`` [E, 2I, H] with the gate's global scale, and ``w2`` [E, H, I] with the ratio in its own.

    Exact if the layer is linear in the up half, as act(gate) * up is: ``w2`` gives back the factor that
    ``w13`` loses. An input scale of ``w2`` must be divided by up / gate as well. Not for activations that
    clamp the up half. Raises ValueError for a scale that is not positive.
    """
    _check(gate, up)
    packed = torch.cat((gate.packed, up.packed), 1)  # [E, 2I, H/2]
    scales = torch.cat((gate.block_scales.view(torch.uint8), up.block_scales.view(torch.uint8)), 1)
    w13 = Nvfp4(packed, scales.view(gate.block_scales.dtype), gate.global_scale)
    ratio = up.global_scale.double() / gate.global_scale.double()  # [E]
    return w13, replace(down, global_scale=(down.global_scale.double() * ratio).float())


def repair_input_scales(scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return input scales [E] that are finite and positive for each expert.

    `scales` float32 [E] may hold NaN, zero, a negative or a subnormal number, if calibration never reached
    the expert or the checkpoint has no scale for it (fill the memory with NaN first). Such scales are
    replaced by the largest good scale of the layer, or without any by amax / (448 * 6) of activations `x` [T,
    K].
    """
    good = scales.isfinite() & (scales >= _SMALLEST)  # [E]
    if bool(good.any()):
        substitute = scales[good].max()
    else:
        substitute = (x.abs().amax().float() / (E4M3_MAX * e2m1.MAX)).clamp_min(_SMALLEST)
    return torch.where(good, scales, substitute)


def compute_kv_scale(values: torch.Tensor) -> float:
    """Return the scale at which the largest of `values` (keys or values of a calibration run) is 448."""
    return max(float(values.abs().amax()) / E4M3_MAX, _SMALLEST)


def _check(gate: Nvfp4, up: Nvfp4) -> None:
    for name, half in (("gate", gate), ("up", up)):
        if not bool(((half.global_scale > 0) & half.global_scale.isfinite()).all()):
            raise ValueError(f"{name}.global_scale: expected positive finite values")
    if gate.packed.shape != up.packed.shape:
        raise ValueError(
            f"up: expected the gate's shape {list(gate.packed.shape)}, got {list(up.packed.shape)}"
        )
