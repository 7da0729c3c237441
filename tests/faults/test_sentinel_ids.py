"""MD016: three ways to index with -1, and the same without; the judges of the paths."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from moedoctor.faults import sentinel_ids_claims as claims
from moedoctor.faults.base import Measurement
from moedoctor.faults.sentinel_ids import SentinelIds, SentinelIdsParameters
from moedoctor.faults.sentinel_ids_model import FaultyUse, make_batch, observe
from moedoctor.fixes.expert_ids import local_ids, without_sentinels
from moedoctor.results import Case, CaseVerdict, ClaimVerdict, Crash, Death, Observation, Tier

FAULT = SentinelIds()
DEFAULT = SentinelIdsParameters().model_dump()


def parameters(**changes: Any) -> SentinelIdsParameters:
    return SentinelIdsParameters.model_validate({**DEFAULT, **changes})


points = st.fixed_dictionaries(
    {
        "tokens": st.integers(2, 40),
        "experts": st.sampled_from([8, 24]),
        "top_k": st.integers(1, 8),
        "ranks": st.sampled_from([1, 4]),
        "rank": st.just(0),
        "slots": st.sampled_from(["padding", "dropped"]),
        "seed": st.integers(0, 5),
    }
)


@settings(deadline=None)
@given(points, st.sampled_from(["expert_map", "gather", "row_map"]))
def test_the_fix_is_right_everywhere_and_the_control_wrong_where_it_can_be(point: dict, use: str) -> None:
    if use != "expert_map":
        point = {**point, "ranks": 1}
    one = Case("MD016", "faulty", Tier.MODEL, parameters(use=use, **point).model_dump())
    fixed = FAULT.judge(one, FAULT.observe(one, FAULT.fixed(one)))
    assert fixed.verdict is CaseVerdict.CLEAN
    faulty = FAULT.judge(one, FAULT.observe(one, FAULT.faulty(one)))
    # The first of four ranks does not have the expert that -1 wraps to.
    expected = CaseVerdict.CLEAN if point["ranks"] == 4 else CaseVerdict.REPRODUCED
    assert faulty.verdict is expected


def test_minus_one_wraps_to_the_last_expert() -> None:
    batch = make_batch(parameters())
    used = FaultyUse().expert_map(batch)
    assert (used.slots[batch.ids < 0] == 31).all()
    seen = observe(parameters(), FaultyUse()).evidence
    assert (seen["empty_slots"], seen["empty_slots_given_to_an_expert"], seen["expert"]) == (64, 64, 31)


def test_empty_slots_of_weight_zero_are_noticed_too() -> None:
    one = Case("MD016", "faulty", Tier.MODEL, DEFAULT)
    seen = {"rows": 4, "rows_wrong": 0, "empty_slots": 2, "empty_slots_given_to_an_expert": 2, "expert": 7}
    judged = FAULT.judge(one, Observation(seen))
    assert (judged.verdict, judged.figure) == (CaseVerdict.REPRODUCED, "2 empty slots go to expert 7")


def test_local_ids_by_hand() -> None:
    expert_map = torch.tensor([-1, -1, 0, 1])
    ids = torch.tensor([[3, 0], [-1, 2], [4, -7]], dtype=torch.int32)
    assert local_ids(ids, expert_map).tolist() == [[1, -1], [-1, 0], [-1, -1]]
    with pytest.raises(ValueError, match="int \\[experts\\]"):
        local_ids(ids, expert_map.float())


def test_without_sentinels_by_hand() -> None:
    ids, weights = without_sentinels(torch.tensor([[3, -1]]), torch.tensor([[0.5, 0.25]]), spare=2)
    assert (ids.tolist(), weights.tolist()) == ([[3, 2]], [[0.5, 0.0]])


def measured(unit: str, **row: Any) -> Measurement:
    return Measurement(unit, Observation({"rows": [{"ids": "padding", "rows": 4, **row}]}))


def test_a_path_that_is_wrong_or_dies_refutes() -> None:
    good, bad = measured("TRITON bf16", rows_wrong=0), measured("MARLIN nvfp4", rows_wrong=2)
    died = Measurement("MARLIN fp8", Crash(Death.ILLEGAL_MEMORY_ACCESS, "an illegal memory access"))
    limits = {"max_rows": 0}
    assert claims.judge_paths((), [good], limits).verdict is ClaimVerdict.CONFIRMED
    for other, said in (
        (bad, "MARLIN nvfp4, padding: 2 of 4 rows wrong"),
        (died, "an illegal memory access"),
    ):
        judged = claims.judge_paths((), [good, other], limits)
        assert judged.verdict is ClaimVerdict.REFUTED
        assert said in str(judged.reason)


@pytest.mark.parametrize(("in_blocks", "lost"), [(1, 0), (0, 1)])
def test_an_alignment_that_counts_empty_slots_or_loses_real_ones_refutes(in_blocks: int, lost: int) -> None:
    def row(a: int, b: int) -> Measurement:
        counts = {"call": "padding", "empty_slots": 4, "empty_slots_in_blocks": a, "slots_lost": b}
        return Measurement("moe_align_block_size", Observation({"rows": [counts]}))

    assert claims.judge_align((), [row(0, 0)], {"max_slots": 0}).verdict is ClaimVerdict.CONFIRMED
    assert claims.judge_align((), [row(in_blocks, lost)], {"max_slots": 0}).verdict is ClaimVerdict.REFUTED


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"top_k": 40}, "more than experts"),
        ({"ranks": 3}, "does not divide"),
        ({"ranks": 2, "rank": 2}, "below ranks"),
        ({"use": "gather", "ranks": 2}, "knows no ranks"),
    ],
)
def test_points_that_cannot_be_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parameters(**changes)
