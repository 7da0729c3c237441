"""What was said about computing a call in groups of experts, and what the GPU says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.cache.engine_claims import ENGINE_CLAIMS
from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

_SAID = {2: 0.06, 4: 0.15, 8: 0.35}
"""Groups -> what the PR measured that they add, at 1024 tokens with all experts resident."""
_SAID_LAYER_US = 6500.0
"""What the layer that the PR measured takes in one call, as the PR says: microseconds, on another GPU."""
_EAGER = "_eager_wall_clock"
"""As `moedoctor.bench.cache.groups.EAGER`, which loads torch."""


def measure_upstream_groups(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """vLLM's own Triton kernel once a group, against one call: the shape and method of ours."""
    from moedoctor.bench.cache.claims import upstream_groups

    return Observation(upstream_groups(device))


def measure_our_groups(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Our layer once a group, against one call."""
    from moedoctor.bench.cache.claims import our_groups

    return Observation(our_groups(device))


def measure_cold_swap(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """A layer whose experts all have to be loaded, against the bandwidth of pinned copies."""
    from moedoctor.bench.cache.claims import cold_swap

    return Observation(cold_swap(device))


def _seen(units: Sequence[Measurement]) -> Mapping[str, Any]:
    return next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def _overheads(rows: Sequence[Mapping[str, Any]], suffix: str = "") -> str:
    return ", ".join(f"{row['groups']} groups {row[f'overhead{suffix}']:+.1%}" for row in rows)


def _further(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(f"{row[key]:.0f}" for row in rows)


def _beside_the_pr(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with what a group after the first added in the PR's measurement."""
    groups = row["groups"]
    return {**row, "pr_us_a_further_group": _SAID[groups] * _SAID_LAYER_US / (groups - 1)}


def judge_group_cost(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Each number of groups within a tolerance of what was said of it, by CUDA-graph replays.

    A share depends on how long one call is, so the time that a group adds is told beside the PR's. The wall
    clock of eager calls is told too and decides nothing: there the host's launches are most of the time.
    """
    seen = _seen(units)
    rows = [_beside_the_pr(row) for row in seen["rows"]]
    holds = all(abs(row["overhead"] - _SAID[row["groups"]]) <= limits["tolerance"] for row in rows)
    figure = (
        f"{_overheads(rows)} with {seen['kernel']}, {seen['experts']} experts, CUDA-graph replays; "
        f"eager calls by the wall clock {_overheads(rows, _EAGER)}. A further group adds "
        f"{_further(rows, 'us_a_further_group')} µs (eager {_further(rows, f'us_a_further_group{_EAGER}')}); "
        f"the PR's {_further(rows, 'pr_us_a_further_group')} µs, to a call of {_SAID_LAYER_US:.0f} µs"
    )
    return ClaimJudgement(_verdict(holds), {**seen, "rows": rows}, figure)


def judge_our_group_cost(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Each number of groups, computed beside each other, within its own limit, by CUDA-graph replays."""
    seen = _seen(units)
    rows = seen["rows"]
    holds = all(row["overhead"] <= limits[f"max_overhead_{row['groups']}"] for row in rows)
    figure = (
        f"{_overheads(rows)} with {seen['kernel']}, {seen['experts']} experts, CUDA-graph replays; one group "
        f"after another {_overheads(rows, '_in_turn')}, where a further group adds "
        f"{_further(rows, 'us_a_further_group_in_turn')} µs. Eager calls by the wall clock: "
        f"{_overheads(rows, _EAGER)}, one after another {_overheads(rows, f'_in_turn{_EAGER}')}"
    )
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
