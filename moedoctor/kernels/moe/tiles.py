"""The tiles of the matrix products of a MoE layer, as measured on Hopper GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("tiles.json")
"""The fastest of the measured tiles, and on which GPUs; `evidence/tune_moe_layer.py` writes it."""


@dataclass(frozen=True)
class Tile:
    """The tile of one product: what a program computes at once."""

    block_m: int
    """Tokens"""
    block_n: int
    """Columns of the result"""
    block_k: int
    """Elements of the sum that a step takes"""
    warps: int
    stages: int
    splits: int = 1
    """Programs that share the rows of an expert. They run beside each other and meet in the L2 cache."""
    depth_splits: int = 1
    """Programs that share the sum of a block, each over a part of the depth. Of second products only."""
    early: bool = False
    """Launches over blocks begin while the one before them ends, and the second product meanwhile fetches its
    weights into the L2 cache: CUDA's programmatic dependent launch, on GPUs from 9.0 on. That of the second
    product counts for all of them."""
    tall_m: int | None = None
    """Tokens of a tile if an expert has more than `block_m` left. A tall tile reads the weights once."""


@dataclass(frozen=True)
class RowTile:
    """The tile of one product of `decode_rows`: what a program computes at once."""

    block_n: int
    """Columns of the result"""
    groups: int
    """Groups of a row that a step takes: 64 weights of NVFP4, 32 of FP8"""
    warps: int
    lanes: int = 32
    """Experts of a token that a step of the second product takes, at most"""
    ahead: bool = True
    """The second product asks for values, too, before it uses those of the step before"""
    expert_splits: int = 1
    """Programs that share the experts of a token in the second product"""

    @property
    def rows_at_once(self) -> int:
        """Rows of a weight that all threads hold at a time, if each has four words."""
        return max(1, min(self.block_n, 16 * self.warps // self.groups))


def choose_slot_tiles(pairs: int, experts: int, size: int) -> tuple[Tile, Tile]:
    """Return the tiles of both products over slots, by the mean rows of an expert.

    `size`: bytes of an element of `x`. The number of slots does not matter: a call in groups computes each
    row as a call without them does.
    """
    rows = pairs / experts
    if size > 2:  # float32 has no tensor cores, and all of a tile is in registers
        return Tile(16, 32, 128, 4, 2), Tile(16, 64, 128, 4, 2)  # the stages that fit in every GPU
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3)
    # The fastest at 64 rows on an H200. With more rows, more programs share them.
    return (
        Tile(64, 64, 64, 4, 3, splits=2 + int(rows) // 128),
        Tile(64, 128, 64, 4, 3, splits=1 + int(rows + 32) // 128, tall_m=128),
    )


def find_measured_tiles(
    pairs: int, experts: int, quantization: str, *, hidden_size: int, intermediate_size: int, gated: bool
) -> tuple[Tile, Tile] | tuple[RowTile, RowTile] | None:
    """Return the tiles that were the fastest for a layer of these sizes, or None if it was not measured.

    Those of the nearest number of pairs, if it is within a factor of two.
    """
    measured = _load_table().get((quantization, hidden_size, intermediate_size, gated, experts), {})
    nearest = min(measured, key=lambda number: abs(math.log(number / pairs)), default=0)
    return measured[nearest] if pairs / 2 <= nearest <= pairs * 2 else None


def read_tile(fields: Mapping[str, Any]) -> Tile | RowTile:
    """Return the tile with these fields."""
    return RowTile(**fields) if "groups" in fields else Tile(**fields)


@cache
def _load_table() -> Mapping[tuple[Any, ...], Mapping[int, Any]]:
    """Return (quantization, hidden size, intermediate size, gated, experts) -> pairs -> tiles."""
    if not TABLE.exists():
        return {}
    return {
        tuple(layer["layer"]): {
            row["pairs"]: (read_tile(row["first"]), read_tile(row["second"])) for row in layer["tiles"]
        }
        for layer in json.loads(TABLE.read_text(encoding="utf-8"))["layers"]
    }


def choose_row_tiles(
    tokens: int, top_k: int, experts: int, quantization: str, *, gated: bool
) -> tuple[RowTile, RowTile] | None:
    """Return the tiles of both products for few tokens, or None if blocks are faster.

    For one NVFP4 token they were the fastest for gemma-4-26b-a4b on an H100; layers without a gate that were
    measured have others. For one to eight FP8 tokens of five layers on an H200, each of the two took at most
    1.2 times as long as the fastest that was measured, which was faster than blocks.
    """
    if quantization == "nvfp4" and gated and tokens == 1:
        return RowTile(2, 8, 1), RowTile(4 if top_k <= 8 else 1, 4, 2)
    # Each pair reads the weights of its expert, so most experts must be one pair's.
    if quantization == "fp8" and (tokens == 1 or (tokens <= 8 and tokens * top_k <= experts // 2)):
        return RowTile(4, 32, 2), RowTile(2, 8, 4, lanes=8)
    return None


def choose_block_tiles(pairs: int, experts: int, quantization: str, *, gated: bool) -> tuple[Tile, Tile]:
    """Return the tiles of both products over blocks. A gated first product computes two halves at once.

    `quantization` is ``none``, ``fp8`` or ``nvfp4``.
    """
    rows, nvfp4 = pairs / experts, quantization == "nvfp4"
    if pairs <= 16:
        tile = Tile(16, 64, 256, 4, 4) if nvfp4 else Tile(16, 64, 128, 4, 3)
        return tile, tile
    few = pairs <= 64 or rows <= 16
    if quantization == "fp8" and few:
        # At most 5 % slower than the fastest products of five layers on an H200; in every GPU they fit.
        return Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 3)
    if nvfp4:
        block_m = 16 if few else 32 if rows <= 32 else 64
        stages = 4 if few else 3
        return Tile(block_m, 64 if gated else 128, 128, 4, stages), Tile(block_m, 128, 128, 4, stages)
    if few or rows <= 32:
        tile = Tile(16, 64, 64, 4, 3) if few else Tile(32, 64, 128, 4, 3)
        return tile, tile
    # With 128 gated rows Triton sends FP8's activations through registers back to shared memory in each step.
    tall = rows > 96 and not (quantization == "fp8" and gated)
    block_m, warps = (128, 8) if tall else (64, 4)
    return Tile(block_m, 64 if gated else 128, 64, warps, 3), Tile(block_m, 128, 64, warps, 3)
