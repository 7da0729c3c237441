"""Whole layers of experts through two buffers, and the caches that they seed, without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.fixes.cache.engine import predict_table
from moedoctor.fixes.eviction import ONLINE_POLICIES
from moedoctor.fixes.expert_cache import ExpertCache, choose_followed
from moedoctor.fixes.layer_stream import LayerStream
from tests.fixes.cache.checks import assert_consistent

E, SLOTS = 6, 3


def layer(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"w1": torch.randn(E, 4, 3, generator=draw), "scale": torch.rand(E, generator=draw)}


def caches(count: int, policy: str = "aging") -> list[ExpertCache]:
    return [ExpertCache(layer(seed), SLOTS, policy=policy, device="cpu") for seed in range(count)]


ids = st.lists(st.integers(0, E - 1), min_size=2, max_size=2, unique=True)


@settings(max_examples=60)
@given(
    order=st.lists(st.tuples(st.integers(0, 3), st.lists(ids, max_size=4)), max_size=12),
    policy=st.sampled_from(ONLINE_POLICIES),
)
def test_every_order_of_layers_and_calls_gives_the_right_experts(order, policy):
    held = caches(4, policy)
    stream = LayerStream(held)
    for number, between in order:
        with stream.fetch(number) as weights:
            assert all(torch.equal(weights[name], tensor) for name, tensor in layer(number).items())
        for row in between:  # decode steps between two prompts
            held[number].acquire(torch.tensor([row]))
        assert_consistent(held[number], layer(number))
    size = sum(tensor.nbytes for tensor in layer(0).values())
    assert stream.nbytes == 2 * size


@settings(max_examples=60)
@given(
    prompt=st.lists(ids, min_size=1, max_size=130),
    policy=st.sampled_from(ONLINE_POLICIES),
    before=st.lists(ids, max_size=5),
)
def test_a_prompt_leaves_the_state_of_calls_for_its_tokens(prompt, policy, before):
    (cache,) = caches(1, policy)
    for row in before:
        cache.acquire(torch.tensor([row]))
    stats, table = cache.stats, torch.tensor(prompt)
    cache.seed_from(table, layer(0))
    rows = choose_followed(table)
    expected = predict_table(rows, E, SLOTS, policy)
    assert cache.resident() == expected.expert_of
    assert cache.stats == stats, "a prompt is no call of the cache"
    assert_consistent(cache, layer(0))
    plain = ExpertCache(layer(0), SLOTS, policy=policy, device="cpu")
    for row in rows:
        plain.acquire(row[None])
    assert plain.resident() == cache.resident()
    following = torch.tensor([[0, 1]])
    plain.acquire(following)
    cache.acquire(following)
    assert plain.resident() == cache.resident()


def test_layers_that_differ_have_no_stream() -> None:
    other = ExpertCache({"w1": torch.zeros(E, 5)}, SLOTS, device="cpu")
    with pytest.raises(ValueError, match="layer 1 has experts of other shapes"):
        LayerStream([*caches(1), other])
    with pytest.raises(ValueError, match="caches is empty"):
        LayerStream([])


def test_an_error_in_a_layer_leaves_the_stream_usable() -> None:
    stream = LayerStream(caches(3))
    with pytest.raises(KeyError), stream.fetch(0):
        raise KeyError
    for number in (1, 2, 0):
        with stream.fetch(number) as weights:
            assert torch.equal(weights["w1"], layer(number)["w1"])
