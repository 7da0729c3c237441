"""MD007: truncation is wrong and silent; our cache refuses, and its groups give the full output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_cases import by_figures, judge

from moedoctor.faults.cache import cache_overflow as claims
from moedoctor.faults.cache.cache_overflow import CacheOverflowFault, CacheOverflowParameters
from moedoctor.faults.cache.cache_overflow_lab import Layer, Prefill, make_grouped, measure
from moedoctor.interfaces import ClaimTest
from moedoctor.reference.expert_cache import Problem
from moedoctor.results import CaseVerdict, ClaimVerdict

FAULT = CacheOverflowFault()
POINT = {"experts": 8, "capacity": 2, "top_k": 2, "tokens": 16}


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
    evidence = measure(CacheOverflowParameters(**POINT), "cpu", make)
    assert judge(FAULT, evidence, "fixed", **POINT).verdict is CaseVerdict.REPRODUCED


def overheads(*values: float) -> dict[str, Any]:
    """Graph replays measure `values`; the wall clock of eager calls is far off."""
    clocks = {"": 0.0, "_eager_wall_clock": 3.0}
    rows = [{"groups": groups} for groups in (2, 4, 8)]
    for row, value in zip(rows, values, strict=True):
        row |= {f"overhead{end}": value + more for end, more in clocks.items()}
        row |= {f"us_a_further_group{end}": 100 * row["groups"] + 10 * more for end, more in clocks.items()}
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
    assert by_figures(claim, LIMITS, evidence).verdict is verdict


def test_the_judge_reads_the_columns_that_the_bench_writes() -> None:
    from moedoctor.bench.cache.groups import EAGER

    assert claims.EAGER == EAGER
