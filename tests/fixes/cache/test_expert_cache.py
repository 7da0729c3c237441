"""The expert cache on a CPU, its memory, and streamed layers; `device`: tests/kernels/test_interpreted.py."""

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.fixes.cache.engine import predict_table
from moedoctor.fixes.eviction import ONLINE_POLICIES, Load, simulate
from moedoctor.fixes.expert_cache import CacheBusy, CacheOverflow, ExpertCache, ExpertStore, choose_followed
from moedoctor.fixes.layer_stream import LayerStream
from moedoctor.fixes.offload.pinned import PAGE, PinError, Release
from tests.fixes.cache.checks import EXPERTS, WEIGHTS, assert_consistent, assert_holds

id_rows = st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=3, max_size=3), min_size=1, max_size=3)


def on_host(capacity: int = 4, policy: str = "lfru") -> ExpertCache:
    return ExpertCache(WEIGHTS, capacity, policy=policy, engine="host", device="cpu")


def entries(cache: ExpertCache) -> tuple[Callable[..., Any], ...]:
    """Every call that takes ids."""
    return cache.acquire, cache.prefetch, cache.seed, lambda ids: next(cache.groups(ids))


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@given(rows=st.lists(id_rows, max_size=12), capacity=st.integers(1, EXPERTS + 2))
def test_every_call_gets_its_experts(policy: str, rows: list[Any], capacity: int) -> None:
    cache = on_host(capacity, policy)

    def addresses() -> list[int]:
        return [tensor.data_ptr() for tensor in (*cache.weights.values(), cache.mapping)]

    before = addresses()
    for row in rows:
        ids = torch.tensor(row, dtype=torch.int32)  # [T, K]
        computed = torch.zeros_like(ids)
        for part in cache.groups(ids):
            assert_holds(ids, part)
            computed += part.slot_ids >= 0
        assert torch.equal(computed, (ids >= 0).int()), "each id must be in exactly one group"
        assert_consistent(cache)
    trace = [list(chain(*row)) for row in rows]
    expected = simulate(trace, num_experts=EXPERTS, capacity=capacity, policy=policy)
    stats = cache.stats
    assert (stats.calls, stats.hits, stats.misses) == (expected.calls, expected.hits, expected.misses)
    assert addresses() == before


def test_the_engine_is_resident_if_every_expert_fits() -> None:
    cache = ExpertCache(WEIGHTS, EXPERTS, device="cpu")
    ids = torch.tensor([[9, -1, 0]])
    held = cache.acquire(ids)
    assert cache.engine == "resident"
    assert torch.equal(held.slot_ids, ids)
    assert_holds(ids, held)
    assert cache.mapping.tolist() == cache.resident() == list(range(EXPERTS))
    assert len(list(cache.groups(ids))) == len(list(cache.groups(ids, overlap=True))) == 1
    for call in entries(cache):
        for wrong, message in (([[0, 10]], "expert 10 of 10"), ([[-5, 1]], "-5 is not an expert")):
            with pytest.raises(ValueError, match=f"ids: {message}"):
                call(torch.tensor(wrong))
    cache.prefetch(ids)
    cache.seed(ids)
    assert cache.stats.misses == 0


def test_overflow_names_needed_and_capacity_and_changes_nothing() -> None:
    cache = on_host(2)
    cache.acquire(torch.tensor([[0, 1]]))
    with pytest.raises(CacheOverflow, match="needs 3 experts and the cache has 2 slots") as caught:
        cache.acquire(torch.tensor([[0, 4], [5, -1]]))
    assert caught.value.needed == 3
    assert cache.resident() == [0, 1]
    assert cache.stats.calls == 1


@pytest.mark.parametrize(("tokens", "real"), [(5, 2), (200, 120), (200, 1), (96, 1 << 30)])
def test_a_prompts_padding_is_not_followed(tokens: int, real: int) -> None:
    ids = torch.arange(tokens)[:, None]  # [T, 1]
    place = choose_followed(ids, torch.tensor([real], dtype=torch.int32))[:, 0].tolist()
    assert len(place) == len(choose_followed(ids))
    assert place == sorted(place)
    assert place[-1] == min(real, tokens) - 1, "the last token decides most"
    assert place[0] <= max(min(real, tokens) // 20, 1)
    if real >= tokens:
        assert torch.equal(choose_followed(ids, torch.tensor([real])), choose_followed(ids))


@pytest.mark.parametrize(
    "rows", [torch.tensor([2]), torch.tensor([1, 2], dtype=torch.int32), torch.ones(1, device="meta").int()]
)
def test_rows_of_another_kind_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"rows must be int32 \[1\] on cpu, got torch.int"):
        on_host().skip_padding(rows)


def test_out_of_memory_in_a_copy_keeps_the_experts_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids, fails = on_host(), torch.tensor([[3, 6, 7, 8]]), iter([False, True])
    cache.acquire(torch.tensor([[0, 1, 2, 3]]))
    copy = cache._engine._copy

    def copy_or_fail(load: Load) -> None:
        if next(fails, False):
            cache.weights["w13"][load.slot] = torch.nan  # half a copy
            raise torch.OutOfMemoryError("CUDA out of memory")
        copy(load)

    monkeypatch.setattr(cache._engine, "_copy", copy_or_fail)
    with pytest.raises(torch.OutOfMemoryError):
        cache.acquire(ids)
    assert [expert in cache.resident() for expert in (3, 6, 7, 8)] == [True, True, False, False]
    assert_consistent(cache)
    assert_holds(ids, cache.acquire(ids))


STEPS: dict[str, Callable[[ExpertCache], Any]] = {
    "acquire": lambda cache: cache.acquire(torch.tensor([[3, 6, 7, 8]])),
    "groups": lambda cache: list(cache.groups(torch.tensor([[0, 4, 5, 6, 7, 8]]))),
    "prefetch": lambda cache: cache.prefetch(torch.tensor([3, 6, 7])),
    "seed": lambda cache: cache.seed(torch.tensor([[3, 6], [7, 8]])),
}


def interrupted_at(call: Callable[[], Any], line: int) -> bool:
    """Call with Ctrl-C before line number `line` of the cache's own code. Return True if it has so many."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if "/fixes/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.mark.parametrize("how", STEPS)
def test_ctrl_c_at_any_line_leaves_no_expert_that_is_not_there(how: str) -> None:
    line = 0
    ids = torch.tensor([[3, 6, 9, 0]])
    goes_on = True
    while goes_on:
        line += 1
        cache = on_host()
        cache.acquire(torch.tensor([[0, 1, 2, 3]]))
        cache.acquire(torch.tensor([[0, 1]]))
        goes_on = interrupted_at(lambda cache=cache: STEPS[how](cache), line)  # type: ignore[misc]
        cache.resident()  # mends
        assert_consistent(cache)
        assert_holds(ids, cache.acquire(ids))
        assert sorted(cache.resident()) == [0, 3, 6, 9]
        assert_consistent(cache)
    assert line > 20


def test_a_call_from_a_second_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    cache, ids = on_host(), torch.tensor([[1, 2]])
    acquire = cache._engine.acquire
    monkeypatch.setattr(
        cache._engine, "acquire", lambda ids: (inside.set(), leave.wait(10), acquire(ids))[-1]
    )
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(cache.acquire, ids)
        assert inside.wait(10)
        for enter in entries(cache):
            with pytest.raises(CacheBusy, match="another thread is inside"):
                enter(ids)
        leave.set()
        assert_holds(ids, first.result())
    assert_holds(ids, cache.acquire(ids))


@pytest.mark.parametrize("ids", [[[3, 10]], [[-2, 1]]])
def test_ids_out_of_range_are_refused(ids: list[list[int]]) -> None:
    cache = on_host()
    for call in entries(cache):
        with pytest.raises(ValueError, match=r"ids: (expert 10 of 10|-2 is not an expert)"):
            call(torch.tensor(ids))
        with pytest.raises(TypeError, match="ids must be an int32 or int64 tensor, got list"):
            call(ids)
        with pytest.raises(TypeError, match=r"int32 or int64, got torch\.float32"):
            call(torch.tensor(ids).float())
    assert cache.resident() == [-1] * 4


@pytest.mark.parametrize("shape", [(), (4,), (1, 1, 1, 1)])
def test_seeding_accepts_calls_or_tokens(shape: tuple[int, ...]) -> None:
    cache = on_host()
    with pytest.raises(ValueError, match=r"ids must be \[T, K\] or \[calls, T, K\], got"):
        cache.seed(torch.zeros(shape, dtype=torch.int64))
    assert cache.resident() == [-1] * 4


def test_the_error_without_unpacking_names_the_next_step() -> None:
    weights = {"w": torch.randn(12, 64, 256, generator=torch.Generator().manual_seed(4)).bfloat16()}
    for engine in ("auto", "host"):
        with pytest.raises(ValueError, match="cannot unpack: leave out packed"):
            ExpertCache(weights, 4, engine=engine, device="cpu", packed=True)
    assert ExpertCache(weights, 12, device="cpu", packed=True).engine == "resident"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be at least 1 slot, got 0"),
        ({"policy": "belady"}, ValueError, "policy must be one of lru, lfu, lfru, aging, got 'belady'"),
        ({"engine": "gpu"}, ValueError, "engine must be one of auto, device, host, resident, got 'gpu'"),
        ({"engine": "resident"}, ValueError, "needs a slot for each of 10 experts, got 4"),
        ({"engine": "device"}, RuntimeError, "needs a CUDA device, got cpu: use engine='host'"),
        ({"weights": {}}, ValueError, "weights is empty"),
        ({"weights": {"a": torch.zeros(2), "b": torch.zeros(3)}}, ValueError, "agree on the number"),
        ({"weights": {"a": torch.zeros(2, device="meta")}}, ValueError, "must be a host tensor"),
        ({"weights": {"a": [1, 2]}}, TypeError, r"weights\['a'\] must be a tensor .* got list"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertCache(**({"weights": WEIGHTS, "capacity": 4, "device": "cpu"} | options))


class Locks:
    """Replaces the driver: records each lock and fails from number `fail_at` on."""

    def __init__(self, fail_at: int = 0) -> None:
        self.sizes: list[int] = []
        self.released = 0
        self._fail_at = fail_at

    def register(self, memory: torch.Tensor) -> Release:
        if len(self.sizes) + 1 == self._fail_at:
            raise PinError("the limit on locked memory is reached")
        self.sizes.append(memory.numel())
        return self._release

    def _release(self) -> None:
        self.released += 1


def _pin(store: ExpertStore, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that another test left would put off what is given back until the next allocation.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.Tensor, "is_pinned", lambda self: False)
        patch.setattr("moedoctor.fixes.cache.store.register", locks.register)
        store._pin()


def test_a_pinning_failure_is_reported_and_copies_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks(2)
    store = ExpertStore(WEIGHTS, pin=False)
    _pin(store, locks, monkeypatch)
    gc.collect()
    assert not store.pinned
    assert store.reason == "the limit on locked memory is reached"
    assert (len(locks.sizes), locks.released) == (1, 1), "what was locked before the failure is given back"
    assert all(store.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in WEIGHTS.items())
    cache = ExpertCache(store, 4, device="cpu")
    ids = torch.tensor([[1, 8]])
    assert_holds(ids, cache.acquire(ids))
    assert (cache.engine, cache.memory.pinned) == ("host", 0)
    assert cache.pin_failure == store.reason


@pytest.mark.parametrize("packed", [False, True])
def test_pinned_memory_has_the_size_of_the_weights(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole pages; torch's allocator would use up to twice as much."""
    draw = torch.Generator().manual_seed(4)
    w13, w2 = torch.randn(5, 112, 128, generator=draw).bfloat16(), torch.randn(5, 3, 7, generator=draw)
    weights = {"w13": w13, "w2": w2}
    store = ExpertStore(weights, pin=False, packed=packed)
    assert set(store.packed) == ({"w13"} if packed else set())
    blocks = {name: weight.blocks.clone() for name, weight in store.packed.items()}
    nbytes, locks = store.nbytes, Locks()
    _pin(store, locks, monkeypatch)
    assert store.pinned
    assert store.reason is None
    assert store.nbytes == nbytes <= sum(locks.sizes) < nbytes + len(locks.sizes) * PAGE
    for name, tensor in store.tensors.items():
        assert tensor.data_ptr() != weights[name].data_ptr()
        assert torch.equal(tensor, weights[name])
    assert all(torch.equal(weight.blocks, blocks[name]) for name, weight in store.packed.items())
    view = store.tensors["w2"][3]
    del store, tensor
    gc.collect()
    assert locks.released == 1, "a view keeps its own block"
    assert torch.equal(view, weights["w2"][3])
    del view
    gc.collect()
    assert locks.released == 2


def test_memory_is_accounted_for() -> None:
    cache = ExpertCache(WEIGHTS, 4, engine="host", device="cpu")
    memory = cache.memory
    total = sum(tensor.nbytes for tensor in WEIGHTS.values())
    slots = sum(tensor.nbytes for tensor in cache.weights.values())
    assert slots == total * 4 // EXPERTS
    assert (memory.pinned, memory.pageable, memory.uncached) == (0, total, total)
    assert memory.device == slots + 4 * (2 * (EXPERTS + 1) + 4)
    assert memory.saved == total - memory.device


STREAM_E, SLOTS = 6, 3


def layer(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"w1": torch.randn(STREAM_E, 4, 3, generator=draw), "scale": torch.rand(STREAM_E, generator=draw)}


def caches(count: int, policy: str = "aging") -> list[ExpertCache]:
    return [ExpertCache(layer(seed), SLOTS, policy=policy, device="cpu") for seed in range(count)]


ids = st.lists(st.integers(0, STREAM_E - 1), min_size=2, max_size=2, unique=True)


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
    expected = predict_table(rows, STREAM_E, SLOTS, policy)
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
    other = ExpertCache({"w1": torch.zeros(STREAM_E, 5)}, SLOTS, device="cpu")
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
