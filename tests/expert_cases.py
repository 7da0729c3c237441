"""Checks of the kernels of a MoE layer, on a GPU or, as a script, in Triton's interpreter.

Routes are awkward on purpose: pairs without an expert, and one expert several times in a row.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moedoctor.bench.moe.own_backends import kernel_weights
from moedoctor.kernels.moe import launch
from moedoctor.kernels.moe.launch import ExpertWeights, launch_block_product, plan_blocks, run_experts
from moedoctor.kernels.moe.nvfp4_words import pack_words
from moedoctor.kernels.moe.products import block_product
from moedoctor.kernels.moe.tiles import Tile
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1
from moedoctor.reference.agreement import Bounds, agree
from moedoctor.reference.moe_layer import expected_output, make_layer, make_problem

# Three times the interpreter truncates to bfloat16 and the GPU rounds, so norms come out 0.8 % low.
_INTERPRETED = Bounds(cosine=0.9998, norm=0.02, element=0.03, matched=0.99, worst=0.1)


def assert_layer_is_right(
    quantization: str,
    activation: str,
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    device: str = "cpu",
    bounds: Bounds = _INTERPRETED,
) -> None:
    """Some pairs are skipped, one token has the same expert K times, and one token has no expert.

    Pairs are skipped by an id of -1, by one below that, and by one from the number of experts on.
    """
    layer = make_layer(
        LayerShape(hidden_size, intermediate_size, 8, 4, activation), quantization, device=device
    )
    problem = make_problem(layer, tokens, "none", device=device)
    problem.topk_ids[0, 1] = -1
    problem.topk_weights[0, 1] = float("nan")  # the weight of a pair without an expert
    if tokens > 2:
        problem.topk_ids[1] = -1
        problem.topk_ids[2] = 7
    expected = expected_output(problem, "none")
    problem.topk_ids[0, 1] = 8
    if tokens > 2:
        problem.topk_ids[1, 1:] = torch.tensor([-2, 9, 1 << 30])
    output = run_experts(
        problem.x,
        kernel_weights(layer.w13),
        kernel_weights(layer.w2),
        problem.topk_weights,
        problem.topk_ids,
        activation=activation,
    )
    agreement = agree(output, expected, bounds)
    assert agreement.right, (quantization, activation, tokens, agreement.reason)
    assert tokens <= 2 or not bool(output[1].count_nonzero())
    assert torch.isfinite(output).all()


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed uint8 [256, 128], block scales E4M3 [256, 16]): any code with any finite scale.

    Each code comes with each scale, its sign and zero included, in each place of a block.
    """
    row, column = torch.arange(256)[:, None], torch.arange(256)[None, :]
    codes = ((row // 16 + column // 16 * 2 + column) % 16).to(torch.uint8)  # [256, 256]
    scales = (row * 17 + column[:, :16] * 16) % 256  # [256, 16]
    scales = torch.where(scales % 128 == 127, 0, scales).to(torch.uint8)  # no NaN
    return e2m1.pack(codes), scales.view(torch.float8_e4m3fn)


def assert_decoding_is_exact(device: str, tile: Tile) -> None:
    """The product with the unit matrix is the weight, bit for bit; a scale that is NaN makes its row NaN."""
    packed, scales = (part.to(device) for part in every_code_and_scale())
    codes = e2m1.decode(e2m1.unpack(packed)).unflatten(-1, (-1, 16)).double()  # [256, 16, 16]
    expected = (codes * scales.double()[..., None]).flatten(-2).bfloat16()  # [256, 256]
    scales.view(torch.uint8)[5, 3] = 127
    expected[5] = float("nan")
    words, word_scales = pack_words(packed[None], scales[None])
    weight = ExpertWeights(words, word_scales, torch.ones(1, device=device))
    unit = torch.eye(256, dtype=torch.bfloat16, device=device)
    ids = torch.zeros((256, 1), dtype=torch.int32, device=device)
    out = torch.empty((256, 256), dtype=torch.bfloat16, device=device)
    plan = plan_blocks(ids, 1, tile.block_m)
    launch_block_product(unit, weight, out, ids, plan, tile, activation="none", second=False)
    assert torch.equal(out.T.float().nan_to_num(1e9), expected.float().nan_to_num(1e9)), tile


def assert_plan_is_whole(device: str, block_m: int, skipped: float, tokens: int, experts: int) -> None:
    """The plan holds every pair that has an expert once, in a block of its expert, in order."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, experts, (tokens, 3), generator=draw).int()
    ids[torch.rand(tokens, 3, generator=draw) < skipped] = -1
    order, plan = plan_blocks(ids.to(device), experts, block_m)
    planned: list[int] = []
    for expert, first, rows in plan.tolist():
        if expert < 0:
            continue
        pairs = order[first : first + rows].tolist()
        assert 1 <= rows <= block_m
        assert all(int(ids.flatten()[pair]) == expert for pair in pairs)
        planned += pairs
    flat = ids.flatten()
    used = (flat >= 0).nonzero().flatten()
    assert planned == used[flat[used].argsort(stable=True)].tolist()


@cache
def compiled(capability: int, tile: Tile, *, nvfp4: bool, second: bool, activation: str) -> Any:
    """Compile the product as `run_experts` launches it with a plan, for a GPU that need not be there.

    The layer is of 2688 by 1856.
    """
    types = ("bf16", "i32", "i32", "fp32") if nvfp4 else ("bf16",) * 4
    types += ("bf16", "i32", "i32", "i32")
    constants = {
        "width": 2688 if second else 1856,
        "depth": 1856 if second else 2688,
        "num_experts": 128,
        "top_k": 6,
        "activation": activation,
        "nvfp4": nvfp4,
        "planned": True,
        "second": second,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "wide": False,
        "hopper": capability == 90,
    }
    signature = {name: f"*{kind}" for name, kind in zip(block_product.arg_names, types, strict=False)}
    source = ASTSource(
        fn=block_product,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(types))},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, which no result may read
    for case in sys.argv[1:]:
        kind, *values = case.split(",")
        if kind == "decoding":
            assert_decoding_is_exact("cpu", Tile(64, 64, 128, 4, 2))
        elif kind == "rows":
            launch._MOST_ROWS = 2
            assert_layer_is_right("bf16", "silu", 20, 96, 48)
        elif kind == "plan":
            assert_plan_is_whole("cpu", int(values[0]), float(values[1]), int(values[2]), 5)
        else:
            activation, *sizes = values
            assert_layer_is_right(kind, activation, *map(int, sizes))
    print("agreed")
