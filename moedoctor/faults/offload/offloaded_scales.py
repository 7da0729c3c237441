"""MD003: quantization scales offloaded off the GPU: "b_scales is not on GPU"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, EngineFault, Parameters, claim, decide, list_tiers, untested
from moedoctor.faults.offload import engine_table
from moedoctor.interfaces import ClaimJudgement, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier
from moedoctor.upstream.engine.experiment import Outcome
from moedoctor.upstream.engine.offload_table import CONTROLS, COPIES

_CELL = ("backend", "mode", "experts")
"""The keys of a cell in the table of vllm#37883."""


class OffloadedScalesParameters(Parameters):
    layers: int = Field(4, ge=3, le=64)
    seed: int = Field(0, ge=0)
    engine: Literal["eager", "compiled"] | None = Field(
        None, description="real engines in this mode instead: the table of vllm#37883"
    )


@claim("marlin_refuses")
def judge_marlin_refuses(given: ClaimCases) -> ClaimJudgement:
    """vLLM's own Marlin operator refuses scales in host memory, with this message."""
    errors = [str(case.evidence["error"]) for case in _select_kernel_cases(given, "host memory")]
    if not errors:
        return untested("vLLM's Marlin operator did not run here")
    messages = sorted(set(errors))
    holds = all("b_scales is not on GPU" in message for message in messages)
    return decide(holds, {"errors": messages, "runs": len(errors)}, "; ".join(messages))


@claim("stale_reference")
def judge_stale_reference(given: ClaimCases) -> ClaimJudgement:
    """The config's reference is the cause: with it in device memory Marlin runs, weights offloaded."""
    stale, fresh = (_select_kernel_cases(given, place) for place in ("host memory", "device memory"))
    if not stale or not fresh:
        return untested("vLLM's Marlin operator did not run here with both")
    holds = all(case.evidence["error"] for case in stale) and all(
        case.evidence["same_bits"] for case in fresh
    )
    reason = (
        "with the scales' parameter in host memory it refuses, although forward runs with copies on the GPU;"
        " with it in device memory it gives the same bits, although the weights are offloaded"
        if holds
        else "the place of the config's scales did not decide it"
    )
    return decide(holds, {"stale": len(stale), "fresh": len(fresh)}, reason)


def _select_kernel_cases(given: ClaimCases, holds: str) -> list[CaseResult]:
    cases = given.select(tier=Tier.KERNEL, has="config_holds")
    return [case for case in cases if case.evidence["config_holds"] == holds]


@claim("marlin_crashes")
def judge_marlin_crashes(given: ClaimCases) -> ClaimJudgement:
    """NVFP4 on Marlin crashes without UVA in vLLM as it is, eager and compiled."""
    cells = [
        row
        for case in given.select(subject="faulty", tier=Tier.ENGINE, has="table")
        for row in case.evidence["table"]
        if row["experts"] == COPIES and row["backend"] == "NVFP4 MARLIN"
    ]
    if any(Outcome(row["outcome"]) is Outcome.NO_OFFLOAD for row in cells):
        return untested("an engine offloaded nothing")
    if not cells:
        return untested("no engine ran")
    missing = [mode for mode in ("eager", "compiled") if all(row["mode"] != mode for row in cells)]
    if missing:
        return untested(f"no engine ran {missing[0]}")
    crashed = sum(Outcome(row["outcome"]).crashed for row in cells)
    evidence = {
        "combinations": len(cells),
        "crashed": crashed,
        "cells": [{"mode": row["mode"], "outcome": describe_outcome(row)} for row in cells],
    }
    return decide(crashed == len(cells), evidence, f"{crashed} of {len(cells)} combinations crash")


def judge_config(evidence: Evidence, error: str) -> Judgement:
    """Judge a run whose kernel reads the scales that the config holds. `error`: what to call its error."""
    place = f"the config holds {evidence['config_holds']}"
    if evidence["error"]:
        return Judgement(CaseVerdict.REPRODUCED, f"{error}; {place}")
    if not evidence["same_bits"]:
        return Judgement(CaseVerdict.REPRODUCED, f"runs, and gives other numbers; {place}")
    return Judgement(CaseVerdict.CLEAN, f"the same bits as without offload; {place}")


class OffloadedScales(EngineFault):
    """A kernel gets the scales that the quantization config kept, and checks where they are."""

    id = "MD003"
    parameters = OffloadedScalesParameters
    tiers = list_tiers(Tier.MODEL, Tier.KERNEL, Tier.ENGINE, vllm=Tier.KERNEL)
    summary = "{layers} quantized MoE layers"
    restated_on_cpu = True
    claims = (judge_marlin_refuses, judge_stale_reference, judge_marlin_crashes)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        if case.tier is Tier.ENGINE:
            return engine_table.judge(evidence)
        return judge_config(evidence, str(evidence["error"]))

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return the table of vllm#37883 if engines ran: each cell once, without the fix and with it."""
        rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        for case in results:
            if case.tier is not Tier.ENGINE:
                continue
            column = "without_fix" if case.subject == "faulty" else "with_fix"
            for row in case.evidence.get("table", ()):
                key = {name: row[name] for name in _CELL}
                rows.setdefault(tuple(key.values()), key)[column] = describe_outcome(row)
        table = [row for row in rows.values() if row["experts"] not in CONTROLS]
        return {"table_of_vllm_37883": table} if rows else {}


_LONG_DETAIL = (Outcome.OTHER, Outcome.ROUNDING, Outcome.NO_OFFLOAD, Outcome.NO_FIX, Outcome.NO_CONTROL)


def describe_outcome(row: Mapping[str, Any]) -> str:
    """Return a cell's outcome with its detail, shortened if that may be an error."""
    outcome = Outcome(row["outcome"])
    if outcome.crashed or outcome in _LONG_DETAIL:
        return f"{outcome.value}: {row['detail']}"[:110]
    return f"{outcome.value}, {row['detail']}"
