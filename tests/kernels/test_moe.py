"""The kernels of a MoE layer against the reference, compiled on a GPU, and what they are launched with.

Those over the slots of an expert cache are in `test_expert_cache_gpu`; all of them in `test_interpreted`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

import expert_cases as cases

from moedoctor.bench.moe.own_backends import convert_weights
from moedoctor.kernels.moe import launch
from moedoctor.kernels.moe.expert_weights import make_fp8_weights
from moedoctor.kernels.moe.launch import launch_block_product, plan_blocks, run_experts
from moedoctor.kernels.moe.nvfp4_words import pack_words
from moedoctor.kernels.moe.tiles import RowTile, Tile, _load_table, choose_block_tiles
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1
from moedoctor.reference.agreement import choose_bounds
from moedoctor.reference.moe_layer import make_layer, make_problem
from tests.compiled_kernels import compile_launches, make_empty_layer


def test_the_table_of_measured_tiles() -> None:
    """Each row has tiles that one plan fits, and only second products share their depth."""
    for measured in _load_table().values():
        for pairs, (first, second) in measured.items():
            assert pairs > 0
            assert type(first) is type(second)
            if isinstance(first, Tile):
                assert first.block_m == second.block_m
                assert first.depth_splits == 1


COMPILED = {
    "layers": " ".join(f"random,{seed} fp8_rows,{seed}" for seed in range(40)),
    "shared experts": "shared,3,1,2 shared,22,8,3 shared,22,4,6 shared,6,4,2",
    # Every kind of tile that is launched, and a tile for the instructions of other GPUs.
    "decoding": "e4m3 decoding,16,64,256,4,3 decoding,16,128,128,4,3 decoding,32,128,128,4,3 "
    "decoding,64,128,128,4,3 decoding,128,128,64,8,3 decoding,16,32,128,2,3 decoding,8,16,256,1,3",
    "plan": "plan,64,0.0,40,5 plan,64,0.3,40,512 plan,64,0.3,5000,512 plan,64,1.0,5000,5",
}


@pytest.mark.gpu
@pytest.mark.parametrize("checks", COMPILED.values(), ids=COMPILED)
def test_compiled(checks: str) -> None:
    for case in checks.split():
        cases.check(case, "cuda:0", choose_bounds("none"))


def _chain(layer: Any, problem: Any, tiles: Any) -> Callable[[], torch.Tensor]:
    """Six calls, each of which reads what the one before wrote, in memory that is used again."""
    w13, w2 = convert_weights(layer.w13), convert_weights(layer.w2)
    route = problem.topk_weights, problem.topk_ids

    def run() -> torch.Tensor:
        x = problem.x
        for _ in range(6):
            x = run_experts(x, w13, w2, *route, activation=layer.shape.activation, tiles=tiles)
            x = x / x.abs().amax(dim=1, keepdim=True)
        return x

    return run


def _replay(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of 20 replays of a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    results = []
    for _ in range(20):
        graph.replay()
        results.append(replayed.clone())
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["nvfp4", "fp8", "bf16"])
def test_early_launches_give_the_same_bits(quantization: str) -> None:
    shape = LayerShape(1024, 704, 32, 4, "silu")
    layer = make_layer(shape, quantization, device="cuda:0")
    for tokens in (1, 2, 8, 64, 700):
        problem = make_problem(layer, tokens, "none", device="cuda:0")
        problem.topk_ids[:, 1] = -1
        kind = "none" if quantization == "bf16" else quantization
        first, second = choose_block_tiles(tokens * shape.top_k, shape.experts, kind, gated=True)
        seconds = [replace(second, early=early) for early in (False, True)]
        results = [each for other in seconds for each in _replay(_chain(layer, problem, (first, other)))]
        assert all(torch.equal(result, results[0]) for result in results)
        assert torch.isfinite(results[0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["nvfp4", "fp8"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_rows_give_the_same_bits_each_time(activation: str, quantization: str) -> None:
    """The second launch begins before the first has ended."""
    layer = make_layer(LayerShape(1024, 1344, 32, 4, activation), quantization, device="cuda:0")
    problem = make_problem(layer, 2, "none", device="cuda:0")
    blocks = choose_block_tiles(8, 32, quantization, gated=activation == "silu")
    expected = _chain(layer, problem, blocks)()
    for tiles in (
        (RowTile(2, 16, 1), RowTile(1, 4, 1)),
        (RowTile(4, 8, 4), RowTile(2, 32, 8)),
        (RowTile(8, 8, 1), RowTile(4, 8, 4, lanes=1, expert_splits=4)),
    ):
        results = _replay(_chain(layer, problem, tiles))
        assert all(torch.equal(result, results[0]) for result in results)
        assert (results[0] - expected).norm() <= 0.1 * expected.norm()


def test_packed_words_hold_the_checkpoint_values() -> None:
    """Decodes only from the format's description; the last group of the weight is not full."""
    packed, scales = cases.every_code_and_scale()
    pairs = e2m1.unpack(packed).unflatten(-1, (-1, 16)) + scales.view(torch.uint8).int()[..., None] * 16
    assert all(len(pairs[..., place].unique()) == 16 * 254 for place in range(16))
    packed, scales = packed[None, :, :120], scales[None, :, :15]  # [1, 256, 240]
    words, word_scales = pack_words(packed, scales)
    half = words.view(torch.uint16).int().unflatten(-1, (-1, 16))  # [1, 256, 4, 16]: two halves a word
    other = half.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # [1, 256, 4, 16]
    sign = torch.stack([half >> place & 1 for place in (15, 9, 5, 11)], dim=-2)  # [1, 256, 4, 4, 16]
    last = (half >> 2 & 6) | (half >> 10 & 1)  # [1, 256, 4, 16]
    rest = torch.stack([half >> 6 & 7, half & 7, other >> 12 & 7, last], dim=-2)  # [1, 256, 4, 4, 16]
    value = e2m1.decode((sign << 3 | rest).to(torch.uint8)).double()
    byte = word_scales.view(torch.uint8).int().unflatten(-1, (-1, 4, 1))  # [1, 256, 4, 4, 1]
    scale = (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 21)
    expected = e2m1.decode(e2m1.unpack(packed)).unflatten(-1, (-1, 16)).double()  # [1, 256, 15, 16]
    expected = (expected * scales.double()[..., None]).flatten(-2)  # [1, 256, 240]
    decoded = (value * scale).flatten(-3)  # [1, 256, 256]
    assert torch.equal(decoded[..., :240], expected)
    assert not bool(decoded[..., 240:].count_nonzero())


FP8 = torch.zeros(3, 64, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("values", "scale", "block", "message"),
    [
        (FP8, torch.ones(4), None, r"expected \[3, 1\] for \[3, 64, 64\], got \[4\]"),
        (FP8, torch.ones(3, 4), None, r"expected \[3\] or \[3, 2\]"),
        (FP8, torch.ones(3, 5, 4), (16, 16), r"expected \[3, 4, 4\] for \[3, 64, 64\], got \[3, 5, 4\]"),
        (FP8, torch.ones(3, 4, 8), (16, 8), "expected columns in multiples of 16, got 8"),
        (FP8, torch.ones(3).bfloat16(), None, r"scale: expected float32, got torch\.bfloat16"),
        (FP8.float(), torch.ones(3), None, "values: expected contiguous float8_e4m3fn"),
        (FP8[..., :62].contiguous(), torch.ones(3), None, "expected columns in multiples of 4, got 62"),
    ],
)
def test_fp8_weights_of_another_shape_or_type_are_refused(values, scale, block, message):
    with pytest.raises(ValueError, match=message):
        make_fp8_weights(values, scale, block=block)


@pytest.mark.parametrize(
    ("block", "depth", "step"), [(None, 72, 128), (None, 256, 128), ((16, 48), 96, 16), ((16, 64), 256, 64)]
)
def test_a_step_has_one_fp8_scale_and_is_no_shorter_than_needed(block, depth, step):
    """Tensor cores take no fewer than 16 columns, which the interpreter does not check."""
    across = 1 if block is None else -(-depth // block[1])
    scale = torch.ones(2) if block is None else torch.ones(2, 1, across)
    weight = make_fp8_weights(torch.zeros(2, 16, depth).to(torch.float8_e4m3fn), scale, block=block)
    assert launch._step(Tile(16, 64, 128, 4, 3), weight, depth) == step


@pytest.mark.parametrize(("quantization", "pairs"), [("nvfp4", 3072), ("fp8 128x128", 512)])
def test_decoded_weights_are_read_before_others_come(quantization: str, pairs: int) -> None:
    """Hopper's tensor cores are asynchronous: weights may be overwritten only after a wait.

    Compiled without a GPU. Decoded weights go to them from registers, in parts of the tile.
    """
    tile, _ = choose_block_tiles(pairs, 128, quantization.split()[0], gated=True)
    with compile_launches(90) as kernels:
        sizes = 128, 2688, 1856, 6
        x, w13, _, _, ids = make_empty_layer(quantization, 512, sizes=sizes)
        plan, out = plan_blocks(ids, 128, tile.block_m), x.new_empty(ids.numel(), 1856)
        launch_block_product(x, w13, out, ids, plan, tile, activation="silu", second=False)
    asm = kernels[-1].asm
    assert not re.search(rf"local_(?:alloc|store) [^\n]*tensor<{tile.block_n}x\d+xbf16", asm["ttgir"])
    steps = [group or jump for group, jump in re.findall(r"wgmma\.(commit|wait)_group|(\bbra)\b", asm["ptx"])]
    assert steps.count("commit") >= 4
    assert all(after == "wait" for step, after in pairwise(steps) if step == "commit")


@pytest.mark.parametrize("quantization", ["nvfp4", "fp8", "none"])
@pytest.mark.parametrize("pairs", [1, 64, 65, 500, 4000, 65_536])
def test_both_products_divide_tokens_alike(pairs: int, quantization: str) -> None:
    first, second = choose_block_tiles(pairs, 128, quantization, gated=True)
    assert first.block_m == second.block_m
