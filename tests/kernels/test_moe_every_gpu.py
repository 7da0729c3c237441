"""Every kernel of a MoE layer, compiled by Triton and assembled by ptxas for GPUs that need not be here."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from moedoctor.fixes.moe.forward import GroupedForward, moe_forward
from moedoctor.kernels.moe.launch import run_experts
from moedoctor.kernels.moe.tiles import RowTile, Tile, _load_table, choose_block_tiles, choose_row_tiles
from tests.compiled_kernels import LOWERINGS, compile_launches, make_empty_layer

pytestmark = pytest.mark.slow
_UNGATED = (128, 2688, 1856, 6)


def _compile(
    capability: int,
    quantization: str,
    tokens: int,
    tiles: tuple[Tile, Tile] | tuple[RowTile, RowTile] | None = None,
    **layer: Any,
) -> list[Any]:
    """Compile the kernels of a whole layer; of those for single rows the second waits for the first."""
    activation = layer.get("activation", "silu")
    with compile_launches(capability) as kernels:
        run_experts(*make_empty_layer(quantization, tokens, **layer), activation=activation, tiles=tiles)
    for kernel in kernels:
        name, ptx = kernel.metadata.name, kernel.asm["ptx"]
        if name.endswith("rows_kernel") and capability >= 90:
            assert ptx.count("griddepcontrol.wait") == name.startswith("down")
            assert ptx.count("griddepcontrol.launch_dependents") == (not name.startswith("down"))
    return kernels


@pytest.mark.parametrize("quantization", ["none", "fp8 128x128", "nvfp4"])
@pytest.mark.parametrize("capability", LOWERINGS)
def test_a_whole_layer(capability: int, quantization: str) -> None:
    """In tiles that `run_experts` chooses: those of each kind where a program has the least shared memory.

    One token is computed without tensor cores, whose instructions are what the other capabilities differ by.
    Layers with a gate are compiled for 9.0 with measured tiles, below.
    """
    for tokens in {90: (), 120: (1, 125, 384, 750, 8192)}.get(capability, (384,)):
        _compile(capability, quantization, tokens)
    if capability == 90:
        _compile(capability, quantization, 384, activation="relu2", dtype=torch.float16, sizes=_UNGATED)
    if capability == 120:
        _compile(capability, quantization, 384, activation="gelu", bias=True)
        _compile(capability, quantization, 1, activation="gelu_tanh", dtype=torch.float16)


@pytest.mark.parametrize("quantization", ["none", "fp8", "fp8 128x128", "nvfp4"])
def test_many_rows_are_multiplied_from_where_they_were_copied(quantization: str) -> None:
    """Threads that write all activations to shared memory again made long calls of FP8 slow."""
    products = [each for each in _compile(90, quantization, 4096) if each.metadata.name == "block_product"]
    assert len(products) == 2
    assert all(product.asm["ptx"].count("st.shared") < 16 for product in products)


@pytest.mark.parametrize("capability", LOWERINGS)
def test_other_scales(capability: int) -> None:
    """Of scales for 48 columns a step takes 16, no fewer than tensor cores do."""
    _compile(capability, "fp8 48x48", 384)
    if capability == 120:
        for quantization, tokens in (("fp8", 384), ("fp8 rows", 1), ("fp8 rows", 384), ("fp8 48x48", 1)):
            _compile(capability, quantization, tokens)


@pytest.mark.parametrize(
    ("capability", "quantization"), [(86, "nvfp4"), (90, "none"), (90, "fp8 128x128"), (90, "nvfp4")]
)
def test_tiles_that_are_measured_on_some_gpu(capability: int, quantization: str) -> None:
    first, second = choose_block_tiles(3072, 128, quantization.split()[0], gated=True)
    tiles = replace(first, early=True), replace(second, early=True, depth_splits=2)
    products = _compile(capability, quantization, 384, tiles)[1:3]
    for second_product, kernel in enumerate(products):
        ptx, early = kernel.asm["ptx"], int(capability >= 90)
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == early
        assert ("prefetch.global.L2" in ptx) is bool(early and second_product)


@pytest.mark.parametrize("quantization", ["none", "fp8", "nvfp4"])
def test_measured_tiles(quantization: str) -> None:
    """For the GPU where they were measured: of each kind those with the most shared memory, or the widest."""
    largest: dict[Any, tuple[int, Any]] = {}
    for (measured, hidden_size, intermediate_size, gated, experts), rows in _load_table().items():
        top_k = min(rows) if quantization != "none" else 8 if gated else 6  # the fewest are one token's
        sizes = experts, hidden_size, intermediate_size, top_k
        layer = {"activation": "silu" if gated else "relu2", "sizes": sizes}
        for pairs, tiles in rows.items() if measured == quantization else ():
            first, kind = tiles[0], (gated, type(tiles[0]))
            if isinstance(first, Tile):
                size = first.stages * (first.block_m + first.block_n * (1 + gated)) * first.block_k
            else:
                size = first.groups
            if size > largest.get(kind, (0, None))[0]:
                largest[kind] = size, (pairs // top_k, tiles, layer)
    assert largest
    for _, (tokens, tiles, layer) in largest.values():
        _compile(90, quantization, tokens, tiles, **layer)


@pytest.mark.parametrize(("capability", "quantization"), [(86, "fp8"), (90, "fp8"), (90, "nvfp4")])
def test_rows_of_layers_without_a_gate_or_in_several_programs(capability: int, quantization: str) -> None:
    """They use no tensor cores; from 9.0 on launches may begin early."""
    tiles = choose_row_tiles(1, 22, 512, quantization, gated=True)
    assert tiles is not None
    shared = tiles[0], replace(tiles[1], lanes=8, expert_splits=3)
    for chosen in (tiles, shared) if capability == 90 else (shared,):
        _compile(capability, quantization, 1, chosen, activation="relu2", sizes=(512, 1024, 2688, 22))
    if capability == 90:
        _compile(capability, quantization, 1, shared, bias=True)


@pytest.mark.parametrize(
    ("capability", "weight", "dtype"),
    [
        *((capability, "bfloat16", torch.bfloat16) for capability in LOWERINGS),
        *((capability, "float8_e4m3fn", torch.bfloat16) for capability in (86, 89)),
        (86, "float32", torch.float32),
    ],
)
def test_slots_of_an_expert_cache(capability: int, weight: str, dtype: torch.dtype) -> None:
    """Triton takes pointers to FP8 from 8.9 on. Weights in the type of `x` and FP8 have biases."""
    slots, hidden_size, intermediate_size, top_k = 32, 2048, 768, 8
    kind = getattr(torch, weight)
    with compile_launches(capability) as kernels:
        weights = {
            "w13": torch.empty(slots, 2 * intermediate_size, hidden_size, dtype=kind),
            "w2": torch.empty(slots, hidden_size, intermediate_size, dtype=kind),
        }
        for name, rows in (("w13", 2 * intermediate_size), ("w2", hidden_size)):
            if kind is torch.float8_e4m3fn:
                weights[f"{name}_scale"] = torch.empty(slots)
            if dtype is torch.bfloat16:
                weights[f"{name}_bias"] = torch.empty(slots, rows, dtype=dtype)
        # Few, and on the GPU with the least shared memory a number for each kind of tile.
        for tokens in (1, 125, 375, 1000) if capability == 120 else (1, 375):
            x = torch.empty(tokens, hidden_size, dtype=dtype)
            ids = torch.empty(tokens, top_k, dtype=torch.int32)
            shares = torch.empty(tokens, top_k)
            if tokens == 1:
                moe_forward(x, weights, ids, shares, out=torch.empty_like(x, dtype=torch.float32))
            else:
                groups = GroupedForward(x, ids, shares, 128)
                groups.add(weights, torch.empty(slots, dtype=torch.int32))
                groups.sum()
        moe_forward(x, weights, ids, shares)
    names = {kernel.metadata.name for kernel in kernels}
    assert names == {"up_kernel", "down_kernel", "sort_kernel", "slot_product", "sum_kernel"}
