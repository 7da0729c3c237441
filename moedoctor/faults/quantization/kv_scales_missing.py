"""MD012: an FP8 KV cache is declared and the checkpoint ships no scales for it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, ClaimJudgement, Judgement, Parameters, claim, decide, untested
from moedoctor.faults.quantization.checkpoint import CheckpointFault, MoeBackend
from moedoctor.results import CaseVerdict, Evidence, find_worst

WORSE, FLOOR = 2.0, 0.01
"""Attention has lost its numbers if its error is more than `FLOOR` and more than `WORSE` times the error with
computed scales."""
ENGINE_WORSE, ENGINE_FLOOR = 2.5, 0.1
"""The same for the share of probability that moves: more than rounding if it is more than `ENGINE_FLOOR` and
more than `ENGINE_WORSE` times the share that moves in the control."""
BLUNT = 0.35
"""If rounding alone moves so much of the probability, nothing can be decided."""


class KvScalesMissingParameters(Parameters):
    """One checkpoint whose attention has keys or values of some size."""

    part: Literal["keys", "values", "both"] = Field("both", description="which of them have the size given")
    size: float = Field(1.0, ge=1e-6, le=1e6, description="the largest of them, as measured on the batch")
    tokens: int = Field(32, ge=2, le=1024)
    hidden: int = Field(128, ge=64, le=4096, multiple_of=64)
    seed: int = Field(0, ge=0)
    moe_backend: MoeBackend = None


@claim("triton_garbage", thresholds=("min_ratio",))
def judge_triton_garbage(cases: ClaimCases) -> ClaimJudgement:
    """TRITON_ATTN gives garbage even if the checkpoint has scales, in the cases that asked engines."""
    engines = [case.evidence["triton_attn"] for case in cases.select(has="triton_attn")]
    doubts = [reason for engine in engines if (reason := find_doubt(engine)) is not None]
    if doubts or not engines:
        return untested(doubts[0] if doubts else "no engine ran")
    holds = all(
        engine["tested_distance"] > max(ENGINE_FLOOR, cases.limits["min_ratio"] * engine["control_distance"])
        for engine in engines
    )
    figure = "; ".join(
        f"vLLM {engine['vllm']}, {engine['moe_backend']}: {engine['tested_distance']:.0%} of the probability "
        f"is moved with the right scales, {engine['control_distance']:.0%} with scales of 1.0 that fit"
        for engine in engines
    )
    return decide(holds, {"engines": engines}, figure)


def find_doubt(evidence: Evidence) -> str | None:
    """Return why the figures of engines decide nothing, or None."""
    for name, message in evidence["errors"].items():
        return f"the {name} engine failed: {message}"
    for name in ("reference", "control", "tested"):
        types = {str(layer["dtype"]) for layer in evidence["kv_cache"][name] or ()}
        if not types or any(dtype.startswith("fp8") == (name == "reference") for dtype in types):
            return f"the {name} engine has a KV cache of {', '.join(sorted(types)) or 'unknown type'}"
    if evidence["tested_distance"] is None or evidence["control_distance"] is None:
        return "no logprobs came back"
    if evidence["control_distance"] > BLUNT:
        return f"an FP8 cache alone moves {evidence['control_distance']:.0%} of the probability"
    return None


class KvScalesMissing(CheckpointFault):
    """A scale of 1.0 for an FP8 cache, whatever the size of keys and values."""

    id = "MD012"
    parameters = KvScalesMissingParameters
    restated_on_cpu = True
    summary = "{part} up to {size:g}"
    claims = (judge_triton_garbage,)

    def judge_tensors(self, evidence: Evidence) -> Judgement:
        if evidence["nonfinite_tokens"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{evidence['nonfinite_tokens']} tokens are NaN or Inf")
        error, computed = find_worst(evidence["error"]), find_worst(evidence["computed_error"])
        if not math.isfinite(computed):
            return Judgement(CaseVerdict.ERROR, "nothing to judge", "not finite with computed scales either")
        figure = (
            f"attention off by {error:.1%} ({computed:.1%} with computed scales), "
            f"{evidence['saturated']:.1%} saturated, {evidence['lost']:.1%} lost"
        )
        wrong = error > max(FLOOR, WORSE * computed)
        return Judgement(CaseVerdict.REPRODUCED if wrong else CaseVerdict.CLEAN, figure)

    def judge_engines(self, evidence: Evidence) -> Judgement:
        """Judge what the lab's `engine` gave; an engine that stops, or has another cache, decides nothing."""
        reason = find_doubt(evidence)
        if reason is not None:
            return Judgement(CaseVerdict.ERROR, "nothing to judge", reason)
        distance, control = evidence["tested_distance"], evidence["control_distance"]
        scales = evidence["kv_cache"]["tested"][0]
        figure = (
            f"{distance:.0%} of the probability is moved, {control:.0%} by an FP8 cache alone; scales "
            f"{scales['k_scale']:.4g} and {scales['v_scale']:.4g}"
        )
        wrong = distance > max(ENGINE_FLOOR, ENGINE_WORSE * control)
        return Judgement(CaseVerdict.REPRODUCED if wrong else CaseVerdict.CLEAN, figure)
