"""MD002: asynchronous copies whose memory is used again too early, with pinned memory and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, Parameters, claim, decide, list_tiers, untested
from moedoctor.interfaces import ClaimJudgement, Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Crash, Death, Evidence, Observation, Scalar, Tier

CELLS = ("pinned_idle", "pinned_busy", "pageable_idle", "pageable_busy")
"""Columns of the hazard matrix: kind of host memory, and whether work is queued before the copy."""
LAB = "moedoctor.faults.offload.unpinned_copy_lab"
PAGEABLE, STALE = "pageable weights", "stale parameter"
"""Units of the claim: kernels behind copies from pageable memory; a kernel that gets a host address."""


class UnpinnedCopyParameters(Parameters):
    """One point of the matrix; each measures all of `CELLS`."""

    direction: Literal["h2d", "d2h"] = "h2d"
    bytes: int = Field(65_536, ge=64, le=1 << 28, description="of one copy")
    copies: int = Field(16, ge=1, le=1000, description="copies a cell")


@claim(
    "crash_3",
    measure=f"{LAB}:measure_crash_3",
    units=lambda subjects: (PAGEABLE, STALE),
    needs_gpu=True,
    thresholds=("max_wrong",),
)
def judge_crash_3(given: ClaimCases) -> ClaimJudgement:
    """A copy from pageable memory is used too early, or its weights give wrong results or a crash.

    A refutation also names what a host address does to a kernel instead.
    """
    outcomes = {measurement.unit: measurement.outcome for measurement in given.measurements}
    copies, host_address = outcomes[PAGEABLE], outcomes[STALE]
    if isinstance(copies, Crash):
        return decide(True, {"died": copies.message}, "the copies themselves ended the process")
    if not isinstance(copies, Observation):
        return untested(copies.reason)
    matrix = given.select(subject="faulty", tier=Tier.KERNEL)
    wrong = copies.evidence["wrong_results"]
    early = sum(case.evidence["pageable_idle"] + case.evidence["pageable_busy"] > 0 for case in matrix)
    evidence: dict[str, Any] = {
        **copies.evidence,
        "cells_with_early_pageable_copies": early,
        "cases": len(matrix),
        "host_address_given_to_a_kernel": (
            host_address.message if isinstance(host_address, Crash) else "no crash"
        ),
    }
    if early or not given.keeps("max_wrong", wrong):
        return decide(True, evidence, f"{wrong} results were wrong, {early} cells early")
    whose, passes = copies.evidence["whose"], copies.evidence["passes"]
    reason = f"0 of {passes} passes over unpinned weights were wrong or crashed ({whose})"
    if whose == "restated" or not copies.evidence["weights_on_host"]:
        return untested(f"{reason}; vLLM's own offloader did not run over unpinned weights here", evidence)
    if isinstance(host_address, Crash) and host_address.death is Death.ILLEGAL_MEMORY_ACCESS:
        cause = "a kernel that gets the host address of a stale parameter dies of exactly that error (MD020)"
    else:
        cause = "the cause was not seen here"
    return decide(False, evidence, f"{reason}; {cause}")


class UnpinnedCopy(Fault):
    """Host memory is overwritten, or read, right after an asynchronous copy was asked for."""

    id = "MD002"
    parameters = UnpinnedCopyParameters
    tiers = list_tiers(Tier.MODEL, Tier.KERNEL)
    summary = "{direction} of {bytes} bytes"
    restated_on_cpu = True
    claims = (judge_crash_3,)

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """A simulated copy is late at any size, so the large ones run on a GPU only."""
        return tier is not Tier.MODEL or int(parameters["bytes"] or 0) <= 65_536

    def judge(self, case: Case, observation: Observation) -> Judgement:
        stale = {name: observation.evidence[name] for name in CELLS if observation.evidence[name] > 0}
        if stale:
            cells = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in stale.items())
            return Judgement(CaseVerdict.REPRODUCED, f"stale: {cells}")
        return Judgement(CaseVerdict.CLEAN, "no stale copy in any cell")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return the hazard matrix: share of stale copies by direction, size and cell, of the control."""
        rows = [
            {
                "tier": case.tier.value,
                "direction": case.parameters["direction"],
                "bytes": case.parameters["bytes"],
                **{name: case.evidence[name] for name in CELLS},
            }
            for case in results
            if case.subject == "faulty" and "pinned_busy" in case.evidence
        ]
        return {"hazards_without_waiting": rows} if rows else {}
