"""What runs in the child for MD018: kernels that read block scales in tiles or row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from moedoctor.bench.moe.parity import bounds_of
from moedoctor.fixes.moe.weight_layout import TILE_COLUMNS, TILE_ROWS, padded_shape, tiled_scales
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.agreement import agree
from moedoctor.reference.moe_layer import Problem, expected_output, make_layer, make_problem
from moedoctor.reference.nvfp4 import BLOCK, Nvfp4
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.quantization.scale_layout import ScaleLayoutParameters

_NAN = 0x7F
"""NaN in E4M3: what stale memory may hold."""


class Kernel(Protocol):
    """The block scales of a checkpoint -> those that the kernel computes with, both [E, M, S]."""

    def __call__(self, block_scales: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class TiledKernel:
    """Reads what `loader` stored in tiles; a last tile column is read whole, padding included."""

    loader: Callable[[torch.Tensor], torch.Tensor]
    """Block scales [E, M, S] -> what the kernel is given, as many bytes as whole tiles have."""

    def __call__(self, block_scales: torch.Tensor) -> torch.Tensor:
        rows, columns = block_scales.shape[-2:]
        given = self.loader(block_scales).view(torch.uint8)
        memory = given.reshape(len(block_scales), -1)  # [E, M' * S']
        found = memory[:, places(rows, columns, memory.device)].view(block_scales.dtype)  # [E, M, S]
        # The padding of a row's last tile belongs to blocks of zeros: 0 * scale, and 0 * NaN is NaN.
        _, wide = padded_shape(rows, columns)
        padding = memory[:, places(rows, wide, memory.device)].view(block_scales.dtype)[:, :, columns:]
        poisoned = padding.float().isnan().any(2, keepdim=True)  # [E, M, 1]
        return torch.where(poisoned, float("nan"), found.float()).to(block_scales.dtype)


def places(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """int64 [rows, columns]: where in the tiles each scale lies, as cuBLAS documents it."""
    row = torch.arange(rows, device=device)[:, None]  # [M, 1]
    column = torch.arange(columns, device=device)[None]  # [1, S]
    tile = row // TILE_ROWS * -(-columns // TILE_COLUMNS) + column // TILE_COLUMNS  # [M, S]
    return (
        tile * (TILE_ROWS * TILE_COLUMNS)
        + row % 32 * 16
        + row % TILE_ROWS // 32 * TILE_COLUMNS
        + column % TILE_COLUMNS
    )


def mistaken(mistake: str) -> Kernel:
    """A kernel with the loader that does not fit it."""
    if mistake == "swizzled_given":
        return _linear_kernel_given_tiles
    return TiledKernel(_padded_only if mistake == "linear_given" else _stale_padding)


def _linear_kernel_given_tiles(block_scales: torch.Tensor) -> torch.Tensor:
    rows, columns = block_scales.shape[-2:]
    _, wide = padded_shape(rows, columns)
    tiles = tiled_scales(block_scales).view(torch.uint8).reshape(len(block_scales), -1, wide)  # [E, M', S']
    return tiles[:, :rows, :columns].contiguous().view(block_scales.dtype)


def _padded_only(block_scales: torch.Tensor) -> torch.Tensor:
    """Row by row, in an array of the size that the kernel expects."""
    rows, columns = block_scales.shape[-2:]
    tall, wide = padded_shape(rows, columns)
    padded = torch.zeros((len(block_scales), tall, wide), dtype=torch.uint8, device=block_scales.device)
    padded[:, :rows, :columns] = block_scales.view(torch.uint8)
    return padded


def _stale_padding(block_scales: torch.Tensor) -> torch.Tensor:
    """In tiles, but only the real scales were written: the rest is what the memory held."""
    rows, columns = block_scales.shape[-2:]
    tall, wide = padded_shape(rows, columns)
    memory = torch.full((len(block_scales), tall * wide), _NAN, dtype=torch.uint8, device=block_scales.device)
    where = places(rows, columns, memory.device).flatten()  # [M * S]
    memory[:, where] = block_scales.view(torch.uint8).flatten(1)
    return memory


def observe(parameters: ScaleLayoutParameters, device: str, kernel: Kernel) -> Observation:
    """Compute a layer with the scales that `kernel` reads and compare with the reference."""
    shape = LayerShape(
        parameters.hidden,
        parameters.intermediate,
        parameters.experts,
        parameters.top_k,
        parameters.activation,
    )
    layer = make_layer(shape, "nvfp4", seed=parameters.seed, device=device)
    problem = make_problem(layer, parameters.tokens, "none", seed=parameters.seed, device=device)
    assert isinstance(layer.w13, Nvfp4)
    assert isinstance(layer.w2, Nvfp4)
    read = replace(
        layer,
        w13=replace(layer.w13, block_scales=kernel(layer.w13.block_scales)),
        w2=replace(layer.w2, block_scales=kernel(layer.w2.block_scales)),
    )
    given = Problem(read, problem.x, problem.topk_weights, problem.topk_ids)
    agreement = agree(expected_output(given, "none"), expected_output(problem, "none"), bounds_of("none"))
    padded = padded_shape(shape.w13_rows, shape.hidden // BLOCK)
    return Observation(
        {
            "mistake": parameters.mistake,
            "scales": [shape.w13_rows, shape.hidden // BLOCK],
            "scales_in_tiles": list(padded),
            **agreement.evidence(),
        }
    )
