"""Packed bfloat16 experts, read back by the words of the format: `unpack_kernel` is compared elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.fixes.cache.packed import LANES, SIZE, PackedExperts, count_block_bytes, pack

COLUMNS = SIZE // LANES


def bfloat16(exponents: torch.Tensor, seed: int) -> torch.Tensor:
    """Return weights with these exponents and any signs and mantissas."""
    draw = torch.Generator().manual_seed(seed)
    words = exponents << 7 | torch.randint(0, 128, exponents.shape, generator=draw)
    words |= torch.randint(0, 2, exponents.shape, generator=draw) << 15
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).view(torch.bfloat16)


def unpacked(block: torch.Tensor, packed: PackedExperts) -> torch.Tensor:
    """Return the int32 words [SIZE] of a block, uint8 [bytes], one weight after the other."""
    low, planes, tail = block[:SIZE], block[SIZE : SIZE + 2 * COLUMNS], block[SIZE + 2 * COLUMNS :]
    words = [int(word) & 0xFFFFFFFF for word in tail.contiguous().view(torch.int32)]
    top, above = words[0] & 0xFF, words[0] >> 8
    escapes = iter(range(SIZE))
    exponents = [0] * SIZE
    for column in range(COLUMNS):
        first, second = int(planes[column]), int(planes[COLUMNS + column])
        for lane in range(LANES):
            below = (first >> lane & 1) + 2 * (second >> lane & 1)
            if below == 3:
                number = next(escapes)
                bits = [words[1 + 3 * (number // 32) + bit] >> number % 32 & 1 for bit in range(3)]
                below = bits[0] + 2 * bits[1] + 4 * bits[2]
                below += 3 if below >= above else 0
            else:
                below += above
            exponents[lane * COLUMNS + column] = top - below
    for word in words[packed.listed :]:
        if word & 0xFFFF < SIZE:
            exponents[word & 0xFFFF] = word >> 16
    return (low.int() & 0x80) << 8 | torch.tensor(exponents, dtype=torch.int32) << 7 | low.int() & 0x7F


@settings(max_examples=12, deadline=None)
@given(
    common=st.integers(0, 255),
    spread=st.integers(1, 14),
    elements=st.sampled_from((SIZE, SIZE + 16, 2 * SIZE - 16, 3 * SIZE)),
    far=st.integers(0, 200),
    seed=st.integers(0, 2**30),
)
def test_every_weight_comes_out_as_it_went_in(common, spread, elements, far, seed):
    """With exponents of any spread, at both ends of their range, and some that are anywhere."""
    draw = torch.Generator().manual_seed(seed)
    exponents = common - torch.randint(0, spread, (2, elements), generator=draw)
    places = torch.randint(0, elements, (far,), generator=draw)
    exponents[1, places] = torch.randint(0, 256, (far,), generator=draw)
    weights = bfloat16(exponents.clamp(0, 255), seed)
    packed = pack(weights, device=torch.device("cpu"))
    if packed is None:  # too many exponents without a code, or a padded block that costs more than it saves
        assert spread > 11 or far > 0 or elements == SIZE + 16
        return
    assert packed.blocks.shape[2] == count_block_bytes(packed.tail)
    assert packed.blocks.nbytes < weights.nbytes
    for expert, blocks in zip(weights.view(torch.int16).int() & 0xFFFF, packed.blocks, strict=True):
        read = torch.cat([unpacked(block, packed) for block in blocks])[:elements]
        assert torch.equal(read, expert)


@pytest.mark.parametrize("deviation", [0.0156, 0.0221, 0.03])
def test_normal_weights_take_about_69_percent(deviation: float) -> None:
    weights = torch.randn(4, 16 * SIZE, generator=torch.Generator().manual_seed(0)) * deviation
    packed = pack(weights.bfloat16(), device=torch.device("cpu"))
    assert packed is not None
    assert 0.67 < packed.blocks.nbytes / (2 * weights.numel()) < 0.70
    assert packed.blocks.shape[2] % 128 == 0, "a GPU asks for 128 bytes at once"


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(2, SIZE),
        torch.zeros(2, SIZE, dtype=torch.float16),
        torch.zeros(2, SIZE - 8, dtype=torch.bfloat16),
        torch.zeros(2, 16, dtype=torch.bfloat16),
        bfloat16(torch.arange(2 * SIZE).view(2, SIZE) % 256, 0),
    ],
    ids=["float32", "float16", "no multiple of 16", "mostly padding", "all exponents"],
)
def test_what_does_not_pack_stays_as_it_is(weights: torch.Tensor) -> None:
    assert pack(weights, device=torch.device("cpu")) is None
