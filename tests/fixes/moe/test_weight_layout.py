"""The order of gate and up, and the tiles of block scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
