"""MD018 in the child: kernels that read block scales in tiles or row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moedoctor.faults.quantization.checkpoint_lab import Changes, compare_layer, make_routed_layer
from moedoctor.faults.quantization.scale_layout import ScaleLayoutParameters
from moedoctor.fixes.moe.weight_layout import TILE_COLUMNS, TILE_ROWS, flatten_scales, pad_shape, tile_scales
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import Case, Evidence

# E = experts, M = rows of a weight, S = its block scales a row

_NAN = 0x7F
"""NaN in E4M3, which stale memory may hold."""

Kernel = Callable[[torch.Tensor], torch.Tensor]
"""Block scales of a checkpoint [E, M, S] -> the block scales [E, M, S] that a kernel computes with."""


@dataclass(frozen=True)
class TiledKernel:
    """Reads in tiles what `load` stored. The last column of tiles is read whole, padding included."""

    load: Callable[[torch.Tensor], torch.Tensor]
    """Block scales [E, M, S] -> the memory that the kernel is given, as many bytes as whole tiles have."""

    def __call__(self, block_scales: torch.Tensor) -> torch.Tensor:
        rows, columns = block_scales.shape[-2:]
        memory = self.load(block_scales).view(torch.uint8).reshape(len(block_scales), -1)  # [E, M' * S']
        read = memory[:, find_places(rows, columns, memory.device)].view(block_scales.dtype)  # [E, M, S]
        # The padding of a row's last tile belongs to blocks of zeros: 0 * scale, and 0 * NaN is NaN.
        _, padded_columns = pad_shape(rows, columns)
        padding = find_places(rows, padded_columns, memory.device)[:, columns:]  # [M, S' - S]
        poisoned = memory[:, padding].view(block_scales.dtype).isnan().any(2, keepdim=True)  # [E, M, 1]
        return torch.where(poisoned, float("nan"), read.float()).to(block_scales.dtype)


def find_places(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return the place of each scale in the tiles, int64 [rows, columns], as cuBLAS documents it."""
    row = torch.arange(rows, device=device)[:, None]  # [M, 1]
    column = torch.arange(columns, device=device)[None]  # [1, S]
    tile = row // TILE_ROWS * -(-columns // TILE_COLUMNS) + column // TILE_COLUMNS  # [M, S]
    return (
        tile * (TILE_ROWS * TILE_COLUMNS)
        + row % 32 * 16
        + row % TILE_ROWS // 32 * TILE_COLUMNS
        + column % TILE_COLUMNS
    )


def read_tiles_by_row(block_scales: torch.Tensor) -> torch.Tensor:
    rows, columns = block_scales.shape[-2:]
    _, padded_columns = pad_shape(rows, columns)
    tiles = tile_scales(block_scales).view(torch.uint8)
    tiles = tiles.reshape(len(block_scales), -1, padded_columns)  # [E, M', S']
    return tiles[:, :rows, :columns].contiguous().view(block_scales.dtype)


def _pad_only(block_scales: torch.Tensor) -> torch.Tensor:
    """Store row by row, in an array of the size that the kernel expects."""
    rows, columns = block_scales.shape[-2:]
    shape = (len(block_scales), *pad_shape(rows, columns))
    padded = torch.zeros(shape, dtype=torch.uint8, device=block_scales.device)  # [E, M', S']
    padded[:, :rows, :columns] = block_scales.view(torch.uint8)
    return padded


def _leave_padding(block_scales: torch.Tensor) -> torch.Tensor:
    """Store in tiles, but write only the real scales: the rest is what the memory held."""
    rows, columns = block_scales.shape[-2:]
    padded_rows, padded_columns = pad_shape(rows, columns)
    memory = torch.full(
        (len(block_scales), padded_rows * padded_columns), _NAN, dtype=torch.uint8, device=block_scales.device
    )  # [E, M' * S']
    memory[:, find_places(rows, columns, memory.device).flatten()] = block_scales.view(torch.uint8).flatten(1)
    return memory


CONTROLS: dict[str, Kernel] = {
    "linear_given": TiledKernel(_pad_only),
    "swizzled_given": read_tiles_by_row,
    "stale_padding": TiledKernel(_leave_padding),
}
"""Mistake -> a kernel with the loader that does not fit it."""


def model(case: Case, parameters: ScaleLayoutParameters, release: object) -> Evidence:
    """Compute with the loader that does not fit, or with ours."""
    fix = TiledKernel(tile_scales)
    return measure(parameters, case.device, CONTROLS[parameters.mistake] if case.subject == "faulty" else fix)


def kernel(case: Case, parameters: ScaleLayoutParameters, release: object) -> Evidence:
    """Compute with the installed vLLM's function."""
    from moedoctor.upstream.releases import installed

    return measure(parameters, case.device, TiledKernel(installed.tile_scales))


def measure(parameters: ScaleLayoutParameters, device: str, read: Kernel) -> Evidence:
    """Compare a layer with the scales that `read` gives with the reference."""
    problem = make_routed_layer(parameters, "nvfp4", device)
    w13, w2 = problem.layer.w13, problem.layer.w2
    assert isinstance(w13, Nvfp4)
    assert isinstance(w2, Nvfp4)
    tested_w13, tested_w2 = (replace(each, block_scales=read(each.block_scales)) for each in (w13, w2))
    scales = w13.block_scales.shape[1:]
    return {
        "mistake": parameters.mistake,
        "scales": list(scales),
        "scales_in_tiles": list(pad_shape(*scales)),
        **compare_layer(replace(problem.layer, w13=tested_w13, w2=tested_w2), problem),
    }


def tile_checkpoint(tensors: Tensors, config: dict[str, Any]) -> None:
    """Store block scales in the order of NVFP4 kernels; checkpoints have them row by row."""
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            scales = tensor.view(torch.uint8)  # [M, S], whole tiles
            rows, columns = scales.shape
            memory = torch.zeros(scales.numel(), dtype=torch.uint8)  # [M * S]
            memory[find_places(rows, columns, scales.device).flatten()] = scales.flatten()
            tensors[name] = memory.reshape(scales.shape).view(torch.float8_e4m3fn)


def flatten_checkpoint(tensors: Tensors, config: dict[str, Any]) -> None:
    """Repair: store them row by row again."""
    tile_checkpoint(tensors, config)
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            tensors[name] = flatten_scales(tensor, *tensor.shape)


CHANGES = Changes(tile_checkpoint, flatten_checkpoint)
engine = CHANGES.engine
