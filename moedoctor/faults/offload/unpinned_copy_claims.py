"""What upstream says of crash 3 of vllm#37883, and what a GPU says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Crash, Death, Observation, Skip, Tier

PAGEABLE, STALE = "pageable weights", "stale parameter"
"""Units: kernels behind copies from pageable memory; a kernel that is given a host address."""


def judge_crash_3(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Whether a copy from pageable memory was ever used too early, and what a host address does instead."""
    outcomes = {one.unit: one.outcome for one in units}
    copies = outcomes.get(PAGEABLE)
    matrix = [one for one in cases if one.tier is Tier.KERNEL and one.subject == "faulty" and one.evidence]
    if not isinstance(copies, Observation):
        said = copies.reason if isinstance(copies, Skip) else "the copies themselves ended the process"
        verdict = ClaimVerdict.CONFIRMED if isinstance(copies, Crash) else ClaimVerdict.UNTESTED
        return ClaimJudgement(verdict, {"died": copies.message} if isinstance(copies, Crash) else {}, said)
    stale = copies.evidence["wrong_results"]
    early = sum(one.evidence["pageable_idle"] + one.evidence["pageable_busy"] > 0 for one in matrix)
    crash = outcomes.get(STALE)
    evidence: dict[str, Any] = {
        **copies.evidence,
        "cells_with_early_pageable_copies": early,
        "cases": len(matrix),
        "host_address_given_to_a_kernel": crash.message if isinstance(crash, Crash) else "no crash",
    }
    if stale > limits["max_wrong"] or early:
        said = f"{stale} results were wrong, {early} cells early"
        return ClaimJudgement(ClaimVerdict.CONFIRMED, evidence, said)
    whose, passes = copies.evidence["whose"], copies.evidence["passes"]
    seen = f"0 of {passes} passes over unpinned weights were wrong or crashed ({whose})"
    if whose == "restated" or not copies.evidence["weights_on_host"]:
        return ClaimJudgement(
            ClaimVerdict.UNTESTED,
            evidence,
            f"{seen}; vLLM's own offloader did not run over unpinned weights here",
        )
    died = isinstance(crash, Crash) and crash.death is Death.ILLEGAL_MEMORY_ACCESS
    cause = (
        "a kernel that is given the host address of a stale parameter dies of exactly that error (MD020)"
        if died
        else "what the cause is was not seen here"
    )
    return ClaimJudgement(ClaimVerdict.REFUTED, evidence, f"{seen}; {cause}")


def _measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    from moedoctor.faults.offload import unpinned_copy_probe

    if unit == PAGEABLE:
        return Observation(unpinned_copy_probe.pageable_weights(device))
    return Observation(unpinned_copy_probe.host_address(device))


CLAIMS = (
    ClaimTest(
        "crash_3",
        judge_crash_3,
        _measure,
        lambda subjects: (PAGEABLE, STALE),
        needs_gpu=True,
        thresholds=("max_wrong",),
    ),
)
