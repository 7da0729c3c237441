"""Eviction policies: their decisions, one event for each call, and the optimum."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import cast
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moedoctor.fixes.cache import policies as _eviction_policies
from moedoctor.fixes.cache.policies import Change, Lfru, Lru
from moedoctor.fixes.eviction import ONLINE_POLICIES, CacheOverflow, CacheStats, SlotTable, replay, simulate
from moedoctor.kernels.cache import HALVED_EVERY

EXPERTS = 9
calls = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), max_size=40)
long_calls = st.integers(0, 1000).map(
    lambda seed: [
        [n % EXPERTS for n in random.Random(seed + call).sample(range(40), 3)] for call in range(150)
    ]
)
"""Long enough that `aging` halves its counts."""


def _key(policy: str, uses: int, last: int, now: int, expert: int) -> tuple[float, ...]:
    """The policies as the module states them."""
    if policy == "lru":
        return (last, expert)
    if policy in ("lfu", "aging"):
        return (uses, last, expert)
    return (uses / (now - last + 1), uses, expert)


class Naive:
    """The same rule without optimizations; it stores residents, not slots."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity, self.policy, self.now = capacity, policy, 0
        self.uses: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.known: dict[int, int] = {}

    def call(self, needed: set[int]) -> int:
        self.now += 1
        if self.policy == "aging" and self.now % HALVED_EVERY == 0:
            self.uses, self.known = (
                {expert: count // 2 for expert, count in counts.items()} for counts in (self.uses, self.known)
            )
        misses = needed - set(self.uses)
        others = sorted(
            set(self.uses) - needed,
            key=lambda expert: _key(self.policy, self.uses[expert], self.last[expert], self.now, expert),
        )
        for victim in others[: max(len(self.uses) + len(misses) - self.capacity, 0)]:
            del self.last[victim]
            self.known[victim] = self.uses.pop(victim)
        for expert in needed:
            start = self.known.get(expert, 0) if self.policy == "aging" else 0
            self.uses[expert] = self.uses.get(expert, start) + 1
            self.last[expert] = self.now
        return len(misses)


def assert_decides_as_naive(table: SlotTable, trace: list[list[int]]) -> None:
    naive = Naive(table.capacity, table.policy)
    for call in trace:
        needed = sorted(set(call))
        assert table.step(needed) == naive.call(set(needed))
        assert {expert for expert in table.expert_of if expert >= 0} == set(naive.uses)


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@given(trace=st.one_of(calls, long_calls), capacity=st.integers(4, EXPERTS))
def test_decisions_match_the_plain_rule(policy: str, trace: list[list[int]], capacity: int) -> None:
    assert_decides_as_naive(SlotTable(EXPERTS, capacity, policy), trace)


def skewed(seed: int, experts: int, calls: int) -> list[list[int]]:
    """A few experts are needed often and most rarely, so residents get both old and frequently used."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(experts)]
    return [draw.choices(range(experts), weights, k=4) for _ in range(calls)]


@pytest.mark.parametrize("capacity", [5, 30, 90])
@pytest.mark.parametrize("policy", ONLINE_POLICIES)
def test_decisions_among_many_experts_match_the_plain_rule(policy: str, capacity: int) -> None:
    assert_decides_as_naive(SlotTable(120, capacity, policy), skewed(0, 120, 1000))


@pytest.mark.parametrize("capacity", [30, 90])
def test_the_sorted_residents_of_lfru_do_not_change_decisions(capacity, monkeypatch):
    """Residents are sorted again very often, for higher and for lower ages."""
    monkeypatch.setattr(_eviction_policies, "_FEW", 0)
    with patch.object(Lfru, "_choose_age", autospec=True, side_effect=Lfru._choose_age) as chosen:
        test_decisions_among_many_experts_match_the_plain_rule("lfru", capacity)
    steps = [later.args[1] - age.args[1] for age, later in pairwise(chosen.call_args_list)]
    assert min(steps) < 0 < max(steps)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), max_size=7), st.integers(2, 3))
def test_belady_is_the_brute_force_optimum(trace: list[list[int]], capacity: int) -> None:
    needed = [frozenset(call) for call in trace]

    @cache
    def fewest(index: int, resident: frozenset[int]) -> int:
        if index == len(needed):
            return 0
        call = needed[index]
        others = resident - call
        kept = min(len(others), capacity - len(call))
        return len(call - resident) + min(
            fewest(index + 1, call | frozenset(rest)) for rest in combinations(sorted(others), kept)
        )

    misses, accesses = fewest(0, frozenset()), sum(map(len, needed))
    stats = simulate(trace, num_experts=5, capacity=capacity, policy="belady")
    assert stats == CacheStats(calls=len(trace), hits=accesses - misses, misses=misses)


def test_more_experts_than_slots_raise_and_change_nothing() -> None:
    table = SlotTable(8, 2, "lru")
    table.step([0, 1])
    with pytest.raises(CacheOverflow, match="needs 3 experts and the cache has 2 slots") as caught:
        table.plan([1, 2, 3])
    assert (caught.value.needed, caught.value.capacity) == (3, 2)
    assert (table.expert_of, table.clock) == ([0, 1], 1)
    assert table.split([5, 1, 7, 0, 1, -1]) == [[0, 1], [5, 7]]


def test_forgetting_an_expert_frees_its_slot() -> None:
    table = SlotTable(8, 2, "lfru")
    table.step([3, 4])
    table.forget(3)
    table.forget(3)
    assert (table.expert_of, table.slot_of[3]) == ([-1, 4], -1)
    assert table.plan([5]) == [(5, 0)]
    assert table.expert_of == [5, 4]


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@given(trace=calls, capacity=st.integers(4, EXPERTS))
def test_a_restored_table_makes_the_same_decisions(policy, trace, capacity):
    table = SlotTable(EXPERTS, capacity, policy)
    for index, call in enumerate(trace):
        if index == len(trace) // 2:
            table = SlotTable.restore(capacity, policy, table.slot_of, table.uses, table.last, table.clock)
        table.step(sorted(set(call)))
    whole = SlotTable(EXPERTS, capacity, policy)
    replay(trace, whole)
    assert table.expert_of == whole.expert_of


@pytest.mark.parametrize(
    ("trace", "options", "message"),
    [
        ([[0, 9]], {}, "call 0 needs expert 9, but there are 9 experts"),
        ([[1], [-2]], {}, "call 1 holds expert -2"),
        ([[0]], {"policy": "fifo"}, "policy must be one of lru, lfu, lfru, aging, belady, got 'fifo'"),
        ([[0]], {"capacity": 0}, "at least 1"),
        ([[0]], {"capacity": 0, "policy": "belady"}, "at least 1"),
    ],
)
def test_wrong_arguments_are_named(trace: list[list[int]], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(trace, **({"num_experts": EXPERTS, "capacity": 4} | options))


def test_ids_of_none_and_empty_calls() -> None:
    stats = simulate([[-1, 3, 3], [], [-1]], num_experts=4, capacity=2)
    assert stats == CacheStats(calls=3, hits=0, misses=1)
    assert CacheStats(0, 0, 0).hit_rate == 1.0


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@given(seed=st.integers(0, 1000), capacity=st.integers(1, 20))
def test_simulate_matches_a_table(policy: str, seed: int, capacity: int) -> None:
    """Calls are unsorted, have repeats, and some need more experts than there are slots."""
    trace = skewed(seed, 20, 40)
    for calls in (trace, [sorted(set(call)) for call in trace]):
        expected = replay(calls, SlotTable(20, capacity, policy))
        assert simulate(calls, num_experts=20, capacity=capacity, policy=policy) == expected


class EvictsNeeded(Lru):
    """Evicts the first experts of the call."""

    def step(self, experts: Sequence[int], uses: list[int], now: int, free: int) -> Change:
        missing, _ = super().step(experts, uses, now, free=len(experts))
        return missing, self._leave(list(experts[: max(len(missing) - free, 0)]))


class KeepsAll(Lru):
    """Evicts nothing."""

    def step(self, experts: Sequence[int], uses: list[int], now: int, free: int) -> Change:
        return super().step(experts, uses, now, free=len(experts))


@pytest.mark.parametrize(("broken", "second"), [(EvictsNeeded, [1, 2]), (KeepsAll, [2, 3])])
def test_simulate_detects_a_broken_policy(monkeypatch, broken, second):
    monkeypatch.setitem(cast("dict[str, object]", _eviction_policies.POLICIES), "lru", broken)
    assert simulate([[0, 1], second], num_experts=4, capacity=2, policy="lru").wrong == 1
