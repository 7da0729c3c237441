"""The order of gate and up, tiles of block scales, and names of expert tensors, of which none is guessed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.fixes.moe.expert_names import NAMES, rename_experts
from moedoctor.fixes.moe.weight_layout import flatten_scales, pad_shape, put_up_first, tile_scales
from moedoctor.reference.nvfp4 import dequantize, quantize


def test_values_and_scales_are_exchanged_together() -> None:
    w13 = torch.randn(3, 64, 32)
    w13[:, 32:] *= 100  # other scales in the other half
    q = quantize(w13)
    assert torch.equal(dequantize(put_up_first(q)), put_up_first(dequantize(q)))
    assert torch.equal(dequantize(put_up_first(put_up_first(q))), dequantize(q))


def test_odd_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        put_up_first(torch.zeros(3, 4))


def test_every_byte_of_two_by_two_tiles_is_at_the_place_of_the_formula() -> None:
    rows, columns = 256, 8
    number = torch.arange(rows * columns, dtype=torch.int32)
    low, high = (number % 256).to(torch.uint8), (number // 256).to(torch.uint8)  # 2048 places in two bytes
    tiles = [tile_scales(part.view(rows, columns)).flatten().to(torch.int32) for part in (low, high)]
    element = tiles[0] + 256 * tiles[1]  # [2048]: which linear element each place holds
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * (columns // 4) + column // 4
            offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert int(element[offset]) == row * columns + column


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 3))
def test_round_trip_and_zero_padding(rows: int, columns: int, experts: int) -> None:
    shape = (experts, rows, columns) if experts else (rows, columns)
    scales = torch.randint(1, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tiles = tile_scales(scales)
    assert tiles.dtype == scales.dtype
    assert tuple(tiles.shape[-2:]) == pad_shape(rows, columns)
    back = flatten_scales(tiles, rows, columns)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))
    assert int(tiles.view(torch.uint8).count_nonzero()) == scales.numel()


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[..., 256, 4\]"):
        flatten_scales(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)


@pytest.mark.gpu  # vLLM's moves to a GPU by itself
@pytest.mark.upstream
def test_the_same_as_vllm() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_utils")
    scales = torch.randint(0, 127, (2, 200, 12), dtype=torch.uint8).view(torch.float8_e4m3fn)
    theirs = utils.swizzle_blockscale(scales.to("cuda")).cpu()
    assert torch.equal(theirs.view(torch.uint8).flatten(), tile_scales(scales).view(torch.uint8).flatten())


LAYER = "model.layers.3.mlp.experts"
HIDDEN, WIDTH, EXPERTS = 8, 6, 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("name", "other"), [(name, other) for name in NAMES for other in NAMES[name]])
def test_every_known_name_of_a_part_is_renamed(name: str, other: str) -> None:
    weight, scale = draw(4, 8), draw(4, 1)
    parts = {f"{LAYER}.2.{other}.weight": weight, f"{LAYER}.expert_1.{other}.weight_scale": scale}
    renamed = rename_experts(parts, HIDDEN)
    if name == "gate_up_proj":
        assert torch.equal(renamed[f"{LAYER}.2.gate_proj.weight"], weight[:2])
        assert torch.equal(renamed[f"{LAYER}.1.up_proj.weight_scale"], scale[2:])
    else:
        assert renamed.keys() == {f"{LAYER}.2.{name}.weight", f"{LAYER}.1.{name}.weight_scale"}
        assert renamed[f"{LAYER}.2.{name}.weight"] is weight


@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_of_all_experts_are_split(transposed: bool) -> None:
    w13, w2 = draw(EXPERTS, 2 * WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)
    given = (each.transpose(1, 2) for each in (w13, w2)) if transposed else (w13, w2)
    names = (f"{LAYER}.gate_up_projection", f"{LAYER}.down_proj.weight")
    renamed = rename_experts(dict(zip(names, given, strict=True)), HIDDEN)
    assert len(renamed) == 3 * EXPERTS
    for expert in range(EXPERTS):
        gate, up, down = (renamed[f"{LAYER}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(torch.cat([gate, up]), w13[expert])
        assert torch.equal(down, w2[expert])


def test_other_tensors_stay() -> None:
    others = {"model.layers.3.mlp.gate.weight": draw(3, 8), "model.layers.3.mlp.shared_expert.w1": draw(2, 8)}
    assert rename_experts(others, HIDDEN) == others


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((f"{LAYER}.0.linear_7.weight",), "unknown part of an expert, expected one of"),
        ((f"{LAYER}.gate_up_proj.weight_scale",), "only weights of all experts can be split"),
        ((f"{LAYER}.0.w1.weight", f"{LAYER}.0.gate.weight"), "another tensor becomes"),
    ],
)
def test_what_is_not_known_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rename_experts({name: draw(4, 2 * WIDTH, HIDDEN) for name in names}, HIDDEN)
