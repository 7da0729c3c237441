"""A MoE layer over slots on the CPU: sums of groups, errors; kernels: tests/kernels/test_interpreted.py."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import GroupedForward, group_bound, moe_forward
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference

EXPERTS, HIDDEN, INNER = 12, 8, 6


def _weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "w13": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw),
        "w2": torch.randn(EXPERTS, HIDDEN, INNER, generator=draw),
    }


WEIGHTS = _weights()
W13, W2 = WEIGHTS.values()


def _grouped(cache: ExpertCache, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape)
    for part in cache.groups(ids):
        moe_forward(x, part.weights, part.slot_ids, shares, out=out)
    return out


@given(
    seed=st.integers(0, 999), tokens=st.integers(1, 6), top_k=st.integers(1, 8), capacity=st.integers(1, 6)
)
def test_groups_are_within_the_bound_of_one_call(seed: int, tokens: int, top_k: int, capacity: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=draw)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:top_k] for _ in range(tokens)])
    shares = torch.rand(tokens, top_k, generator=draw)
    whole = reference(x, MoeWeights.from_tensors(WEIGHTS), shares, ids)
    cache = ExpertCache(WEIGHTS, capacity, engine="host", device="cpu")
    parts = _grouped(cache, x, ids, shares)
    lanes = [torch.where(torch.arange(top_k) == lane, ids, -1) for lane in range(top_k)]
    each = [reference(x, MoeWeights.from_tensors(WEIGHTS), shares, lane).abs() for lane in lanes]
    # On a CPU a product depends on the number of rows; the bound is only about the sum.
    slack = 1e-6
    assert bool(((parts - whole).abs() <= (group_bound(top_k) + slack) * sum(each)).all())


def test_out_is_added_to_and_returned() -> None:
    x, ids, shares = torch.randn(2, HIDDEN), torch.tensor([[1], [2]]), torch.ones(2, 1)
    out = torch.ones(2, HIDDEN)
    assert moe_forward(x, WEIGHTS, ids, shares, out=out) is out
    assert torch.equal(out, 1 + moe_forward(x, WEIGHTS, ids, shares))


FINE: dict[str, Any] = {
    "x": torch.zeros(2, HIDDEN),
    "weights": WEIGHTS,
    "slot_ids": torch.zeros(2, 1, dtype=torch.int32),
    "topk_weights": torch.ones(2, 1),
}


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"activation": "tanh"}, "activation must be one of silu, gelu, gelu_tanh, relu2, got 'tanh'"),
        ({"weights": {"w2": WEIGHTS["w2"]}}, "weights lacks w13; it holds w2"),
        ({"weights": WEIGHTS | {"w2_bias": torch.zeros(12)}}, r"weights\['w2_bias'\] must be \(12, 8\)"),
        ({"weights": WEIGHTS | {"w13": W13.to(torch.float8_e4m3fn)}}, "is float8 and has no w13_scale"),
        ({"x": torch.zeros(2, 9)}, r"x must be \[T, 8\] for w2"),
        ({"topk_weights": torch.ones(2, 2)}, r"slot_ids and topk_weights must be \[2, K\]"),
        ({"out": torch.zeros(2, HIDDEN).bfloat16()}, "out must be contiguous float32"),
        ({"slot_ids": torch.tensor([[3], [12]])}, "slot_ids: expert 12 of 12"),
        ({"weights": WEIGHTS | {"w2": W2.mT.contiguous().mT}}, "must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_forward(**(FINE | given_))


def test_a_call_of_one_group_is_refused_by_name() -> None:
    ids = torch.tensor([[1], [2]])
    (part,) = ExpertCache(WEIGHTS, 2, engine="host", device="cpu").groups(ids)
    call = GroupedForward(torch.zeros(2, HIDDEN), ids, torch.ones(2, 1), EXPERTS)
    with pytest.raises(ValueError, match=r"experts is None: .* moe_forward"):
        call.add(part.weights, part.experts)


@pytest.mark.parametrize("wrong", [-2, EXPERTS, (1 << 32) + 1])
def test_an_expert_out_of_range_is_named_on_a_cpu(wrong: int) -> None:
    """A GPU ignores it: tests/kernels/interpreted_cache.py."""
    x, shares = torch.zeros(2, HIDDEN), torch.ones(2, 1)
    with pytest.raises(ValueError, match=f"ids: (expert )?{wrong} "):
        GroupedForward(x, torch.tensor([[0], [wrong]]), shares, EXPERTS)
    call = GroupedForward(x, torch.tensor([[0], [1]]), shares, EXPERTS)
    held = torch.arange(EXPERTS, dtype=torch.int32)
    held[3] = wrong if wrong < 1 << 31 else EXPERTS + 1
    with pytest.raises(ValueError, match="experts: "):
        call.add(WEIGHTS, held)
