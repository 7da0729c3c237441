"""Replays of a trace: figures checked by hand, the optimum, caches of layers, and the shipped trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.bench.cache.replay import SHIPPED, collect_trace_facts, load_shipped_trace, replay_trace
from moedoctor.entries import find_reports_folder
from moedoctor.trace.format import RoutingTrace
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace

# One layer, top-2 of 4: {0,1} {0,2} {1,2} {0,1}.
SMALL = RoutingTrace([0, 1, 0, 2, 1, 2, 0, 1], 4, 2, ("a",), (1, 1, 1, 1), (2, 2))


def rates(trace: RoutingTrace, capacity: int, **options: object) -> dict[str, float]:
    points = replay_trace(trace, capacities=[capacity], **options)  # type: ignore[arg-type]
    return {point.policy: point.hit_rate for point in points}


def test_hand_checked_hits() -> None:
    # Hits: 0 in the second call, 2 in the third, 1 in the fourth. No policy has a choice.
    assert rates(SMALL, 2) == {"lru": 3 / 8, "lfu": 3 / 8, "lfru": 3 / 8, "aging": 3 / 8, "belady": 3 / 8}
    assert not any(point.overflowing for point in replay_trace(SMALL, capacities=[2]))
    # In three slots all three experts fit: 0, 1 and 2 miss once each.
    assert set(rates(SMALL, 3).values()) == {5 / 8}


def test_facts_checked_by_hand() -> None:
    facts = collect_trace_facts(SMALL)
    assert (facts.layers, facts.num_experts, facts.top_k, facts.tokens, facts.calls) == (1, 4, 2, 4, 4)
    assert (facts.experts_a_call, facts.most_experts_a_call) == (2.0, 2)
    assert facts.reuse == 3 / 6
    assert facts.experts_for_90 == 3 / 4


def test_sequences_in_a_batch_share_their_experts() -> None:
    facts = collect_trace_facts(SMALL, batch=2)
    assert (facts.calls, facts.most_experts_a_call) == (2, 3)
    (point,) = replay_trace(SMALL, capacities=[2], policies=["lru"], batch=2)
    assert (point.stats.calls, point.overflowing) == (2, 2)


@given(
    seed=st.integers(0, 1000),
    capacity=st.integers(2, 12),
    scope=st.sampled_from(["layer", "global"]),
    batch=st.sampled_from([None, 1, 3]),
)
def test_no_policy_beats_the_bound_or_is_wrong(seed, capacity, scope, batch):
    trace = draw_zipf_trace(ZipfSettings(experts=12, top_k=2, layers=2, rows=60, streams=3, seed=seed))
    points = replay_trace(trace, capacities=[capacity], batch=batch, scope=scope)
    bound = next(point for point in points if point.policy == "belady")
    for point in points:
        assert point.stats.wrong == 0
        assert point.stats.accesses == bound.stats.accesses
        if not point.overflowing:
            assert point.hit_rate <= bound.hit_rate


@given(seed=st.integers(0, 1000), policy=st.sampled_from(["lru", "lfu", "lfru"]))
def test_the_hits_of_all_layers_add_up(seed: int, policy: str) -> None:
    trace = draw_zipf_trace(ZipfSettings(experts=12, top_k=2, layers=3, rows=50, streams=1, seed=seed))
    (point,) = replay_trace(trace, capacities=[4], policies=[policy], scope="global")
    assert sum(rate * 100 for rate in point.hit_rate_by_layer) == pytest.approx(point.stats.hits)


def test_one_cache_for_all_layers_gives_slots_to_the_layer_that_needs_them() -> None:
    # The first layer always uses one expert, the second alternates between two: one slot each misses always.
    trace = RoutingTrace([0, 0, 0, 1] * 20, 4, 1, ("a", "b"), (1,) * 40)
    assert rates(trace, 1)["lru"] == pytest.approx((39 + 0) / 80)
    alone = rates(trace, 2, policies=["lru"], scope="global")["lru"]
    assert alone == pytest.approx((39 + 38) / 80)


@pytest.mark.parametrize("capacities", [[], [0], [4, -1]])
def test_a_capacity_below_one_is_refused(capacities: list[int]) -> None:
    with pytest.raises(ValueError, match="capacity"):
        replay_trace(SMALL, capacities=capacities)


def test_it_is_below_a_megabyte_and_has_the_shape_of_a_large_model() -> None:
    assert (find_reports_folder() / SHIPPED).stat().st_size < 1_000_000
    trace = load_shipped_trace()
    assert (trace.num_experts, trace.top_k, len(trace.layers)) == (128, 8, 8)
    assert trace.stream_rows == (256,) * 16
    assert all(len(call) == 8 for layer in range(8) for call in trace.list_calls(layer))


def test_its_readme_describes_how_it_was_made() -> None:
    made = load_shipped_trace().made
    text = (find_reports_folder() / SHIPPED.parent / "README.md").read_text(encoding="utf-8")
    assert made["script"] in text
    figures = f"{made['steps_done']:,} steps|the {made['files']} `.py` files of the {made['text']}"
    figures += f"|torch {made['torch']}|seed {made['settings']['seed']}"
    figures += f"|loss on held-out text is {made['held_out_loss']:.2f}"
    assert [figure for figure in figures.split("|") if figure not in text] == []


def test_tokens_reuse_experts_and_the_optimum_has_more_hits() -> None:
    trace = load_shipped_trace()
    assert collect_trace_facts(trace).reuse > 2 * 8 / 128, "tokens reuse experts more than chance"
    lru, belady = replay_trace(trace, capacities=[16], policies=("lru", "belady"))
    assert belady.hit_rate > lru.hit_rate + 0.05
