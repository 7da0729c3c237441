"""The restated rule of PR 37190: hand-checked steps, and that it does lose experts where ours does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.fixes.eviction import SlotTable, replay
from moedoctor.reference.expert_cache import PrRule


def test_a_call_evicts_what_it_has_just_placed() -> None:
    rule = PrRule(8, 2)
    for call in ([7], [7], [7], [7], [6]):
        rule.step(call)
    # Clock 5: expert 7 has 4 / (5 - 4 + 1) = 2, 6 has 1 / 1: 6 leaves for 0.
    # Clock 6: 7 has 4 / 3, 0 has 1 / 1: 0, which the same call needs, leaves for 1.
    assert rule.step([0, 1]) == 2
    assert sorted(rule.expert_of) == [1, 7]
    assert rule.expert_of[rule.slot_of[0]] == 1, "the mapping still sends 0's tokens to the slot that 1 has"
    calls = [[7], [7], [7], [7], [6], [0, 1]]
    assert (replay(calls, PrRule(8, 2)).wrong, replay(calls, SlotTable(8, 2)).wrong) == (1, 0)


@pytest.mark.parametrize(
    ("slots", "calls", "held"),
    [
        # Clock 5: expert 7 has 3 / (5 - 3 + 1) = 1, and so has 0 with 1 / (5 - 5 + 1): 7 was there first.
        (2, [7, 7, 7, 6, 0, 1], [0, 1]),
        # Clock 7: expert 0 has 4 / (7 - 4 + 1) = 1, expert 1 has 2 / (7 - 6 + 1) = 1, expert 2 has 1 / 1 = 1.
        # Clock 8: 4 / 5, 2 / 3 and 2 / 1: expert 1 leaves.
        (3, [0, 0, 0, 0, 1, 1, 2, 2, 3], [0, 2, 3]),
    ],
)
def test_scores_are_frequency_over_age_in_accesses_and_the_older_of_two_equal_ones_leaves(slots, calls, held):
    rule = PrRule(8, slots)
    for expert in calls:
        rule.step([expert])
    assert sorted(rule.expert_of) == held


def test_the_clock_of_the_fork_counts_calls() -> None:
    by_access, by_call = PrRule(8, 3), PrRule(8, 3, clock="call")
    for rule in (by_access, by_call):
        for call in ([0, 1], [0, 1], [2], [3]):
            rule.step(call)
    # By access at 5: 2 / 3, 2 / 2 and 1 / 1, expert 0 leaves. By call at 4: 2 / 3, 2 / 3 and 1 / 2, expert 2.
    assert sorted(by_access.expert_of) == [1, 2, 3]
    assert sorted(by_call.expert_of) == [0, 1, 3]


def test_more_experts_than_slots_keep_the_highest_ids() -> None:
    rule = PrRule(8, 2)
    rule.step([1, 3, 5, 7])
    assert (sorted(rule.expert_of), rule.dropped) == ([5, 7], [1, 3])
    assert rule.split([7, 1, 5, 3]) == [[5, 7]]


CALLS = st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=4).map(sorted), min_size=1, max_size=60)


@given(calls=CALLS)
def test_only_its_own_policy_with_few_slots_loses_experts(calls: list[list[int]]) -> None:
    assert replay(calls, PrRule(12, 4, policy="lru")).wrong == 0
    assert replay(calls, SlotTable(12, 4, "lfru")).wrong == 0
    assert replay(calls, PrRule(12, 12)).wrong == 0
    rule = PrRule(12, 4)
    replay(calls, rule)
    held = [expert for expert in rule.expert_of if expert >= 0]
    assert len(held) == len(set(held)), "slots are never shared"


@pytest.mark.parametrize("options", [{"policy": "lfu"}, {"clock": "token"}])
def test_unknown_rules_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected policy"):
        PrRule(8, 2, **options)
