import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.reference import e2m1

CODES = torch.arange(16, dtype=torch.uint8)


def peer_codes(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_every_code_has_the_value_of_ml_dtypes() -> None:
    peer = CODES.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ours = e2m1.decode(CODES)
    assert torch.equal(ours, torch.from_numpy(peer))
    assert torch.equal(ours.signbit(), torch.from_numpy(np.signbit(peer)))


def test_every_code_encodes_to_itself() -> None:
    assert torch.equal(e2m1.encode(e2m1.decode(CODES)), CODES)


def test_only_four_bits_count() -> None:
    assert torch.equal(e2m1.decode(CODES + 0xF0), e2m1.decode(CODES))


@pytest.mark.parametrize(
    ("tie", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(
    tie: float, rounded: float, sign: float
) -> None:
    middle = torch.tensor(tie)
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
    values = sign * torch.stack((below, middle, above))
    assert torch.equal(e2m1.encode(values), peer_codes(values))
    assert float(e2m1.decode(e2m1.encode(values))[1]) == sign * rounded


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_rounds_as_ml_dtypes_does(values: list[float]) -> None:
    x = torch.tensor(values)
    # What is beyond the largest value saturates in both; the peer only where it is finite.
    assert torch.equal(e2m1.encode(x), peer_codes(x.clamp(-1e30, 1e30)))


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN has no E2M1 code"):
        e2m1.encode(torch.tensor([1.0, float("nan")]))


def test_the_even_element_lies_in_the_low_nibble() -> None:
    assert e2m1.pack(torch.tensor([[0x3, 0xA]], dtype=torch.uint8)).tolist() == [[0xA3]]


def test_all_256_bytes_survive_unpacking_and_packing() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


def test_an_odd_number_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
