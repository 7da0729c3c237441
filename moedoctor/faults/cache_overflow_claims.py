"""What was said about computing a call in groups of experts, and what the GPU says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.base import ClaimJudgement, ClaimTest, Measurement
from moedoctor.faults.expert_cache_engine_claims import ENGINE_CLAIMS
from moedoctor.results import CaseResult, ClaimVerdict, Observation

_SAID = {2: 0.06, 4: 0.15, 8: 0.35}
"""Groups -> what the PR measured that they add, at 1024 tokens with all experts resident."""


def measure_upstream_groups(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """vLLM's own Triton kernel once a group, against one call."""
    from moedoctor.bench.cache_claims import upstream_groups

    return Observation(upstream_groups(device))


def measure_our_groups(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Our layer once a group, against one call."""
    from moedoctor.bench.cache_claims import our_groups

    return Observation(our_groups(device))


def measure_cold_swap(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """A layer whose experts all have to be loaded, against the bandwidth of pinned copies."""
    from moedoctor.bench.cache_claims import cold_swap

    return Observation(cold_swap(device))


def _seen(units: Sequence[Measurement]) -> Mapping[str, Any]:
    return next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def _overheads(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['groups']} groups {row['overhead']:+.1%}" for row in rows)


def judge_group_cost(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Each number of groups within a tolerance of what was said of it."""
    seen = _seen(units)
    rows = seen["rows"]
    holds = all(abs(row["overhead"] - _SAID[row["groups"]]) <= limits["tolerance"] for row in rows)
    return ClaimJudgement(_verdict(holds), seen, f"{_overheads(rows)} with {seen['kernel']}")


def judge_our_group_cost(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Each number of groups, computed beside each other, within its own limit."""
    seen = _seen(units)
    rows = seen["rows"]
    holds = all(row["overhead"] <= limits[f"max_overhead_{row['groups']}"] for row in rows)
    in_turn = _overheads([{**row, "overhead": row["overhead_in_turn"]} for row in rows])
    figure = f"{_overheads(rows)} with {seen['kernel']}; one group after another {in_turn}"
    return ClaimJudgement(_verdict(holds), seen, figure)


def judge_cold_swap(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """The share of a cold call that moving its bytes at the bandwidth of pinned copies would take."""
    seen = _seen(units)
    rows = seen["rows"]
    said = "; ".join(
        f"{row['way']}: {row['gigabytes_per_second']:.1f} GB/s, {row['transfer_share']:.0%} of the call"
        for row in rows
    )
    said += f" would be the transfer at {seen['pinned_gigabytes_per_second']:.1f} GB/s, measured pinned"
    holds = min(row["transfer_share"] for row in rows) >= limits["min_share"]
    return ClaimJudgement(_verdict(holds), seen, said)


CLAIMS = (
    ClaimTest(
        "group_cost",
        judge_group_cost,
        measure_upstream_groups,
        needs_gpu=True,
        thresholds=("tolerance",),
    ),
    ClaimTest(
        "our_group_cost",
        judge_our_group_cost,
        measure_our_groups,
        needs_gpu=True,
        thresholds=("max_overhead_2", "max_overhead_4", "max_overhead_8"),
    ),
    ClaimTest("cold_swap", judge_cold_swap, measure_cold_swap, needs_gpu=True, thresholds=("min_share",)),
    *ENGINE_CLAIMS,
)
