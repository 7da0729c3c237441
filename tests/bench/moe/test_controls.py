import pytest
import torch

from moedoctor.bench.moe.controls import list_controls, list_wrong_problems
from moedoctor.fixes.moe.weight_layout import flatten_scales, tile_scales
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_layer import Layer, make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4

WHOLE_TILES = LayerShape(512, 128, 4, 2)  # w13 has scales [256, 32]


def scales(layer: Layer) -> torch.Tensor:
    assert isinstance(layer.w13, Nvfp4)
    return layer.w13.block_scales.view(torch.uint8)


def planted(name: str, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the layer, and the scales with the fault `name`."""
    problem = make_problem(make_layer(shape, "nvfp4"), 3, "none")
    return scales(problem.layer), scales(dict(list_wrong_problems(problem))[name].layer)


def test_each_layout_goes_to_the_kernel_that_reads_the_other() -> None:
    linear, given = planted("swizzled_for_linear", WHOLE_TILES)
    assert torch.equal(given, tile_scales(linear)), "a linear reader sees the bytes of the tiles"
    linear, given = planted("linear_for_swizzled", WHOLE_TILES)
    assert torch.equal(tile_scales(given), linear), "what a backend swizzles becomes the bytes of the rows"
    assert torch.equal(given, flatten_scales(linear, 256, 32))
    assert not torch.equal(given, planted("swizzled_for_linear", WHOLE_TILES)[1])


@pytest.mark.parametrize("name", ["swizzled_for_linear", "linear_for_swizzled"])
def test_scales_that_fill_no_tile_keep_their_shape_and_hold_no_padding(name: str) -> None:
    linear, given = planted(name, LayerShape(32, 48, 4, 2))  # [96, 2]
    assert given.shape == linear.shape
    assert bool((given != 0).all())
    assert not torch.equal(given, linear)


def test_every_control_changes_something() -> None:
    """Also if a token uses every expert."""
    shape = LayerShape(64, 32, 2, 2)
    in_blocks = make_problem(make_layer(shape, "fp8-block"), 3, "none")
    problem = make_problem(make_layer(shape, "nvfp4"), 3, "none")
    wrong = {**dict(list_wrong_problems(in_blocks)), **dict(list_wrong_problems(problem))}
    assert len(wrong) == sum(control.on_output is None for control in list_controls())
    right, shifted = in_blocks.layer.w13, wrong["shifted_block_scales"].layer.w13
    assert isinstance(right, Fp8)
    assert isinstance(shifted, Fp8)
    assert not torch.equal(shifted.scale, right.scale)
    assert not torch.equal(wrong["off_by_one_expert"].topk_ids, problem.topk_ids)
    assert not torch.equal(wrong["dropped_expert"].topk_weights, problem.topk_weights)


def test_the_dropped_or_exchanged_expert_contributes_most() -> None:
    """An expert may add almost nothing, and a right comparison may then miss its loss."""
    layer = make_layer(LayerShape(64, 32, 6, 3), "bf16")
    problem = make_problem(layer, 3, "none")
    assert isinstance(layer.w2, torch.Tensor)
    strong = {row: int(problem.topk_ids[row, -1]) for row in (0, -1)}  # their smallest weights
    for expert in set(range(6)) - set(strong.values()):
        layer.w2[expert] *= 1e-3
    wrong = dict(list_wrong_problems(problem))
    dropped = problem.topk_ids[wrong["dropped_expert"].topk_weights == 0]
    assert set(dropped.tolist()) == {strong[0]}
    changed = wrong["off_by_one_expert"].topk_ids != problem.topk_ids  # [T, K]
    assert changed.nonzero().tolist() == [[2, 2]]
