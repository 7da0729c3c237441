import pytest
import torch

from moedoctor.bench.moe.controls import list_wrong_problems
from moedoctor.fixes.moe.weight_layout import flatten_scales, tile_scales
from moedoctor.models.layer_shape import LayerShape
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
