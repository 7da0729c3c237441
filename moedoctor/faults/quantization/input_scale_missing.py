"""MD015: input_scale zero or absent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from moedoctor.faults.base import Judgement, Parameters
from moedoctor.faults.quantization.checkpoint import CheckpointFault
from moedoctor.results import CaseVerdict, Evidence, find_worst

WORSE = 1.5
"""A token is wrong if its error is more than this times the largest error with the whole checkpoint."""


class InputScaleMissingParameters(Parameters):
    """One damaged checkpoint, and how a backend takes the scales of its experts."""

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
        None, description="run real engines with this backend on the damaged checkpoint instead"
    )

    def problems(self) -> Iterator[str]:
        if ("absent" in self.damage) != (self.memory is not None):
            yield "memory: only a scale that is absent leaves what the memory held; give it there"
        harmless = self.damage == "zero" or (self.damage == "absent" and self.memory in ("zero", "small"))
        if self.taken == "max" and harmless:
            yield "taken: the largest scale is a good one here; nothing goes wrong"


class InputScaleMissing(CheckpointFault):
    """The reciprocal of an input scale that is zero or was never loaded."""

    id = "MD015"
    parameters = InputScaleMissingParameters
    restated_on_cpu = True
    summary = "{damage}{memory}, taken {taken}"

    def judge_tensors(self, evidence: Evidence) -> Judgement:
        if evidence["nonfinite_tokens"]:
            figure = f"{evidence['nonfinite_tokens']} of {evidence['tokens']} tokens are NaN or Inf"
            return Judgement(CaseVerdict.REPRODUCED, figure)
        error, healthy = find_worst(evidence["error"]), find_worst(evidence["healthy_error"])
        if not math.isfinite(healthy):
            return Judgement(CaseVerdict.ERROR, "nothing to judge", "not finite with good scales either")
        figure = f"worst token off by {error:.0%}, {healthy:.0%} with good scales"
        wrong = error > WORSE * healthy
        return Judgement(CaseVerdict.REPRODUCED if wrong else CaseVerdict.CLEAN, figure)

    def describe(self, parameters: Mapping[str, Any]) -> str:
        memory = f", memory held {parameters['memory']}" if parameters["memory"] else ""
        damage = parameters["damage"].replace("_", " ")
        return super().describe({**parameters, "damage": damage, "memory": memory})
