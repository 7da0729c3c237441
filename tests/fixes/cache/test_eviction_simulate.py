"""`simulate` keeps no slots: it does what a table with slots does, and its own check can fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moedoctor.fixes.cache.policies import POLICIES as RESIDENTS
from moedoctor.fixes.cache.policies import Lru
from moedoctor.fixes.eviction import ONLINE_POLICIES, SlotTable, replay, simulate
from tests.fixes.cache.test_eviction import skewed


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
@given(seed=st.integers(0, 1000), capacity=st.integers(1, 20))
def test_simulate_does_what_a_table_does(policy: str, seed: int, capacity: int) -> None:
    """Calls unsorted, with repeats, and some of more experts than there are slots."""
    trace = skewed(seed, 20, 80)
    table = SlotTable(20, capacity, policy)
    assert simulate(trace, num_experts=20, capacity=capacity, policy=policy) == replay(trace, table)
    ascending = [sorted(set(call)) for call in trace]
    assert simulate(ascending, num_experts=20, capacity=capacity, policy=policy) == replay(
        trace, SlotTable(20, capacity, policy)
    )


def test_simulate_would_see_that_a_policy_evicts_what_the_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(Lru):
        """The first of the call leaves."""

        def step(
            self, experts: Sequence[int], uses: list[int], now: int, free: int
        ) -> tuple[list[int], list[int]]:
            missing, _ = super().step(experts, uses, now, free=len(experts))
            return missing, self._leave(list(experts[: max(len(missing) - free, 0)]))

    monkeypatch.setitem(cast("dict[str, object]", RESIDENTS), "lru", First)
    assert simulate([[0, 1], [1, 2]], num_experts=3, capacity=2, policy="lru").wrong == 1


def test_simulate_would_see_that_a_policy_keeps_more_than_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class All(Lru):
        def step(
            self, experts: Sequence[int], uses: list[int], now: int, free: int
        ) -> tuple[list[int], list[int]]:
            return super().step(experts, uses, now, free=len(experts))

    monkeypatch.setitem(cast("dict[str, object]", RESIDENTS), "lru", All)
    assert simulate([[0, 1], [2, 3]], num_experts=4, capacity=2, policy="lru").wrong == 1
