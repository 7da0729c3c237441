"""MD007: more unique experts than cache slots: truncation computes with stale weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    Fault,
    Judgement,
    RoutedParameters,
    claim,
    decide,
    untested,
)
from moedoctor.results import Case, CaseVerdict, Observation, find_worst

_BENCH = "moedoctor.bench.cache.groups"
PR_OVERHEAD = {2: 0.06, 4: 0.15, 8: 0.35}
"""Groups -> overhead that the PR measured, at 1024 tokens with all experts resident."""
PR_LAYER_US = 6500.0
"""Time of one call of the layer that the PR measured, in microseconds, on another GPU."""
EAGER = "_eager_wall_clock"
"""Suffix of the eager columns; as `moedoctor.bench.cache.groups.EAGER`, which loads torch."""


class CacheOverflowParameters(RoutedParameters):
    experts: int = Field(128, ge=2, le=1024)
    capacity: int = Field(32, ge=1, le=1024, description="slots")
    top_k: int = Field(8, ge=1, le=64)
    tokens: int = Field(256, ge=1, le=8192, description="of the prefill")
    prefills: int = Field(2, ge=1, le=16, description="one after another through the same cache")
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.capacity >= min(self.experts, self.tokens * self.top_k):
            yield f"capacity: {self.capacity} slots hold every expert that the call can need"


def _list_overheads(rows: Sequence[Mapping[str, Any]], suffix: str = "") -> str:
    return ", ".join(f"{row['groups']} groups {row[f'overhead{suffix}']:+.1%}" for row in rows)


def _list_microseconds(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(f"{row[key]:.0f}" for row in rows)


@claim("group_cost", measure=f"{_BENCH}:compare_upstream_groups", thresholds=("tolerance",), needs_gpu=True)
def judge_group_cost(cases: ClaimCases) -> ClaimJudgement:
    """With vLLM's kernel, each number of groups has the overhead that the PR measured, within a tolerance.

    CUDA-graph replays decide. An overhead in percent depends on how long one call is, so the time that a
    group adds is shown beside the PR's. Eager calls are shown too: most of their time is the host's launches.
    """
    (measured,) = cases.evidence()
    rows = [
        {**row, "pr_us_a_further_group": PR_OVERHEAD[row["groups"]] * PR_LAYER_US / (row["groups"] - 1)}
        for row in measured["rows"]
    ]
    return decide(
        cases.keeps("tolerance", (abs(row["overhead"] - PR_OVERHEAD[row["groups"]]) for row in rows)),
        {**measured, "rows": rows},
        f"{_list_overheads(rows)} with {measured['kernel']}, {measured['experts']} experts, "
        f"CUDA-graph replays; eager calls by the wall clock {_list_overheads(rows, EAGER)}. "
        f"A further group adds {_list_microseconds(rows, 'us_a_further_group')} µs "
        f"(eager {_list_microseconds(rows, f'us_a_further_group{EAGER}')}); "
        f"the PR's {_list_microseconds(rows, 'pr_us_a_further_group')} µs, to a call of {PR_LAYER_US:.0f} µs",
    )


@claim("cold_swap", measure=f"{_BENCH}:measure_cold_swap", thresholds=("min_share",), needs_gpu=True)
def judge_cold_swap(cases: ClaimCases) -> ClaimJudgement:
    """The transfer of its bytes at the bandwidth of pinned copies is most of a cold call."""
    (measured,) = cases.evidence()
    rows = measured["rows"]
    figure = "; ".join(
        f"{row['way']}: {row['gigabytes_per_second']:.1f} GB/s, {row['transfer_share']:.0%} of the call"
        for row in rows
    )
    figure += (
        f" would be the transfer at the measured pinned bandwidth, "
        f"{measured['pinned_gigabytes_per_second']:.1f} GB/s"
    )
    return decide(cases.keeps("min_share", (row["transfer_share"] for row in rows)), measured, figure)


@claim("published_table")
def judge_published_table(cases: ClaimCases) -> ClaimJudgement:
    """Leave the claim open: neither the pull request's cache in an engine nor that GPU is here."""
    return untested(
        "the figures are those of the pull request's own cache on an RTX PRO 6000; neither is run here, "
        "and another cache or GPU cannot decide them"
    )


class CacheOverflowFault(Fault):
    """Silently wrong tokens if a call needs more experts than there are slots."""

    id = "MD007"
    parameters = CacheOverflowParameters
    summary = "E={experts} C={capacity} K={top_k} T={tokens}"
    claims = (judge_group_cost, judge_cold_swap, judge_published_table)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        rows, wrong = evidence["rows"], evidence["wrong_rows"]
        needs = f"{evidence['needed']} experts for {case.parameters['capacity']} slots"
        if wrong:
            figure = (
                f"{needs}: {wrong} of {rows} tokens wrong, by up to {find_worst(evidence['worst_error']):.0%}"
            )
            return Judgement(CaseVerdict.REPRODUCED, figure)
        if not evidence["refused"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{needs}, and no error")
        return Judgement(
            CaseVerdict.CLEAN, f"{needs}: refused; in {evidence['groups']} groups 0 of {rows} tokens wrong"
        )
