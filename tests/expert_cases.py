"""Checks of the kernels of a MoE layer, on a GPU or, as a script, in Triton's interpreter.

Routes are awkward on purpose: pairs without an expert, and one expert several times in a row.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from moedoctor.bench.moe.own_backends import convert_weights
from moedoctor.kernels.moe import launch
from moedoctor.kernels.moe.e4m3 import add_block, decode_bytes, decode_every_other, split_words
from moedoctor.kernels.moe.expert_weights import ExpertWeights, make_fp8_weights, make_nvfp4_weights
from moedoctor.kernels.moe.launch import launch_block_product, plan_blocks, run_experts
from moedoctor.kernels.moe.tiles import RowTile, Tile, choose_block_tiles
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1
from moedoctor.reference import moe as reference
from moedoctor.reference.agreement import Bounds, agree
from moedoctor.reference.moe_layer import compute_expected, make_layer, make_problem
from moedoctor.testing import moe as questions
from moedoctor.testing.adapters import ours
from moedoctor.testing.questions import Setting

# Three times the interpreter truncates to bfloat16 and the GPU rounds, so norms come out 0.8 % low.
_INTERPRETED = Bounds(cosine=0.9998, norm=0.02, element=0.03, matched=0.99, worst=0.1)


def assert_layer_is_right(
    quantization: str, activation: str, tokens: int, hidden: int, intermediate: int, device: str = "cpu"
) -> None:
    """Ask what `moedoctor conform` asks of ids: some are skipped, unknown, or several times in a row."""
    sizes = {"tokens": tokens, "experts": 8, "top_k": 4, "hidden": hidden, "intermediate": intermediate}
    how = Setting(f"{quantization} {activation}", {"activations": reference.ACTIVATIONS}, device)
    for question in ("unknown_ids", "skipped_weights", "repeated_ids")[: 3 if tokens < 9 else 1]:
        reason = questions.ask(ours.run_experts, question, sizes, how)
        assert reason is None, (quantization, activation, tokens, question, reason)


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
    weight = make_nvfp4_weights(packed[None], scales[None], torch.ones(1, device=device))
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


def assert_random_layer_is_right(
    seed: int, device: str = "cpu", bounds: Bounds = _INTERPRETED, *, fp8_rows: bool = False
) -> None:
    """A layer of random size, format, activation, biases and types of input and ids, against float32.

    `fp8_rows`: it is FP8, has few tokens and is computed without tensor cores. The expected weights are
    dequantized here, from nothing but the description of the format.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    quantization, activation = draw.choice(("none", "fp8", "nvfp4")), draw.choice(reference.ACTIVATIONS)
    quantization = "fp8" if fp8_rows else quantization
    experts, top_k = draw.randint(1, 9), draw.randint(1, 4)
    unit = {"nvfp4": 16, "fp8": 4}.get(quantization, 8)
    # On a GPU up to more than a block of scales; the interpreter takes as long as there are programs.
    largest = 48 if fp8_rows and device == "cpu" else 144
    hidden_size, intermediate_size = (unit * draw.randint(16 // unit, largest // unit) for _ in range(2))
    halves = 1 if activation == "relu2" else 2
    tokens = draw.choice((1, 2) if fp8_rows else (1, 2, 19))
    dtype = draw.choice((torch.bfloat16, torch.float16))
    biased = draw.random() < 0.5
    w13, right_w13 = _random_weights(
        draw, quantization, (experts, halves * intermediate_size, hidden_size), halves, dtype, biased, device
    )
    w2, right_w2 = _random_weights(
        draw, quantization, (experts, hidden_size, intermediate_size), 1, dtype, biased, device
    )
    biases = [None if weight.bias is None else weight.bias.cpu() for weight in (w13, w2)]
    x = torch.randn(tokens, hidden_size).to(dtype)  # [T, H]
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=draw.choice((torch.int32, torch.int64)))
    shares = torch.rand(tokens, top_k)  # [T, K]
    weights = reference.MoeWeights(right_w13, right_w2, activation, *biases)
    expected = reference.forward(x, weights, shares, ids)
    into = torch.empty_like(x, device=device) if draw.random() < 0.5 else None
    first, second = choose_block_tiles(tokens * top_k, experts, quantization, gated=halves == 2)
    tiles: Any = first, replace(second, depth_splits=draw.choice((1, 2, 3)))
    if fp8_rows or (quantization == "nvfp4" and tokens <= 2):
        tiles = tuple(
            RowTile(
                draw.choice((8, 16) if device == "cpu" else (4, 8)),
                draw.choice((1, 2, 16)),
                4,
                draw.choice((1, 2, 32)),
                draw.random() < 0.5,
                draw.choice((1, 2, 3)),
            )
            for _ in range(2)
        )
    output = run_experts(
        x.to(device), w13, w2, shares.to(device), ids.to(device), activation=activation, tiles=tiles, out=into
    )
    assert into is None or output is into
    assert output.dtype == dtype
    agreement = agree(output.cpu(), expected, bounds)
    assert agreement.right, (seed, quantization, activation, dtype, agreement.reason)


def _random_weights(
    draw: random.Random,
    quantization: str,
    size: tuple[int, int, int],
    halves: int,
    dtype: torch.dtype,
    biased: bool,
    device: str,
) -> tuple[ExpertWeights, torch.Tensor]:
    """Return weights [E, N, K] as kernels take them and as float32."""
    experts, rows, depth = size
    bias = torch.randn(experts, rows).to(dtype).to(device) if biased else None
    if quantization == "none":
        values = (torch.randn(size) / depth**0.5).to(dtype)  # [E, N, K]
        return ExpertWeights(values.to(device), bias=bias), values.float()
    own = draw.randint(1, halves)  # 1: gate and up have one scale
    scale = (torch.rand(experts, own) + 0.5) / depth**0.5  # [E, own]
    each = scale.repeat_interleave(rows // own, 1)[..., None]  # [E, N, 1]
    if quantization == "nvfp4":
        packed = torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8)
        blocks = torch.randint(0x20, 0x40, (experts, rows, depth // 16), dtype=torch.uint8)
        blocks = blocks.view(torch.float8_e4m3fn)  # [E, N, K / 16]
        codes = e2m1.decode(e2m1.unpack(packed)).unflatten(-1, (-1, 16))  # [E, N, K / 16, 16]
        right = (codes * blocks.float()[..., None]).flatten(-2) * each  # [E, N, K]
        global_scale = scale[:, 0] if own == 1 else scale
        stored = [part.to(device) for part in (packed, blocks, global_scale)]
        return make_nvfp4_weights(*stored, bias=bias), right
    values = torch.randn(size).to(torch.float8_e4m3fn)
    kind = draw.choice(("matrix", "row", "block"))
    if kind == "matrix":
        stored = (scale[:, 0] if own == 1 else scale).to(device)
        return make_fp8_weights(values.to(device), stored, bias=bias), values.float() * each
    if kind == "row":
        scale = (torch.rand(experts, rows, 1) + 0.5) / depth**0.5  # [E, N, 1]
        return make_fp8_weights(values.to(device), scale.to(device), bias=bias), values.float() * scale
    tall, wide = draw.choice((5, 16, 128)), draw.choice((16, 48, 128))
    high, across = -(-(rows // halves) // tall), -(-depth // wide)
    scale = (torch.rand(experts, halves, high, across) + 0.5) / depth**0.5
    spread = scale.repeat_interleave(tall, 2)[:, :, : rows // halves].repeat_interleave(wide, 3)[..., :depth]
    stored = scale.flatten(1, 2).to(device)
    weights = make_fp8_weights(values.to(device), stored, block=(tall, wide), halves=halves, bias=bias)
    return weights, values.float() * spread.flatten(1, 2)


def assert_small_values_keep_their_bits(dtype: torch.dtype, smaller: float, device: str = "cpu") -> None:
    """A layer whose values between the products are far below 1 is as right as another."""
    layer = make_layer(LayerShape(32, 16, 4, 2, "silu"), "nvfp4", device=device)
    problem = make_problem(layer, 1, "none", device=device)
    x = problem.x.to(dtype)  # [1, H]
    tiles = RowTile(16, 1, 4), RowTile(16, 2, 4, lanes=2)
    w13, w2 = convert_weights(layer.w13), convert_weights(layer.w2)

    def output(factor: float) -> torch.Tensor:
        """Return float32 [1, H], divided by what `factor` makes of it: gate and up have a scale of each."""
        halves = torch.tensor([1.0, factor], device=device)
        scales = w13.scale.view(len(w13.values), -1).expand(-1, 2) * halves
        weights = replace(w13, scale=scales.contiguous(), halves=2)
        shares = problem.topk_weights / factor
        return run_experts(x, weights, w2, shares, problem.topk_ids, activation="silu", tiles=tiles).float()

    expected, got = output(1.0), output(smaller)  # a power of two changes no bit but those of the exponent
    assert (got - expected).norm() <= 0.01 * expected.norm(), (dtype, smaller)


def assert_shared_experts_are_right(
    top_k: int, lanes: int, splits: int, device: str = "cpu", bounds: Bounds = _INTERPRETED
) -> None:
    """Programs share a token's experts. With few of them a program of the first launch zeroes several."""
    layer = make_layer(LayerShape(32, 16, 2 * top_k, top_k, "relu2"), "nvfp4", device=device)
    problem = make_problem(layer, 2, "none", device=device)
    problem.topk_ids[0, 1:] = -1
    expected = compute_expected(problem, "none")
    tiles = RowTile(16, 1, 4), RowTile(8, 1, 4, lanes=lanes, expert_splits=splits)
    w13, w2 = convert_weights(layer.w13), convert_weights(layer.w2)
    routes = problem.topk_weights, problem.topk_ids
    output = run_experts(problem.x, w13, w2, *routes, activation="relu2", tiles=tiles)
    agreement = agree(output.cpu(), expected.cpu(), bounds)
    assert agreement.right, (top_k, lanes, splits, agreement.reason)


def _shift_codes(places: int, device: str) -> torch.Tensor:
    """Return uint8 [places * 256]: all codes in order, again and again, each time begun one further on."""
    return (torch.arange(256) + torch.arange(places)[:, None]).to(torch.uint8).flatten().to(device)


@triton.jit
def _decode_kernel(words_ptr: tl.tensor, out_ptr: tl.tensor, half: tl.constexpr, wide: tl.constexpr) -> None:
    word = tl.arange(0, 256)[None, :]  # [1, 256]
    words = tl.load(words_ptr + word).to(tl.uint32, bitcast=True)
    place = tl.arange(0, 512)[None, :] * 2  # [1, 512]
    tl.store(out_ptr + place, decode_every_other(words, 0, half, wide).to(tl.float32))
    tl.store(out_ptr + place + 1, decode_every_other(words, 1, half, wide).to(tl.float32))


def assert_e4m3_is_exact(device: str, *, half: bool, wide: bool) -> None:
    """Every code in each place of a word, but the two of NaN, which loading refuses."""
    codes = _shift_codes(4, device)
    out = torch.empty(1024, dtype=torch.float32, device=device)
    _decode_kernel[(1,)](codes.view(torch.int32), out, half=half, wide=wide)
    right = codes.view(torch.float8_e4m3fn).float()
    finite = ~right.isnan()
    assert int(finite.sum()) == 4 * 254
    assert torch.equal(out[finite], right[finite])
    assert torch.equal(out.signbit(), codes > 127)


@triton.jit
def _decode_bytes_kernel(codes_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    place = tl.arange(0, 256)  # [256]
    tl.store(out_ptr + place, decode_bytes(tl.load(codes_ptr + place)).to(tl.float32))


def assert_e4m3_bytes_are_exact(device: str) -> None:
    """Every code, the two of NaN too, which the weights of an expert cache may hold."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, dtype=torch.float32, device=device)
    _decode_bytes_kernel[(1,)](codes, out)
    right = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(out.view(torch.int32)[~right.isnan()], right.view(torch.int32)[~right.isnan()])
    assert torch.equal(out.isnan(), right.isnan())


@triton.jit
def _add_blocks_kernel(words_ptr: tl.tensor, values_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    words = tl.load(words_ptr + tl.arange(0, 512)[None, :]).to(tl.uint32, bitcast=True)  # [1, 512]
    values = tl.load(values_ptr + tl.arange(0, 1024)[None, :])  # [1, 1024]
    first, second, third, fourth = split_words(words)
    place = tl.arange(0, 128)[None, :]  # [1, 128]
    zeros = tl.zeros([1, 128], tl.float32)
    tl.store(out_ptr + 2 * place, add_block(zeros, first, second, values))
    tl.store(out_ptr + 2 * place + 1, add_block(zeros, third, fourth, values))


def assert_e4m3_words_are_exact(device: str) -> None:
    """Every code in each place of two words is multiplied by the value of its own place, and only by it."""
    codes = _shift_codes(8, device)
    right = codes.view(torch.float8_e4m3fn).float().abs().nan_to_num(480.0)  # NaN as decode_every_other
    right = torch.where(codes > 127, -right, right).view(256, 8)
    for place in range(8):
        values = torch.zeros(128, 8, device=device)
        values[:, place] = 256.0  # weights are divided by 2**8
        out = torch.empty(256, device=device)
        _add_blocks_kernel[(1,)](codes.view(torch.int32), values, out)
        assert torch.equal(out, right[:, place]), place


def check(case: str, device: str = "cpu", bounds: Bounds = _INTERPRETED) -> None:
    """Make one of the checks above: its kind and its numbers with commas, as in ``plan,16,0.5,40,5``."""
    kind, *values = case.split(",")
    if kind in ("random", "fp8_rows"):
        assert_random_layer_is_right(int(values[0]), device, bounds, fp8_rows=kind == "fp8_rows")
    elif kind == "e4m3":
        for half in (True, False):
            assert_e4m3_is_exact(device, half=half, wide=device == "cpu" and not half)
        assert_e4m3_words_are_exact(device)
        assert_e4m3_bytes_are_exact(device)
    elif kind == "decoding":
        assert_decoding_is_exact(device, Tile(*map(int, values)))
    elif kind == "rows":
        with patch.object(launch, "_MOST_ROWS", 5):
            assert_layer_is_right("fp8-block", "gelu_tanh", 20, 160, 48)
    elif kind == "shared":
        assert_shared_experts_are_right(*map(int, values), device, bounds)
    elif kind == "small":
        assert_small_values_keep_their_bits(getattr(torch, values[0]), 2.0 ** float(values[1]), device)
    elif kind == "plan":
        assert_plan_is_whole(device, int(values[0]), float(values[1]), *map(int, values[2:]))
    else:
        assert_layer_is_right(kind, values[0], *map(int, values[1:]), device)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, which no result may read
    for case in sys.argv[1:]:
        check(case)
