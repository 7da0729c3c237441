"""MD014: w1 and w3 have different weight_scale_2."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moedoctor.faults.quantization.checkpoint_fault import CheckpointFault
from moedoctor.interfaces import Judgement
from moedoctor.results import Case, CaseVerdict, Evidence, Observation

ROUNDING = 1 / 16
"""What rounding a block scale to E4M3 again can change; an error above it is no rounding."""


class GlobalScaleMismatchParameters(BaseModel):
    """One checkpoint and one way to merge the two scales."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ratio: float = Field(2.0, gt=0.001, le=1000, description="global scale of the up half over the gate's")
    merged: Literal["gate", "max"] = Field(
        "gate", description="the one scale that is kept: vLLM's choice, or the one reported of other engines"
    )
    tokens: int = Field(16, ge=1, le=1024)
    hidden: int = Field(256, ge=64, le=4096, multiple_of=64)
    intermediate: int = Field(128, ge=64, le=4096, multiple_of=64)
    experts: int = Field(4, ge=1, le=64)
    seed: int = Field(0, ge=0)
    moe_backend: Literal["marlin", "emulation"] | None = Field(
        None, description="real engines with this backend instead, on a checkpoint that is damaged so"
    )

    @field_validator("ratio")
    @classmethod
    def _is_a_mismatch(cls, value: float) -> float:
        if abs(value - 1) < 2 * ROUNDING:
            raise ValueError(
                f"must differ from 1 by {2 * ROUNDING} or more, or rounding hides it, not {value}"
            )
        return value


class GlobalScaleMismatch(CheckpointFault):
    """One global scale for two halves that were quantised with their own."""

    id = "MD014"
    parameters = GlobalScaleMismatchParameters

    def damaged(self, case: Case) -> Any:
        from moedoctor.faults.quantization.global_scale_mismatch_lab import one_scale

        return {str(case.parameters["merged"]): one_scale(str(case.parameters["merged"]))}

    def repaired(self, case: Case) -> Any:
        from moedoctor.faults.quantization.global_scale_mismatch_lab import fold, rescale

        return {"rescaled": rescale, "folded": fold}

    def measure(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.quantization.global_scale_mismatch_lab import observe

        return observe(self.parameters.model_validate(dict(case.parameters)), implementation)

    def judge_tensors(self, seen: Evidence) -> Judgement:
        errors = {name: one["worst_token_error"] for name, one in seen["ways"].items()}
        worst = max(errors, key=lambda name: errors[name])
        figure = ", ".join(f"{name}: output off by {error:.1%}" for name, error in errors.items())
        if errors[worst] > ROUNDING:
            return Judgement(CaseVerdict.REPRODUCED, figure)
        return Judgement(CaseVerdict.CLEAN, figure)

    def describe(self, parameters: Any) -> str:
        if parameters["moe_backend"] is not None:
            return f"vLLM with {parameters['moe_backend']}"
        return f"up/gate scale {parameters['ratio']:g}, kept: {parameters['merged']}"
