import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.reference.swizzle import padded_shape, swizzle, unswizzle


def test_every_byte_of_two_by_two_tiles_lies_where_the_formula_says() -> None:
    rows, columns = 256, 8
    where = torch.arange(rows * columns, dtype=torch.int32)
    low, high = (where % 256).to(torch.uint8), (where // 256).to(torch.uint8)  # 2048 places in two bytes
    got = torch.stack([swizzle(part.view(rows, columns)).flatten().to(torch.int32) for part in (low, high)])
    found = got[0] + 256 * got[1]  # [2048]: which linear element each place holds
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * (columns // 4) + column // 4
            offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert int(found[offset]) == row * columns + column


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 3))
def test_round_trip_and_zero_padding(rows: int, columns: int, experts: int) -> None:
    shape = (experts, rows, columns) if experts else (rows, columns)
    scales = torch.randint(1, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    swizzled = swizzle(scales)
    assert swizzled.dtype == scales.dtype
    assert tuple(swizzled.shape[-2:]) == padded_shape(rows, columns)
    back = unswizzle(swizzled, rows, columns)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))
    assert int(swizzled.view(torch.uint8).count_nonzero()) == scales.numel()


def test_a_shape_that_does_not_belong_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[..., 256, 4\]"):
        unswizzle(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)


@pytest.mark.gpu  # vLLM's moves to a GPU by itself
@pytest.mark.upstream
def test_the_same_as_vllm() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_utils")
    scales = torch.randint(0, 127, (2, 200, 12), dtype=torch.uint8).view(torch.float8_e4m3fn)
    theirs = utils.swizzle_blockscale(scales.to("cuda")).cpu()
    assert torch.equal(theirs.view(torch.uint8).flatten(), swizzle(scales).view(torch.uint8).flatten())
