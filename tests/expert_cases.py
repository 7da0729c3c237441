"""One layer through our kernels, with routes that are awkward, held against the reference."""

from __future__ import annotations

import torch

from moedoctor.bench.moe.own_backends import kernel_weights
from moedoctor.kernels.moe.expert_launch import ExpertWeights, Tile, _product, run_experts
from moedoctor.kernels.moe.expert_plan import plan_blocks
from moedoctor.kernels.moe.nvfp4_words import pack_words
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1
from moedoctor.reference.agreement import Bounds, agree
from moedoctor.reference.moe_layer import expected_output, make_layer, make_problem


def assert_layer_is_right(
    quantization: str,
    activation: str,
    tokens: int,
    hidden: int,
    intermediate: int,
    *,
    device: str,
    bounds: Bounds,
) -> None:
    """Some slots are skipped, one token has the same expert K times and one none at all."""
    shape = LayerShape(hidden, intermediate, 8, 4, activation)
    layer = make_layer(shape, quantization, device=device)
    problem = make_problem(layer, tokens, "none", device=device)
    problem.topk_ids[0, 1] = -1
    problem.topk_weights[0, 1] = float("nan")  # nobody's
    if tokens > 2:
        problem.topk_ids[1] = -1
        problem.topk_ids[2] = 7
    output = run_experts(
        problem.x,
        kernel_weights(layer.w13),
        kernel_weights(layer.w2),
        problem.topk_weights,
        problem.topk_ids,
        activation=activation,
    )
    found = agree(output, expected_output(problem, "none"), bounds)
    assert found.right, (quantization, activation, tokens, found.reason)
    assert tokens <= 2 or not bool(output[1].count_nonzero())
    assert torch.isfinite(output).all()


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [256, 128], block scales E4M3 [256, 16]): in 256 rows, any code with any finite scale.

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
    order, plan = plan_blocks(ids, 1, tile.block_m)
    _product(unit, weight, out, (ids, order, plan), len(plan), (256, 256, 1), "none", tile, True, False)
    assert torch.equal(out.T.float().nan_to_num(1e9), expected.float().nan_to_num(1e9)), tile


def assert_plan_is_whole(device: str, block_m: int, skipped: float, tokens: int, experts: int) -> None:
    """The plan holds every slot that has an expert once, in a block of its expert, in order."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, experts, (tokens, 3), generator=draw).int()
    ids[torch.rand(tokens, 3, generator=draw) < skipped] = -1
    order, plan = plan_blocks(ids.to(device), experts, block_m)
    seen: list[int] = []
    for expert, first, rows in plan.tolist():
        if expert < 0:
            continue
        slots = order[first : first + rows].tolist()
        assert 1 <= rows <= block_m
        assert all(int(ids.flatten()[slot]) == expert for slot in slots)
        seen += slots
    flat = ids.flatten()
    kept = (flat >= 0).nonzero().flatten()
    assert seen == kept[flat[kept].argsort(stable=True)].tolist()
