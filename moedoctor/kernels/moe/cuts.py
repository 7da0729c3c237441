"""How the two matrix products of a MoE layer are cut up into programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """One product: what a program computes at once."""

    rows: int
    """Of tokens, in the tile of an expert that has no more of them left."""
    tall: int
    """In the tile of one that has: an expert whose rows fit into it has its weights read once."""
    columns: int
    """Of the result."""
    depth: int
    """Elements of the sum that a step takes."""
    warps: int
    stages: int
    splits: int = 1
    """Programs that share the rows of an expert. They run beside each other, and meet in the L2 cache."""


@dataclass(frozen=True)
class Tiles:
    """Both products."""

    up: Cut
    down: Cut


def choose_tiles(pairs: int, experts: int, size: int) -> Tiles:
    """By the rows that an expert has on average; `size`: bytes of an element of `x`.

    The same for any number of slots: a call in groups computes each row as a call without them does.
    """
    each = pairs / experts
    if each <= 16 or size > 2:  # float32 has no tensor cores, and all of a tile is in registers
        return Tiles(Cut(16, 16, 32, 128, 4, 4), Cut(16, 16, 64, 128, 4, 4))
    if each <= 32:
        return Tiles(Cut(32, 32, 64, 128, 4, 3), Cut(32, 32, 64, 128, 4, 3))
    # The fastest on an H200 at 64 rows (scripts/tune_expert_cache.py). With more, more programs share them.
    return Tiles(
        Cut(64, 64, 64, 64, 4, 3, 2 + int(each) // 128),
        Cut(64, 128, 128, 64, 4, 3, 1 + int(each + 32) // 128),
    )
