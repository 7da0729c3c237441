"""MD012: an FP8 KV cache is declared and the checkpoint ships no scales for it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.faults.quantization.checkpoint_fault import CheckpointFault
from moedoctor.faults.quantization.kv_scales_missing_claims import CLAIMS
from moedoctor.interfaces import ClaimTest, Judgement
from moedoctor.results import Case, CaseVerdict, Evidence, Observation

WORSE = 2.0
"""An output that is off by so many times what a cache with computed scales is off has lost its numbers."""
FLOOR = 0.01


class KvScalesMissingParameters(BaseModel):
    """One checkpoint whose attention has keys or values of some size."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    part: Literal["keys", "values", "both"] = Field("both", description="which of them have the size given")
    size: float = Field(1.0, ge=1e-6, le=1e6, description="the largest of them, as measured on the batch")
    tokens: int = Field(32, ge=2, le=1024)
    hidden: int = Field(128, ge=64, le=4096, multiple_of=64)
    seed: int = Field(0, ge=0)
    moe_backend: Literal["marlin", "emulation"] | None = Field(
        None, description="real engines with this backend instead, on a checkpoint that is damaged so"
    )


class KvScalesMissing(CheckpointFault):
    """A scale of 1.0 for an FP8 cache, whatever the keys and values are."""

    id = "MD012"
    parameters = KvScalesMissingParameters
    claims: tuple[ClaimTest, ...] = CLAIMS

    def damaged(self, case: Case) -> Any:
        from moedoctor.faults.quantization.kv_scales_missing_lab import one

        return one

    def repaired(self, case: Case) -> Any:
        from moedoctor.fixes.moe.checkpoint_scales import kv_scale

        return kv_scale

    def measure(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.quantization.kv_scales_missing_lab import observe

        return observe(self.parameters.model_validate(dict(case.parameters)), implementation)

    def ask_engines(self, moe_backend: str, repaired: bool) -> Observation:
        from moedoctor.faults.quantization.kv_scales_missing_engine import observe

        return observe(moe_backend, repaired)

    def judge_engines(self, seen: Evidence) -> Judgement:
        from moedoctor.faults.quantization.kv_scales_missing_engine import judge

        return judge(seen)

    def judge_tensors(self, seen: Evidence) -> Judgement:
        if seen["nonfinite_tokens"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{seen['nonfinite_tokens']} tokens are NaN or Inf")
        figure = (
            f"attention off by {seen['error']:.1%} ({seen['computed_error']:.1%} with computed scales), "
            f"{seen['saturated']:.1%} saturated, {seen['lost']:.1%} lost"
        )
        if seen["error"] > max(FLOOR, WORSE * seen["computed_error"]):
            return Judgement(CaseVerdict.REPRODUCED, figure)
        return Judgement(CaseVerdict.CLEAN, figure)

    def describe(self, parameters: Any) -> str:
        if parameters["moe_backend"] is not None:
            return f"vLLM with {parameters['moe_backend']}"
        return f"{parameters['part']} up to {parameters['size']:g}"
