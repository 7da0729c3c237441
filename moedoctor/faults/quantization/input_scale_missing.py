"""MD015: input_scale zero or absent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.quantization.checkpoint_fault import CheckpointFault
from moedoctor.faults.quantization.input_scale_missing_claims import CLAIMS
from moedoctor.interfaces import Judgement
from moedoctor.results import Case, CaseVerdict, Evidence, Observation

WORSE = 1.5
"""A token that is off by so many times what the healthy checkpoint's worst token is off is wrong."""


class InputScaleMissingParameters(BaseModel):
    """One damaged checkpoint, and how a backend takes the scales of its experts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    damage: Literal["zero", "all_zero", "absent", "all_absent"] = Field(
        "zero", description="one expert's input scales, or all of the layer's"
    )
    memory: Literal["zero", "large", "small", "nan"] | None = Field(
        None, description="what the memory held that is allocated for a scale which then is not loaded"
    )
    taken: Literal["per_expert", "max"] = Field(
        "per_expert", description="each expert's own, as VLLM_CUTLASS, or the largest, as FlashInfer"
    )
    tokens: int = Field(16, ge=4, le=1024)
    hidden: int = Field(256, ge=64, le=4096, multiple_of=64)
    intermediate: int = Field(128, ge=64, le=4096, multiple_of=64)
    experts: int = Field(4, ge=2, le=64)
    seed: int = Field(0, ge=0)
    moe_backend: Literal["emulation"] | None = Field(
        None, description="real engines with this backend instead, on a checkpoint that is damaged so"
    )

    @model_validator(mode="after")
    def _fits(self) -> InputScaleMissingParameters:
        if ("absent" in self.damage) != (self.memory is not None):
            raise ValueError("memory: only a scale that is absent leaves what the memory held; give it there")
        harmless = self.damage == "zero" or (self.damage == "absent" and self.memory in ("zero", "small"))
        if self.taken == "max" and harmless:
            raise ValueError("taken: the largest scale is a good one here; nothing goes wrong")
        return self


class InputScaleMissing(CheckpointFault):
    """The reciprocal of an input scale that is zero or was never loaded."""

    id = "MD015"
    parameters = InputScaleMissingParameters
    claims = CLAIMS

    def damaged(self, case: Case) -> Any:
        from moedoctor.faults.quantization.input_scale_missing_lab import unchecked

        return unchecked

    def repaired(self, case: Case) -> Any:
        from moedoctor.faults.quantization.input_scale_missing_lab import checked

        return checked

    def measure(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.quantization.input_scale_missing_lab import observe

        return observe(self.parameters.model_validate(dict(case.parameters)), implementation)

    def judge_tensors(self, seen: Evidence) -> Judgement:
        if seen["nonfinite_tokens"]:
            figure = f"{seen['nonfinite_tokens']} of {seen['tokens']} tokens are NaN or Inf"
            return Judgement(CaseVerdict.REPRODUCED, figure)
        figure = f"worst token off by {seen['error']:.0%}, {seen['healthy_error']:.0%} with good scales"
        if seen["error"] > WORSE * seen["healthy_error"]:
            return Judgement(CaseVerdict.REPRODUCED, figure)
        return Judgement(CaseVerdict.CLEAN, figure)

    def describe(self, parameters: Any) -> str:
        if parameters["moe_backend"] is not None:
            return f"vLLM with {parameters['moe_backend']}"
        memory = f", memory held {parameters['memory']}" if parameters["memory"] else ""
        return f"{parameters['damage'].replace('_', ' ')}{memory}, taken {parameters['taken']}"
