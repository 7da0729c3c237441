"""Replays of a trace: hand-checked figures, the bound, and a cache a layer against one for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.bench.cache.replay import default_capacities, facts_of, replay_speed, replay_trace
from moedoctor.trace.format import RoutingTrace
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

# One layer, top-2 of 4: {0,1} {0,2} {1,2} {0,1}.
SMALL = RoutingTrace([0, 1, 0, 2, 1, 2, 0, 1], 4, 2, ("a",), (1, 1, 1, 1), (2, 2))


def rates(trace: RoutingTrace, capacity: int, **options: object) -> dict[str, float]:
    points = replay_trace(trace, capacities=[capacity], **options)  # type: ignore[arg-type]
    return {one.policy: one.hit_rate for one in points}


def test_hand_checked_hits_with_two_slots() -> None:
    # Hits: 0 in the second call, 2 in the third, 1 in the fourth; every policy, for nothing can be chosen.
    assert rates(SMALL, 2) == {"lru": 3 / 8, "lfu": 3 / 8, "lfru": 3 / 8, "aging": 3 / 8, "belady": 3 / 8}
    assert not any(one.overflowing for one in replay_trace(SMALL, capacities=[2])), (
        "two experts fit two slots"
    )


def test_hand_checked_hits_with_three_slots() -> None:
    # All three experts fit: 0, 1 and 2 miss once each.
    assert set(rates(SMALL, 3).values()) == {5 / 8}


def test_hand_checked_facts() -> None:
    facts = facts_of(SMALL)
    assert (facts.layers, facts.num_experts, facts.top_k, facts.tokens, facts.calls) == (1, 4, 2, 4, 4)
    assert (facts.experts_a_call, facts.most_experts_a_call) == (2.0, 2)
    assert facts.reuse == 3 / 6
    assert facts.experts_for_90 == 3 / 4


def test_sequences_side_by_side_share_their_experts() -> None:
    facts = facts_of(SMALL, batch=2)
    assert (facts.calls, facts.most_experts_a_call) == (2, 3)
    (point,) = replay_trace(SMALL, capacities=[2], policies=["lru"], batch=2)
    assert (point.stats.calls, point.overflowing) == (2, 2)


@given(
    seed=st.integers(0, 1000),
    capacity=st.integers(2, 12),
    scope=st.sampled_from(["layer", "global"]),
    batch=st.sampled_from([None, 1, 3]),
)
def test_no_policy_beats_the_bound_where_calls_fit_and_none_is_ever_wrong(
    seed: int, capacity: int, scope: str, batch: int | None
) -> None:
    trace = zipf_trace(ZipfSettings(experts=12, top_k=2, layers=2, rows=60, streams=3, seed=seed))
    points = replay_trace(trace, capacities=[capacity], batch=batch, scope=scope)
    bound = next(one for one in points if one.policy == "belady")
    for one in points:
        assert one.stats.wrong == 0
        assert one.stats.accesses == bound.stats.accesses
        if not one.overflowing:
            assert one.hit_rate <= bound.hit_rate


@given(seed=st.integers(0, 1000), policy=st.sampled_from(["lru", "lfu", "lfru"]))
def test_the_layers_of_a_cache_for_all_add_up_to_its_hits(seed: int, policy: str) -> None:
    trace = zipf_trace(ZipfSettings(experts=12, top_k=2, layers=3, rows=50, streams=1, seed=seed))
    (point,) = replay_trace(trace, capacities=[4], policies=[policy], scope="global")
    assert sum(rate * 100 for rate in point.hit_rate_by_layer) == pytest.approx(point.stats.hits)


def test_one_cache_for_all_layers_has_room_for_a_layer_that_needs_more() -> None:
    # The first layer uses one expert for ever, the second two in turn: with a slot each it misses every time.
    trace = RoutingTrace([0, 0, 0, 1] * 20, 4, 1, ("a", "b"), (1,) * 40)
    assert rates(trace, 1)["lru"] == pytest.approx((39 + 0) / 80)
    alone = rates(trace, 2, policies=["lru"], scope="global")["lru"]
    assert alone == pytest.approx((39 + 38) / 80)


def test_capacities_double_up_to_every_expert() -> None:
    trace = zipf_trace(ZipfSettings(experts=60, top_k=4, rows=4, streams=1, layers=1))
    assert default_capacities(trace) == [4, 8, 16, 32, 60]


@pytest.mark.parametrize("capacities", [[], [0], [4, -1]])
def test_a_capacity_below_one_is_refused(capacities: list[int]) -> None:
    with pytest.raises(ValueError, match="capacity"):
        replay_trace(SMALL, capacities=capacities)


def test_the_replay_is_timed_by_the_clock() -> None:
    ticks = iter(range(1000))
    rows = replay_speed(capacities=(16,), tokens=20, rounds=3, clock=lambda: float(next(ticks)))
    assert {row["accesses_per_second"] for row in rows} == {160.0}
    assert {row["policy"] for row in rows} == {"lru", "lfu", "lfru", "aging"}


def test_every_hit_rate_of_the_replays_stands_beside_its_bound() -> None:
    rows = replay_speed(capacities=(16, 32), tokens=400, rounds=1)
    bounds = {row["capacity"]: row["hit_rate_optimum"] for row in rows}
    assert bounds[16] < bounds[32]
    for row in rows:
        assert 0 < row["hit_rate"] < row["hit_rate_optimum"] == bounds[row["capacity"]]
