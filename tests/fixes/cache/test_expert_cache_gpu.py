"""The expert cache on a GPU: both engines, CUDA graphs, no synchronization, prefetch."""

import gc

import pytest
import torch

from moedoctor.fixes.eviction import ONLINE_POLICIES, SlotTable
from moedoctor.fixes.expert_cache import CacheOverflow, ExpertCache
from moedoctor.fixes.layer_stream import LayerStream
from moedoctor.fixes.moe.forward import GroupedForward, moe_forward
from moedoctor.reference.moe import MoeWeights
from moedoctor.reference.moe import forward as reference
from tests.fixes.cache.checks import assert_holds

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, INNER = 32, 256, 128
CAPACITY = 9
"""Tests use ids of [2, 4] unless the shape matters, because each new shape compiles the kernels again."""


def _weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) / HIDDEN**0.5  # [E, 2I, H]
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=draw) / INNER**0.5  # [E, H, I]
    bias = torch.randn(EXPERTS, 2 * INNER, generator=draw)  # [E, 2I]
    weights = {"w13": w13.to(dtype), "w2": w2.to(dtype), "w13_bias": bias}
    if dtype is torch.float8_e4m3fn:
        weights |= {name: torch.rand(EXPERTS, generator=draw) + 0.5 for name in ("w13_scale", "w2_scale")}
    return weights


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def _draw_call(
    tokens: int, top_k: int = 4, experts: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [T, H], ids int32 [T, K], some of them -1, and the ids' weights [T, K]."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32, device="cuda")
    return x, ids, torch.rand(tokens, top_k, device="cuda")


def _forward(
    cache: ExpertCache, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, *, overlap: bool = False
) -> torch.Tensor:
    """Return the sum of the groups of one call, float32 [T, H]."""
    out = torch.zeros(x.shape, device="cuda")
    for part in cache.groups(ids, overlap=overlap):
        moe_forward(x, part.weights, part.slot_ids, shares, out=out)
    return out


def _forward_grouped(
    cache: ExpertCache, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, *, overlap: bool = False
) -> torch.Tensor:
    """Return the same, summed at the end."""
    call = GroupedForward(x, ids, shares, cache.num_experts)
    for part in cache.groups(ids, overlap=overlap):
        call.add(part.weights, part.experts)
    return call.sum()


def test_a_graph_of_the_device_engine_follows_the_ids() -> None:
    weights = _weights()
    cache = ExpertCache(weights, CAPACITY, engine="device")
    x, ids, shares = _draw_call(4)
    _forward(cache, x, ids, shares)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _forward(cache, x, ids, shares)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _forward(cache, x, ids, shares)
    for _ in range(20):
        ids.copy_(torch.randint(0, EXPERTS, (4, 4), dtype=torch.int32))
        graph.replay()
        right = reference(x.cpu(), MoeWeights.from_tensors(weights), shares.cpu(), ids.cpu())
        assert torch.allclose(out.cpu(), right, rtol=2e-3, atol=2e-3)


def test_the_host_engine_does_not_overwrite_weights_in_use() -> None:
    weights = _weights()
    cache = ExpertCache(weights, 4, engine="host")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        ids = torch.randperm(EXPERTS)[:4].view(1, 4).int()  # on the host: nothing waits for the device
        held = cache.acquire(ids)
        for _ in range(4):
            busy = busy @ busy * 1e-4
        copies = {name: tensor[held.slot_ids[0].long()].clone() for name, tensor in held.weights.items()}
        cache.acquire(torch.randperm(EXPERTS)[:4].view(1, 4).int())
        for name, tensor in weights.items():
            assert torch.equal(copies[name].cpu(), tensor[ids[0].long()]), name


def test_the_device_engine_refuses_by_shape() -> None:
    cache = ExpertCache(_weights(), CAPACITY, engine="device")
    with pytest.raises(CacheOverflow, match="up to 16 experts and the cache has 9 slots"):
        cache.acquire(torch.zeros(4, 4, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top_k", [1, 4])
def test_hits_first_give_what_one_call_gives(packed: bool, top_k: int) -> None:
    """Without a graph the copies are late, so that who reads a slot too early reads other weights."""
    weights = _weights()
    del weights["w13_bias"]  # float32, which is not packed
    every = {name: tensor.cuda() for name, tensor in weights.items()}
    cache = ExpertCache(weights, CAPACITY, engine="device", packed=packed)
    rows = torch.tensor([2], dtype=torch.int32, device="cuda")
    cache.skip_padding(rows)
    x, ids, shares = _draw_call(2, top_k)

    def assert_right(out: torch.Tensor, real: int) -> None:
        whole = moe_forward(x, every, ids, shares)
        torch.testing.assert_close(out[:real], whole[:real], rtol=1e-4, atol=1e-5)
        assert bool(out.isfinite().all())
        meant = ids.clone()
        meant[real:] = ids[0]  # padding counts as the first row
        assert_holds(meant, cache.acquire(ids), weights)

    _forward(cache, x, ids, shares, overlap=True)
    for _ in range(5):
        ids.copy_(torch.randint(-1, EXPERTS, (2, top_k), dtype=torch.int32))
        with torch.cuda.stream(cache._engine._copies):
            torch.cuda._sleep(5_000_000)
        assert_right(_forward(cache, x, ids, shares, overlap=True), 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _forward(cache, x, ids, shares, overlap=True)
    for number in range(20):
        ids.copy_(torch.randint(-1, EXPERTS, (2, top_k), dtype=torch.int32))
        rows.fill_(1 + number % 2)
        graph.replay()
        assert_right(out, 1 + number % 2)


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_both_engines_make_the_decisions_of_the_table_and_slots_hold_the_bytes_of_the_host(dtype, policy):
    weights = _weights(dtype)
    caches = [ExpertCache(weights, CAPACITY, engine=engine, policy=policy) for engine in ("device", "host")]
    table = SlotTable(EXPERTS, CAPACITY, policy)
    for number in range(120):  # `aging` halves its counts twice
        ids = torch.randint(-1, EXPERTS, (2, 4), dtype=torch.int64 if number % 2 else torch.int32)
        table.step(sorted(set(ids.flatten().tolist()) - {-1}))
        held = [cache.acquire(ids.cuda()) for cache in caches]
        assert torch.equal(held[0].slot_ids, held[1].slot_ids)
        for each in held:
            assert_holds(ids, each, weights)
    assert [cache.resident() for cache in caches] == [table.expert_of] * 2
    assert caches[0].stats == caches[1].stats


@pytest.mark.parametrize(
    ("tokens", "capacity", "engine", "overlap"),
    [
        (200, CAPACITY, "device", False),
        (200, CAPACITY, "host", False),
        (2, CAPACITY, "device", True),
        (100, EXPERTS, "device", True),
    ],
)
def test_groups_give_what_one_call_gives(tokens: int, capacity: int, engine: str, overlap: bool) -> None:
    """Of many tokens bit by bit. Copies beside the hits are late: who reads a slot too early reads zeros."""
    weights = _weights()
    every = {name: tensor.cuda() for name, tensor in weights.items()}
    for _ in range(4):
        cache = ExpertCache(weights, capacity, engine=engine)
        cache.acquire(torch.tensor([[1, 2, 3, 4]], dtype=torch.int32, device="cuda"))
        x, ids, shares = _draw_call(tokens)
        whole = moe_forward(x, every, ids, shares)
        if overlap:
            with torch.cuda.stream(cache._engine._copies):
                torch.cuda._sleep(5_000_000)
        total = _forward_grouped(cache, x, ids, shares, overlap=overlap)
        tolerance = (1e-4, 1e-5) if tokens < 10 else (0, 0)
        assert torch.allclose(total, whole, *tolerance)


class Broken(Exception):  # noqa: N818  not an error of ours
    """Raised by a caller between two groups."""


def test_a_capture_that_fails_between_hits_and_misses_leaves_nothing_behind() -> None:
    weights = _weights()
    cache = ExpertCache(weights, CAPACITY, engine="device")
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32, device="cuda")

    def step(*, breaks: bool) -> torch.Tensor:
        slots = torch.full_like(ids, -1)
        for part in cache.groups(ids, overlap=True):
            if breaks:
                raise Broken
            slots = torch.maximum(slots, part.slot_ids)
        return slots

    step(breaks=False)
    for _ in range(2):
        # Ending a capture raises torch's error instead of ours if the stream of copies was not joined.
        with pytest.raises(Broken), torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(breaks=True)
        ids.copy_(torch.randint(0, EXPERTS, (2, 4), dtype=torch.int32))
        assert_holds(ids, cache.acquire(ids), weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = step(breaks=False)
    ids.copy_(torch.arange(20, 28, dtype=torch.int32).view(2, 4))
    graph.replay()
    assert torch.equal(cache.mapping[ids.long()], slots)
    assert_holds(ids, cache.acquire(ids), weights)


@pytest.mark.parametrize("engine", ["device", "host"])
def test_a_cache_that_is_dropped_under_a_prefetch_keeps_its_memory(engine: str) -> None:
    """Memory that is allocated next must not be overwritten by copies that are still to come."""
    weights = {"w": torch.full((EXPERTS, 1 << 20), 7, dtype=torch.uint8).pin_memory()}
    cache = ExpertCache(weights, CAPACITY, engine=engine)
    ids = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    cache.prefetch(ids)  # compiles
    cache.acquire(ids)
    torch.cuda.synchronize()
    slots = cache.weights["w"]
    address, shape = slots.data_ptr(), slots.shape
    del slots
    with torch.cuda.stream(cache._engine._copies):
        torch.cuda._sleep(400_000_000)  # some 0.2 s
    cache.prefetch(ids + 8)
    del cache
    gc.collect()
    others = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    assert all(not bool(other.any()) for other in others)
    assert address not in [other.data_ptr() for other in others]


def test_the_host_engine_refuses_a_capture_and_stays_right() -> None:
    weights = _weights()
    cache = ExpertCache(weights, CAPACITY, engine="host")
    ids = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    for call in (cache.acquire, cache.prefetch, lambda ids: list(cache.groups(ids)), cache.seed):
        refused, graph = pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.CUDAGraph()
        with refused, torch.cuda.graph(graph):
            call(ids)
        assert_holds(ids, cache.acquire(ids), weights)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("graphs", [1, 3])
def test_layers_that_stream_are_captured_together_and_one_by_one(packed: bool, graphs: int) -> None:
    weights = [{"w2": torch.randn(EXPERTS, HIDDEN, INNER).bfloat16()} for _ in range(3)]
    caches = [ExpertCache(tensors, CAPACITY, policy="aging", packed=packed) for tensors in weights]
    stream = LayerStream(caches)
    ids = torch.randint(0, EXPERTS, (8, 4), dtype=torch.int32, device="cuda")
    computed_with = [torch.empty_like(each["w2"], device="cuda") for each in weights]

    def step(number: int) -> None:
        with stream.fetch(number) as held:
            computed_with[number].copy_(held["w2"])
            caches[number].seed_from(ids, held)

    for number in range(3):
        step(number)
    torch.cuda.synchronize()
    captured = [torch.cuda.CUDAGraph() for _ in range(graphs)]
    for at, graph in enumerate(captured):
        with torch.cuda.graph(graph):
            for number in range(3) if graphs == 1 else [at]:
                step(number)
    for _ in range(2):
        for tensor in computed_with:
            tensor.zero_()
        for graph in captured:
            graph.replay()
        torch.cuda.synchronize()
        for got, held in zip(computed_with, weights, strict=True):
            assert torch.equal(got.cpu(), held["w2"])
        for cache in caches:
            cache.acquire(torch.randint(0, EXPERTS, (2, 4), dtype=torch.int32, device="cuda"))
