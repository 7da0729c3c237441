"""MD007: truncation is wrong and silent; our cache refuses, and its groups give the full output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_cases import case, run

from moedoctor.faults.cache import cache_overflow as claims
from moedoctor.faults.cache.cache_overflow import CacheOverflowFault, CacheOverflowParameters
from moedoctor.faults.cache.cache_overflow_lab import Layer, Prefill, make_grouped, measure
from moedoctor.interfaces import ClaimTest, Measurement
from moedoctor.reference.expert_cache import Problem
from moedoctor.results import CaseVerdict, ClaimVerdict, Observation

torch.set_num_threads(1)


FAULT = CacheOverflowFault()
POINTS = [
    {"experts": 8, "capacity": 2, "top_k": 2, "tokens": 16},
    {"experts": 8, "capacity": 7, "top_k": 2, "tokens": 32},
    {"experts": 32, "capacity": 8, "top_k": 4, "tokens": 32},
    {"experts": 32, "capacity": 3, "top_k": 4, "tokens": 8},
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_control_is_wrong_and_silent_and_the_fix_refuses_or_is_right(point: dict[str, Any]) -> None:
    judged, faulty = run(FAULT, "faulty", **point)
    assert (judged.verdict, faulty["message"]) == (CaseVerdict.REPRODUCED, None)
    assert faulty["wrong_rows"] > 0
    assert faulty["dropped_experts"] > 0
    judged, fixed = run(FAULT, "fixed", **point)
    assert judged.verdict is CaseVerdict.CLEAN
    assert fixed["worst_error"] < 1e-4
    assert fixed["groups"] >= 2
    assert f"needs {fixed['needed']} experts" in fixed["message"]
    assert f"{point['capacity']} slots" in fixed["message"]


def silent(problem: Problem, capacity: int) -> Layer:
    """Gives the right result, but does not refuse a call without groups."""
    layer = make_grouped(problem, capacity)
    return lambda x, topk_weights, topk_ids: layer(x, topk_weights, topk_ids)._replace(refused=None)


def without_the_last_group(problem: Problem, capacity: int) -> Layer:
    """Refuses the call, but its groups lose the experts below 4."""
    layer = make_grouped(problem, capacity)

    def prefill(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Prefill:
        refused = layer(x, topk_weights, topk_ids).refused
        return layer(x, topk_weights, torch.where(topk_ids >= 4, topk_ids, -1))._replace(refused=refused)

    return prefill


@pytest.mark.parametrize("make", [silent, without_the_last_group])
def test_the_judge_notices_silence_and_a_lost_group(make: Callable[[Problem, int], Layer]) -> None:
    observation = measure(CacheOverflowParameters(**POINTS[0]), "cpu", make)
    assert FAULT.judge(case(FAULT, "fixed", **POINTS[0]), observation).verdict is CaseVerdict.REPRODUCED


def test_every_claim_is_measured_for_any_subjects() -> None:
    assert all(test.units(["faulty", "fixed"]) for test in FAULT.claims)


def overheads(*values: float) -> dict[str, Any]:
    """Graph replays measure `values`; the wall clock of eager calls is far off."""
    clocks = {"": 0.0, "_eager_wall_clock": 3.0}
    rows = [
        {
            "groups": groups,
            **{f"overhead{end}": value + more for end, more in clocks.items()},
            **{f"us_a_further_group{end}": 100 * groups + 10 * more for end, more in clocks.items()},
        }
        for groups, value in zip((2, 4, 8), values, strict=True)
    ]
    return {"kernel": "k", "experts": 128, "rows": rows}


def transfers(*shares: float) -> dict[str, Any]:
    rows = [{"way": "w", "gigabytes_per_second": 48.0, "transfer_share": share} for share in shares]
    return {"rows": rows, "pinned_gigabytes_per_second": 50.0}


LIMITS = {"tolerance": 0.05, "min_share": 0.9}


@pytest.mark.parametrize(
    ("claim", "evidence", "verdict"),
    [
        (claims.judge_group_cost, overheads(0.07, 0.13, 0.36), ClaimVerdict.CONFIRMED),
        (claims.judge_group_cost, overheads(0.07, 0.13, 0.45), ClaimVerdict.REFUTED),
        (claims.judge_group_cost, overheads(0.0, 0.13, 0.36), ClaimVerdict.REFUTED),
        (claims.judge_cold_swap, transfers(0.95, 0.92), ClaimVerdict.CONFIRMED),
        (claims.judge_cold_swap, transfers(0.95, 0.6), ClaimVerdict.REFUTED),
    ],
)
def test_claims(claim: ClaimTest, evidence: dict[str, Any], verdict: ClaimVerdict) -> None:
    assert claim.judge((), [Measurement("", Observation(evidence))], LIMITS).verdict is verdict


def test_graph_replays_decide_and_the_other_times_are_shown() -> None:
    measurement = Measurement("", Observation(overheads(0.07, 0.13, 0.36)))
    judgement = claims.judge_group_cost.judge((), [measurement], LIMITS)
    assert judgement.reason is not None
    assert judgement.reason.startswith("2 groups +7.0%, 4 groups +13.0%, 8 groups +36.0% with k, 128 experts")
    assert "eager calls by the wall clock 2 groups +307.0%, 4 groups +313.0%" in judgement.reason
    assert "A further group adds 200, 400, 800 µs (eager 230, 430, 830)" in judgement.reason
    # 6, 15 and 35 % of the PR's call of 6.5 ms, over 1, 3 and 7 further groups.
    assert "the PR's 390, 325, 325 µs" in judgement.reason
    by_group = [row["pr_us_a_further_group"] for row in judgement.evidence["rows"]]
    assert by_group == pytest.approx([390, 325, 325])


def test_the_published_table_is_open_wherever_it_is_asked() -> None:
    judgement = claims.judge_published_table.judge((), [Measurement("", Observation({}))], {})
    assert judgement.verdict is ClaimVerdict.UNTESTED
    assert "RTX PRO 6000; neither is run here" in str(judgement.reason)


def test_the_judge_reads_the_columns_that_the_bench_writes() -> None:
    from moedoctor.bench.cache.groups import EAGER

    assert claims.EAGER == EAGER
