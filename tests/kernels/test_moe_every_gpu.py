"""Every kernel of a MoE layer, compiled by Triton and assembled by ptxas for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moedoctor.kernels.moe.tiles import RowTile, Tile, _table, block_tiles, row_tiles, slot_tiles
from tests.interpreted import needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
CAPABILITIES = (80, 86, 89, 90, 100, 120, 121)
"""Older GPUs are refused, because their tensor cores have no bfloat16."""
_SHARED = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that one program can have; 99 elsewhere."""
_EXCHANGING = {
    RowTile(4, 4, 4, lanes=8),
    RowTile(8, 4, 4, lanes=8, expert_splits=3),
    RowTile(8, 16, 4, lanes=2),
    RowTile(8, 4, 2, lanes=8, ahead=False),
    RowTile(8, 4, 4, lanes=8, ahead=False, expert_splits=3),
}
"""Measured tiles of second products whose warps get values through shared memory; they were the fastest."""
_PAIRS = (8, 64, 1000, 3072, 6000, 65_536)
"""A number of pairs for each kind of tile, with 128 experts."""


def _assembled(capability: int, kernel: Any, types: Sequence[str], tile: Tile, **constants: Any) -> None:
    from expert_cases import compile_kernel

    done = compile_kernel(kernel, capability, types, constants, warps=tile.warps, stages=tile.stages)
    _check(done, capability, f"{kernel.fn.__name__}, {tile}")


def _check(kernel: Any, capability: int, what: str) -> None:
    assert kernel.asm["cubin"][:4] == b"\x7fELF", what
    assert kernel.metadata.shared <= _SHARED.get(capability, 99) * 1024, what


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("quantization", ["none", "fp8", "nvfp4"])
def test_products_of_a_whole_layer(capability: int, quantization: str) -> None:
    from expert_cases import compiled

    tiles = dict.fromkeys(
        (tile, second)
        for pairs in _PAIRS
        for second, tile in enumerate(block_tiles(pairs, 128, quantization, gated=True))
    )
    for tile, second in tiles:
        activation = "none" if second else "silu"
        kernel = compiled(
            capability, tile, quantization=quantization, second=bool(second), activation=activation
        )
        _check(kernel, capability, f"{quantization}, {tile}")
    tile = block_tiles(3072, 128, quantization, gated=True)[0]
    if capability >= 90:
        for second, activation in ((False, "silu"), (True, "none")):
            early = compiled(
                capability,
                replace(tile, early=True),
                quantization=quantization,
                second=second,
                activation=activation,
            )
            _check(early, capability, f"{quantization}, early")
            ptx = early.asm["ptx"]
            assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
            assert ("prefetch.global.L2" in ptx) is second
    split = replace(tile, depth_splits=2)
    shared = compiled(capability, split, quantization=quantization, second=True, activation="none")
    _check(shared, capability, f"{quantization}, {split}")
    if quantization == "fp8":
        one_scale = compiled(
            capability, tile, quantization="fp8", second=False, activation="silu", blocks=False
        )
        _check(one_scale, capability, "fp8, one scale a matrix")
        # Of scales for 48 columns a step takes 16, no fewer than tensor cores do.
        short = replace(tile, block_k=16)
        kernel = compiled(capability, short, quantization="fp8", second=False, activation="silu")
        _check(kernel, capability, "fp8, a step of 16 columns")
    for activation, float16 in (("gelu", True), ("gelu_tanh", False), ("relu2", True)):
        kernel = compiled(
            capability, tile, quantization=quantization, second=False, activation=activation, float16=float16
        )
        _check(kernel, capability, f"{quantization}, {activation}")


@pytest.mark.parametrize("quantization", ["none", "fp8", "nvfp4"])
def test_measured_tiles(quantization: str) -> None:
    """Those of the table, for the kind of GPU where they were measured."""
    from expert_cases import compiled

    # The fewest pairs of a layer that were measured are those of one token.
    chosen = {
        (tile, second, key[3], min(measured))
        for key, measured in _table().items()
        if key[0] == quantization
        for tiles in measured.values()
        for second, tile in enumerate(tiles)
    }
    for tile, second, gated, top_k in chosen:
        if isinstance(tile, RowTile):
            _assemble_rows(90, tile, second=bool(second), gated=gated, top_k=top_k, quantization=quantization)
            continue
        activation = "none" if second else "silu" if gated else "relu2"
        kernel = compiled(
            90, tile, quantization=quantization, second=bool(second), activation=activation, blocks=False
        )
        _check(kernel, 90, f"{quantization}, {tile}")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nvfp4_rows(capability: int) -> None:
    for gated in (True, False):
        top_k = 8 if gated else 22
        first, second = _row_tiles(top_k, "nvfp4")
        shared = replace(second, lanes=8, expert_splits=3)
        for tile, is_second in ((first, False), (second, True), (shared, True)):
            _assemble_rows(capability, tile, second=is_second, gated=gated, top_k=top_k)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fp8_rows(capability: int) -> None:
    """With a scale for each half, or for blocks."""
    for top_k, gated, blocks in ((8, True, False), (8, True, True), (10, True, False), (22, False, False)):
        for second, tile in enumerate(_row_tiles(top_k, "fp8")):
            _assemble_rows(
                capability,
                tile,
                second=bool(second),
                gated=gated,
                top_k=top_k,
                quantization="fp8",
                blocks=blocks,
            )


def _row_tiles(top_k: int, quantization: str) -> tuple[RowTile, RowTile]:
    tiles = row_tiles(1, top_k, 128, quantization, gated=True)
    assert tiles is not None
    return tiles


def _assemble_rows(
    capability: int,
    tile: RowTile,
    *,
    second: bool,
    gated: bool,
    top_k: int,
    quantization: str = "nvfp4",
    blocks: bool = False,
) -> None:
    from expert_cases import compile_kernel

    from moedoctor.kernels.moe.decode_rows import down_rows_kernel, up_rows_kernel

    hidden_size, intermediate_size = (2048, 768) if gated else (1024, 2688)
    depth, height = (intermediate_size, hidden_size) if second else (hidden_size, intermediate_size)
    halves = 2 if gated and not second else 1
    common = {
        "top_k": top_k,
        "num_experts": 128,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "quantization": quantization,
        "scales": (halves, 128, 128) if blocks else (halves, height, depth),
        "has_bias": True,
        "BLOCK_N": tile.block_n,
        "GROUPS": tile.groups,
        "larger": 2.0**64,
        "early": capability >= 90,
    }
    weights = ("bf16", "i32", "i32" if quantization == "nvfp4" else "fp32", "fp32", "bf16", "i32")
    if second:
        down = (*weights, "fp32", "bf16", "fp32", "i32")
        lanes = {
            "LANES": min(tile.lanes, 1 << (top_k - 1).bit_length()),
            "ahead": tile.ahead,
            "expert_splits": tile.expert_splits,
        }
        kernel = compile_kernel(down_rows_kernel, capability, down, {**common, **lanes}, warps=tile.warps)
    else:
        own = {
            "activation": "silu" if gated else "relu2",
            "LANES": tile.rows_at_once,
            "columns_ended": 512,
        }
        up = (*weights, "bf16", "i32")
        kernel = compile_kernel(up_rows_kernel, capability, up, {**common, **own}, warps=tile.warps)
    _check(kernel, capability, f"{tile}, {second}")
    ptx = kernel.asm["ptx"]
    # Those of the sums at the end; in a step there would be one for each block of weights, and many steps.
    ends = 3 if second and tile.expert_splits > 1 else 0
    exchanging = ptx.count("bar.sync") > 8 + ends
    assert exchanging == (second and tile in _EXCHANGING), "threads ask each other for weights or values"
    if capability >= 90:
        assert ptx.count("griddepcontrol.wait") == int(second)
        assert ptx.count("griddepcontrol.launch_dependents") == int(not second)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_of_slots_and_of_few_tokens(capability: int) -> None:
    from moedoctor.kernels.moe.decode import down_kernel, up_kernel
    from moedoctor.kernels.moe.products import slot_product

    layer = {"hidden_size": 2048, "intermediate_size": 768}
    common = {"has_scale": False, "has_bias": True}
    few = Tile(1, 8, 512, 4, 3)
    _assembled(
        capability,
        up_kernel,
        ("bf16", "bf16", "bf16", "bf16", "i32", "fp32", "=i32", "=i32"),
        few,
        **layer,
        **common,
        activation="gelu",
        BLOCK_N=8,
        BLOCK_K=512,
    )
    _assembled(
        capability,
        down_kernel,
        ("fp32", "bf16", "bf16", "bf16", "i32", "fp32", "fp32", "=i32"),
        few,
        **layer,
        **common,
        top_k=8,
        adds=True,
        LANES=8,
        BLOCK_N=2,
        BLOCK_K=256,
    )
    types = ("bf16", "bf16", "bf16", "bf16", "i32", "i32", "i32", "bf16", "=i32", "=i32")
    for pairs in (1000, 3000, 8000):
        for second, tile in enumerate(slot_tiles(pairs, 128, 2)):
            sizes = {"width": 2048, "depth": 768} if second else {"width": 768, "depth": 2048}
            constants: Mapping[str, Any] = {
                **sizes,
                **common,
                "activation": "none" if second else "silu",
                "second": bool(second),
                "mapped": True,
                "BLOCK_M": tile.block_m,
                "TALL_M": tile.tall_m or tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
                "splits": tile.splits,
                "wide": False,
            }
            _assembled(capability, slot_product, types, tile, **constants)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_order_plan_and_sum(capability: int) -> None:
    from moedoctor.kernels.moe.rows import plan_kernel, sort_kernel, sum_kernel

    tile = Tile(1, 1024, 1, 4, 3)
    _assembled(capability, sort_kernel, ("i32", "i32", "i32", "i32", "=i32"), tile, CHUNK=2048)
    _assembled(
        capability,
        plan_kernel,
        ("i64", "i32", "i32", "=i32", "=i32"),
        tile,
        num_experts=128,
        by_row=False,
        BLOCK_M=64,
        CHUNK=4096,
        early=capability >= 90,
    )
    _assembled(
        capability,
        sum_kernel,
        ("bf16", "i64", "i32", "fp32", "bf16", "=i32"),
        tile,
        top_k=8,
        width=2048,
        parts=2,
        has_row=False,
        adds=False,
        BLOCK_N=1024,
        early=capability >= 90,
    )
