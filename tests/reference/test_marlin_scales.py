import pytest
import torch

from moedoctor.reference.marlin_scales import common_factor, from_s0e5m3, to_s0e5m3

CODES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 0 .. 448, without NaN
SMALLEST = 2.0**-6
"""2 / 2**7: what is below becomes zero."""


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_every_positive_e4m3_scale_survives_or_is_too_small(factor: float) -> None:
    scales = CODES[CODES.float() * factor <= 448]
    back = from_s0e5m3(to_s0e5m3(scales, factor), factor)
    small = scales.float() * factor < SMALLEST
    assert torch.equal(back[~small], scales.float()[~small])
    assert torch.equal(back[small], torch.zeros(int(small.sum())))
    assert int(small.sum()) > 1  # subnormal scales are lost, and this is how Marlin loses them


def test_the_factor_saves_small_scales() -> None:
    scales = torch.tensor([2.0**-9, 2.0**-7]).to(torch.float8_e4m3fn)
    factor = common_factor(scales)
    assert factor == 2.0**15
    assert torch.equal(from_s0e5m3(to_s0e5m3(scales, factor), factor), scales.float())


def test_a_layer_of_zeros_has_no_factor() -> None:
    assert common_factor(torch.zeros(4)) == 1.0


def test_a_negative_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        to_s0e5m3(torch.tensor([-1.0]))


@pytest.mark.upstream
def test_the_same_as_vllm() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    scales = torch.randint(0, 127, (8, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    factor = common_factor(scales)
    theirs, used = utils.nvfp4_marlin_process_scales(scales.bfloat16(), a_dtype=torch.bfloat16)
    assert used == factor
    ours = to_s0e5m3(scales.view(-1, 4)[:, [0, 2, 1, 3]].reshape(8, -1), factor)
    assert torch.equal(theirs.view(torch.uint8), ours)
