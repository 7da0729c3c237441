"""E2M1, FP8 and NVFP4 against ml_dtypes, and NVFP4 against vLLM."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.reference import e2m1, fp8
from moedoctor.reference.nvfp4 import Nvfp4, dequantize, quantize, round_trip

CODES = torch.arange(16, dtype=torch.uint8)
E4M3 = torch.arange(256, dtype=torch.uint8)


def peer_codes(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_every_e2m1_code_has_the_value_of_ml_dtypes() -> None:
    peer = CODES.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ours = e2m1.decode(CODES)
    assert torch.equal(ours, torch.from_numpy(peer))
    assert torch.equal(ours.signbit(), torch.from_numpy(np.signbit(peer)))
    assert torch.equal(e2m1.encode(ours), CODES)
    assert torch.equal(e2m1.decode(CODES + 0xF0), ours), "only four bits count"


def test_ties_of_e2m1_go_to_the_even_code_and_their_neighbors_to_the_nearest() -> None:
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1.decode(e2m1.encode(middle)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
    values = torch.cat((below, middle, above, -below, -middle, -above))
    assert torch.equal(e2m1.encode(values), peer_codes(values))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_e2m1_and_fp8_round_as_ml_dtypes_does(values: list[float]) -> None:
    x = torch.tensor(values)
    # What is beyond the largest value saturates in both; the peer only where it is finite.
    assert torch.equal(e2m1.encode(x), peer_codes(x.clamp(-1e30, 1e30)))
    peer = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert torch.equal(fp8.round_trip(x, 1.0), torch.from_numpy(peer))
    assert fp8.round_trip(torch.tensor([1e4, -1e4]), 2.0).tolist() == [896.0, -896.0]


def test_the_even_element_is_in_the_low_nibble() -> None:
    assert e2m1.pack(torch.tensor([[0x3, 0xA]], dtype=torch.uint8)).tolist() == [[0xA3]]
    packed = E4M3.view(2, 128)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


@pytest.mark.parametrize(
    ("function", "values", "message"),
    [
        (e2m1.encode, torch.tensor([1.0, float("nan")]), "NaN has no E2M1 code"),
        (e2m1.pack, torch.zeros(2, 3, dtype=torch.uint8), "even"),
        *((quantize, torch.zeros(shape), "multiple of 16") for shape in ((16,), (2, 17), (2, 8), (4, 0))),
        *((quantize, torch.zeros(shape), "at least one row") for shape in ((0, 16), (3, 0, 16))),
        *((quantize, torch.full((1, 16), float(value)), "finite") for value in ("nan", "inf")),
        *(
            (lambda w, scale=scale: quantize(w, float(scale)), torch.zeros(1, 16), "global_scale")
            for scale in ("0", "-1", "nan", "inf")
        ),
    ],
)
def test_what_has_no_code_is_refused(function: Any, values: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(values)


def test_every_pair_of_value_and_block_scale() -> None:
    """16 codes under each of the 256 block scales: the product of ml_dtypes' values, exactly."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)  # [256, 16]
    q = Nvfp4(e2m1.pack(codes), E4M3.view(torch.float8_e4m3fn)[:, None], torch.tensor(0.25))
    values = codes[0].numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = E4M3.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    peer = torch.from_numpy(scales[:, None] * values[None] * 0.25).float()
    assert torch.equal(dequantize(q).nan_to_num(nan=1e9), peer.nan_to_num(nan=1e9))


def test_the_block_scale_is_rounded_as_ml_dtypes_does() -> None:
    """Every midpoint between neighboring positive E4M3 values, and its two neighbors."""
    grid = E4M3[:127].view(torch.float8_e4m3fn).double()  # 0 .. 448
    middle = (grid[1:] + grid[:-1]) / 2
    values = torch.cat((middle, middle * (1 - 2**-20), middle * (1 + 2**-20), grid))
    w = torch.zeros(len(values), 16)
    w[:, 3] = (values * 6).float()
    stored = quantize(w, 1.0).block_scales[:, 0]
    peer = values.float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(stored.view(torch.uint8), torch.from_numpy(peer))


def test_the_largest_block_scale_is_448() -> None:
    q = quantize(torch.randn(8, 64))
    assert float(q.block_scales.float().max()) == 448.0
    assert q.packed.shape == (8, 32)
    assert q.block_scales.shape == (8, 4)
    assert q.global_scale.shape == ()


def test_a_stack_is_quantized_matrix_by_matrix() -> None:
    w = torch.randn(3, 8, 32) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    stack = quantize(w)
    for index in range(3):
        alone = quantize(w[index])
        assert torch.equal(stack.packed[index], alone.packed)
        assert torch.equal(stack.global_scale[index], alone.global_scale)
        assert torch.equal(dequantize(stack)[index], dequantize(alone))


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_the_error_is_at_most_half_a_step_and_quantizing_twice_changes_nothing(seed, size):
    w = torch.randn(4, 48, generator=torch.Generator().manual_seed(seed)) * size
    q = quantize(w)
    blocks = w.double().unflatten(-1, (-1, 16))
    step = q.block_scales.double() * q.global_scale.double()  # [4, 3]
    magnitude = blocks.abs() / step[..., None]
    gap = torch.where(magnitude > 4, 2.0, torch.where(magnitude > 2, 1.0, 0.5))
    # A block scale that was rounded down saturates the largest value at 6 steps.
    allowed = torch.maximum(gap / 2, magnitude - 6) * step[..., None] * (1 + 1e-6)
    values = dequantize(q)
    assert torch.equal(round_trip(values, q.global_scale), values)
    assert bool(((values.double().unflatten(-1, (-1, 16)) - blocks).abs() <= allowed).all())


def test_zeros_stay_zero_and_values_beyond_the_scale_saturate() -> None:
    q = quantize(torch.zeros(2, 32))
    assert float(q.global_scale) == 1.0
    assert torch.equal(dequantize(q), torch.zeros(2, 32))
    assert float(round_trip(torch.full((1, 16), 1e6), 1.0).max()) == 6 * 448
    assert round_trip(torch.zeros(0, 32), 0.5).shape == (0, 32)


@pytest.mark.parametrize("value", [1e-43, 1e-38, 3e-36])
def test_a_matrix_of_values_near_the_least_float32_stays_finite(value: float) -> None:
    """amax / (448 * 6) is zero or subnormal for each of them."""
    w = torch.zeros(16, 32)
    w[0, 0] = value
    q = quantize(w)
    assert float(q.global_scale) == torch.finfo(torch.float32).tiny
    back = dequantize(q)
    assert bool(back.isfinite().all())
    # Half the least block scale, times the largest code.
    assert float((back - w).abs().max()) <= torch.finfo(torch.float32).tiny * 2**-10 * 6 + value / 16
    assert not bool(back[1:].any())
