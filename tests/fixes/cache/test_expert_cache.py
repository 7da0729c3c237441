"""The expert cache on the CPU: the engines ``host`` and ``resident``, and ``device`` in the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from moedoctor.fixes.cache.host import HostEngine
from moedoctor.fixes.eviction import ONLINE_POLICIES, Load, SlotTable, replay, simulate
from moedoctor.fixes.expert_cache import CacheBusy, CachedExperts, CacheOverflow, ExpertCache, choose_followed
from moedoctor.reference.expert_cache import PrRule
from tests.fixes.cache.checks import EXPERTS, WEIGHTS, assert_consistent, assert_holds
from tests.interpreted import needs_triton, run_check

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


def test_the_rule_of_the_vllm_pr_leaves_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the PR's rule, the check above finds a slot that holds another expert."""
    rule = PrRule(EXPERTS, 4)

    def plan(self: SlotTable, experts: list[int]) -> Any:
        rule.step(experts)
        self.slot_of[:] = rule.slot_of
        return [Load(*load) for load in rule.loads]

    monkeypatch.setattr(SlotTable, "plan", plan)
    cache = on_host()
    draw = torch.Generator().manual_seed(0)

    def calls() -> None:
        for _ in range(200):
            ids = torch.randperm(EXPERTS, generator=draw)[:4][None]
            assert_holds(ids, cache.acquire(ids))

    with pytest.raises(AssertionError):
        calls()


def test_the_engine_is_resident_if_every_expert_fits() -> None:
    cache = ExpertCache(WEIGHTS, EXPERTS, device="cpu")
    ids = torch.tensor([[9, -1, 0]])
    held = cache.acquire(ids)
    assert cache.engine == "resident"
    assert torch.equal(held.slot_ids, ids)
    assert_holds(ids, held)
    assert cache.mapping.tolist() == cache.resident() == list(range(EXPERTS))
    assert len(list(cache.groups(ids))) == 1
    for call in entries(cache):
        for wrong, message in (([[0, 10]], "expert 10 of 10"), ([[-5, 1]], "-5 is no expert")):
            with pytest.raises(ValueError, match=f"ids: {message}"):
                call(torch.tensor(wrong))
    cache.prefetch(ids)
    cache.seed(ids)
    assert cache.stats.misses == 0


def test_overflow_names_needed_and_capacity_and_changes_nothing() -> None:
    cache = on_host(2)
    cache.acquire(torch.tensor([[0, 1]]))
    with pytest.raises(
        CacheOverflow, match="needs 3 experts and the cache has 2 slots: use groups"
    ) as caught:
        cache.acquire(torch.tensor([[0, 4], [5, -1]]))
    assert caught.value.needed == 3
    assert cache.resident() == [0, 1]
    assert cache.stats.calls == 1


def test_groups_run_resident_experts_first() -> None:
    cache = on_host(2)
    cache.acquire(torch.tensor([[5, 7]]))
    ids = torch.tensor([[1, 5, 7, -1, 2]])
    first, *others = [part.slot_ids.tolist()[0] for part in cache.groups(ids)]
    assert [slot >= 0 for slot in first] == [False, True, True, False, False]
    assert [[slot >= 0 for slot in other] for other in others] == [[True, False, False, False, True]]
    assert cache.stats.calls == 2


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


class Interrupted(HostEngine):
    """A host engine whose copies fail on demand."""

    fail_at = -1

    def _copy(self, load: Load) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            self.slots["w13"][load.slot] = torch.nan  # half a copy
            raise torch.OutOfMemoryError("CUDA out of memory")
        super()._copy(load)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_out_of_memory_during_a_call_leaves_a_right_state(
    monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    monkeypatch.setattr("moedoctor.fixes.cache.host.HostEngine", Interrupted)
    cache = on_host()
    cache.acquire(torch.tensor([[0, 1, 2, 3]]))
    cache._engine.fail_at = fail_at
    ids = torch.tensor([[3, 6, 7, 8]])
    with pytest.raises(torch.OutOfMemoryError):
        cache.acquire(ids)
    assert len([expert for expert in cache.resident() if expert >= 0]) == fail_at
    assert_consistent(cache)
    assert_holds(ids, cache.acquire(ids))
    assert_consistent(cache)


STEPS: dict[str, Callable[[ExpertCache], Any]] = {
    "acquire": lambda cache: cache.acquire(torch.tensor([[3, 6, 7, 8]])),
    "groups": lambda cache: list(cache.groups(torch.tensor([[0, 4, 5, 6, 7, 8]]))),
    "prefetch": lambda cache: cache.prefetch(torch.tensor([3, 6, 7])),
    "seed": lambda cache: cache.seed(torch.tensor([[3, 6], [7, 8]])),
}


def interrupted_at(call: Callable[[], Any], line: int) -> bool:
    """Call with Ctrl-C before line number `line` of the cache's own code. Return whether it has so many."""
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

    class Slow(HostEngine):
        def acquire(self, ids: torch.Tensor) -> CachedExperts:
            inside.set()
            assert leave.wait(10)
            return super().acquire(ids)

    monkeypatch.setattr("moedoctor.fixes.cache.host.HostEngine", Slow)
    cache = on_host()
    ids = torch.tensor([[1, 2]])
    thread = threading.Thread(target=cache.acquire, args=(ids,))
    thread.start()
    try:
        assert inside.wait(10)
        for enter in entries(cache):
            with pytest.raises(CacheBusy, match="another thread is inside"):
                enter(ids)
    finally:
        leave.set()
        thread.join()
    monkeypatch.undo()
    assert_holds(ids, cache.acquire(ids))


def test_prefetched_experts_hit() -> None:
    cache = on_host()
    cache.prefetch(torch.tensor([3, 4]))
    ids = torch.tensor([[3, 5]])
    assert_holds(ids, cache.acquire(ids))
    stats = cache.stats
    assert (stats.calls, stats.hits, stats.misses, stats.prefetched) == (1, 1, 1, 2)


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@pytest.mark.parametrize("capacity", [5, 2])
def test_seeding_gives_the_state_after_the_prefill(policy: str, capacity: int) -> None:
    prefill = torch.randint(0, EXPERTS, (40, 3), generator=torch.Generator().manual_seed(5))  # [T, K]
    cache = on_host(capacity, policy)
    cache.acquire(torch.tensor([[0, 1]]))
    cache.seed(prefill)
    table = SlotTable(EXPERTS, capacity, policy)
    replay(prefill.tolist(), table)
    assert cache.resident() == table.expert_of
    assert_consistent(cache)
    ids = torch.tensor([[0, 9]])
    assert_holds(ids, cache.acquire(ids))


@pytest.mark.parametrize("ids", [[[3, 10]], [[-2, 1]]])
def test_ids_out_of_range_are_refused(ids: list[list[int]]) -> None:
    cache = on_host()
    for call in entries(cache):
        with pytest.raises(ValueError, match=r"ids: (expert 10 of 10|-2 is no expert)"):
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
        ({"capacity": True}, TypeError, "capacity must be an int, got bool"),
        ({"policy": "belady"}, ValueError, "policy must be one of lru, lfu, lfru, aging, got 'belady'"),
        ({"engine": "gpu"}, ValueError, "engine must be one of auto, device, host, resident, got 'gpu'"),
        ({"engine": "resident"}, ValueError, "needs a slot for each of 10 experts, got 4"),
        ({"engine": "device"}, RuntimeError, "needs a CUDA device, got cpu: use engine='host'"),
        ({"weights": {}}, ValueError, "weights is empty"),
        ({"weights": {"a": torch.zeros(2), "b": torch.zeros(3)}}, ValueError, "agree on the number"),
        ({"weights": {"a": torch.zeros(2, device="meta")}}, ValueError, "must be a host tensor"),
        ({"weights": [torch.zeros(2)]}, TypeError, "weights must be a mapping of names .* got list"),
        ({"weights": {"a": [1, 2]}}, TypeError, r"weights\['a'\] must be a tensor .* got list"),
        ({"weights": {"a": torch.tensor(1.0)}}, ValueError, r"weights\['a'\] .* without dimensions"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertCache(**({"weights": WEIGHTS, "capacity": 4, "device": "cpu"} | options))


@pytest.mark.slow
@needs_triton
def test_the_device_engine_interpreted() -> None:
    run_check(Path(__file__).parent / "interpreted_expert_cache.py")
