"""Damage that a checkpoint can carry, and its repair: changes to a generated one before it is written."""

from __future__ import annotations

from typing import Any

import torch

from moedoctor.faults.quantization.scale_layout_lab import places
from moedoctor.fixes.moe.weight_layout import linear_scales, up_first
from moedoctor.reference.checkpoints import Change, Tensors
from moedoctor.reference.nvfp4 import Nvfp4

LAYERS, EXPERTS = 2, 8
_RATIO = 2.0
_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def _experts() -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(LAYERS) for expert in range(EXPERTS)
    ]


def as_it_is(tensors: Tensors, config: dict[str, Any]) -> None:
    """Nothing changed."""


def shared_scale(tensors: Tensors, config: dict[str, Any]) -> None:
    """MD014's reference: one global scale, the up half with block scales of half its range."""
    for prefix in _experts():
        scales = tensors[f"{prefix}.up_proj.weight_scale"]
        tensors[f"{prefix}.up_proj.weight_scale"] = (scales.float() / 2).to(scales.dtype)


def own_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """The same weights with a global scale of its own for the up half. A factor of two rounds nothing."""
    shared_scale(tensors, config)
    for prefix in _experts():
        scales = tensors[f"{prefix}.up_proj.weight_scale"]
        tensors[f"{prefix}.up_proj.weight_scale"] = (scales.float() * _RATIO).to(scales.dtype)
        tensors[f"{prefix}.up_proj.weight_scale_2"] = tensors[f"{prefix}.up_proj.weight_scale_2"] / _RATIO


def folded_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """The repair: the gate's scale for both, the ratio in the down projection's and its input scale."""
    own_scales(tensors, config)
    for prefix in _experts():
        tensors[f"{prefix}.up_proj.weight_scale_2"] = tensors[f"{prefix}.gate_proj.weight_scale_2"].clone()
        for part, factor in (("weight_scale_2", 1 / _RATIO), ("input_scale", _RATIO)):
            tensors[f"{prefix}.down_proj.{part}"] = tensors[f"{prefix}.down_proj.{part}"] * factor


def zero_inputs(tensors: Tensors, config: dict[str, Any]) -> None:
    """MD015: input scales of zero."""
    for name in tensors:
        if name.endswith("input_scale"):
            tensors[name] = torch.tensor(0.0)


def exchanged_halves(tensors: Tensors, config: dict[str, Any]) -> None:
    """MD017: what the checkpoint calls the gate is the up projection, and the reverse."""
    for prefix in _experts():
        for part in _PARTS:
            gate, up = f"{prefix}.gate_proj.{part}", f"{prefix}.up_proj.{part}"
            tensors[gate], tensors[up] = tensors[up], tensors[gate]


def restored_halves(tensors: Tensors, config: dict[str, Any]) -> None:
    """The repair: the fused weight of each expert in the other order."""
    exchanged_halves(tensors, config)
    for prefix in _experts():
        names = [f"{prefix}.{half}_proj" for half in ("gate", "up")]
        scales = torch.cat(
            [tensors[f"{name}.weight_scale"].view(torch.uint8) for name in names]
        )  # [2I, H/16]
        fused = Nvfp4(
            torch.cat([tensors[f"{name}.weight"] for name in names]),  # [2I, H/2]
            scales.view(torch.float8_e4m3fn),
            tensors[f"{names[0]}.weight_scale_2"],
        )
        right = up_first(fused)
        assert isinstance(right, Nvfp4)
        halves = zip(right.packed.chunk(2), right.block_scales.view(torch.uint8).chunk(2), strict=True)
        for name, (packed, half) in zip(names, halves, strict=True):
            tensors[f"{name}.weight"] = packed.contiguous()
            tensors[f"{name}.weight_scale"] = half.contiguous().view(torch.float8_e4m3fn)


def _block_scales(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith(".weight_scale")]


def tiled(tensors: Tensors, config: dict[str, Any]) -> None:
    """MD018: block scales in the order of NVFP4 kernels where checkpoints have them row by row."""
    for name in _block_scales(tensors):
        scales = tensors[name].view(torch.uint8)  # [M, S], whole tiles
        rows, columns = scales.shape
        memory = torch.zeros(scales.numel(), dtype=torch.uint8)  # [M * S]
        memory[places(rows, columns, scales.device).flatten()] = scales.flatten()
        tensors[name] = memory.reshape(scales.shape).view(torch.float8_e4m3fn)


def linear(tensors: Tensors, config: dict[str, Any]) -> None:
    """The repair: row by row again."""
    tiled(tensors, config)
    for name in _block_scales(tensors):
        tensors[name] = linear_scales(tensors[name], *tensors[name].shape)


CHECKPOINTS: dict[str, tuple[Change, Change, Change]] = {
    "MD014": (shared_scale, own_scales, folded_scales),
    "MD015": (as_it_is, zero_inputs, as_it_is),
    "MD017": (as_it_is, exchanged_halves, restored_halves),
    "MD018": (as_it_is, tiled, linear),
}
"""Id -> (reference, damaged, repaired)."""
