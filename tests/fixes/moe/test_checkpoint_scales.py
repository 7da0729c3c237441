"""Repairs of checkpoint scales, which are exact, rounded once, or refused, and the scales of a shard."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.fixes.moe.checkpoint_scales import compute_kv_scale, fold, repair_input_scales, rescale
from moedoctor.fixes.moe.shard_scales import expand_scales, take_shard_scales
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.reference.nvfp4 import Nvfp4, dequantize, quantize


def stack(seed: int, rows: int, columns: int, gains: list[float]) -> Nvfp4:
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(gains), rows, columns, generator=draw)  # [E, N, K]
    return quantize(weights * torch.tensor(gains)[:, None, None])


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 100), st.integers(0, 1000))
def test_rescaled_is_within_one_rounding_of_e4m3(ratio: float, seed: int) -> None:
    gate, up = stack(seed, 16, 64, [1.0, 1.0]), stack(seed + 1, 16, 64, [ratio, 1.0])
    w13 = rescale(gate, up)
    own = torch.cat((dequantize(gate), dequantize(up)), 1)  # [2, 32, 64]
    assert torch.equal(w13.packed, torch.cat((gate.packed, up.packed), 1))
    assert torch.equal(w13.global_scale, torch.maximum(gate.global_scale, up.global_scale))
    # Half a step of E4M3 for normal numbers, half of the smallest number below.
    room = own.abs() / 16 + 2.0**-10 * 6 * w13.global_scale[:, None, None]
    assert bool(((dequantize(w13) - own).abs() <= room * 1.0001).all())


@pytest.mark.parametrize("ratio", [0.25, 2.0, 8.0])
def test_rescaled_is_exact_for_powers_of_two(ratio: float) -> None:
    gate = stack(0, 16, 64, [1.0])
    up = Nvfp4(gate.packed, gate.block_scales, gate.global_scale * ratio)
    w13 = rescale(gate, up)
    assert torch.equal(dequantize(w13), torch.cat((dequantize(gate), dequantize(up)), 1))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 100), st.sampled_from(["silu", "gelu_tanh"]))
def test_folded_gives_the_same_layer(ratio: float, activation: str) -> None:
    gate, up = stack(1, 32, 64, [1.0, 1.0]), stack(2, 32, 64, [ratio, 2.0])
    down = stack(3, 64, 32, [1.0, 1.0])
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))  # [6, 64]
    ids, shares = torch.arange(6)[:, None] % 2, torch.ones(6, 1)  # [6, 1]
    own = torch.cat((dequantize(gate), dequantize(up)), 1)  # [2, 64, 64]
    expected = forward(x, MoeWeights(own, dequantize(down), activation), shares, ids)
    w13, w2 = fold(gate, up, down)
    got = forward(x, MoeWeights(w13, w2, activation), shares, ids)
    assert torch.equal(w13.global_scale, gate.global_scale)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_global_scale_is_refused(scale: float) -> None:
    good = stack(0, 16, 64, [1.0])
    bad = Nvfp4(good.packed, good.block_scales, torch.tensor([scale]))
    with pytest.raises(ValueError, match=r"up\.global_scale"):
        rescale(good, bad)
    with pytest.raises(ValueError, match=r"gate\.global_scale"):
        fold(bad, good, good)


def test_halves_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="the gate's shape"):
        rescale(stack(0, 16, 64, [1.0]), stack(0, 32, 64, [1.0]))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, 0.0, -1e-3, 1e-40, INF])
def test_a_bad_input_scale_becomes_the_largest_good_one(bad: float) -> None:
    got = repair_input_scales(torch.tensor([bad, 0.5, 0.25]), torch.ones(1, 16))
    assert got.tolist() == [0.5, 0.5, 0.25]


def test_without_a_good_input_scale_the_activations_decide() -> None:
    x = torch.tensor([[1.0, -2688.0]])
    assert repair_input_scales(torch.tensor([NAN, 0.0]), x).tolist() == [1.0, 1.0]
    assert bool((repair_input_scales(torch.tensor([NAN]), torch.zeros(1, 16)) > 0).all())


def test_good_input_scales_stay() -> None:
    scales = torch.tensor([1e-3, 2.0, 2.0**-126])
    assert torch.equal(repair_input_scales(scales, torch.ones(1, 16)), scales)


def test_a_kv_scale_takes_the_largest_to_448() -> None:
    assert compute_kv_scale(torch.tensor([1.0, -896.0])) == 2.0
    assert compute_kv_scale(torch.zeros(3)) > 0


@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16, 128]), st.sampled_from([8, 32]), st.data()
)
def test_a_shard_has_the_scales_of_its_blocks(rows, columns, block_n, block_k, data):
    rows, columns = 4 * rows, 4 * columns
    scales = torch.arange(1.0, 1 + -(-rows // block_n) * -(-columns // block_k))
    scales = scales.reshape(-(-rows // block_n), -(-columns // block_k))
    parts = [
        range(start, data.draw(st.integers(start + 1, size)))
        for size in (rows, columns)
        for start in [data.draw(st.integers(0, size - 1))]
    ]
    taken, unit = take_shard_scales(scales, (block_n, block_k), *parts)
    whole, (first, second) = expand_scales(scales, (block_n, block_k)), parts
    assert torch.equal(expand_scales(taken, unit), whole[first][:, second])


@pytest.mark.parametrize(("size", "ranks", "unit"), [(768, 4, 64), (320, 1, 64), (320, 8, 8), (512, 4, 128)])
def test_all_ranks_have_the_same_blocks(size: int, ranks: int, unit: int) -> None:
    scales = torch.ones(-(-size // 128), 2)
    shard = size // ranks
    parts = [range(rank * shard, (rank + 1) * shard) for rank in range(ranks)]
    units = {take_shard_scales(scales, (128, 128), part, range(256))[1] for part in parts}
    assert units == {(unit, 128)}
