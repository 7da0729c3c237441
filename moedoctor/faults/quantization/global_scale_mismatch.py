"""MD014: w1 and w3 have different weight_scale_2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import Judgement, Parameters
from moedoctor.faults.quantization.checkpoint import CheckpointFault, MoeBackend
from moedoctor.results import CaseVerdict, Evidence, find_worst

ROUNDING = 1 / 16
"""Largest error that rounding a block scale to E4M3 again can make."""


class GlobalScaleMismatchParameters(Parameters):
    """One checkpoint and one way to merge the two scales."""

    ratio: float = Field(2.0, gt=0.001, le=1000, description="global scale of the up half over the gate's")
    merged: Literal["gate", "max"] = Field(
        "gate", description="the one scale that is kept: vLLM's choice, or the one reported of other engines"
    )
    tokens: int = Field(16, ge=1, le=1024)
    hidden: int = Field(256, ge=64, le=4096, multiple_of=64)
    intermediate: int = Field(128, ge=64, le=4096, multiple_of=64)
    experts: int = Field(4, ge=1, le=64)
    seed: int = Field(0, ge=0)
    moe_backend: MoeBackend = None

    def problems(self) -> Iterator[str]:
        least = 2 * ROUNDING
        if abs(self.ratio - 1) < least:
            yield f"ratio: must differ from 1 by {least} or more, or rounding hides it, not {self.ratio}"


class GlobalScaleMismatch(CheckpointFault):
    """One global scale for two halves that were quantized with their own."""

    id = "MD014"
    parameters = GlobalScaleMismatchParameters
    restated_on_cpu = True
    summary = "up/gate scale {ratio:g}, kept: {merged}"

    def judge_tensors(self, evidence: Evidence) -> Judgement:
        errors = {name: find_worst(way["worst_token_error"]) for name, way in evidence["ways"].items()}
        figure = ", ".join(f"{name}: output off by {error:.1%}" for name, error in errors.items())
        wrong = find_worst(*errors.values()) > ROUNDING
        return Judgement(CaseVerdict.REPRODUCED if wrong else CaseVerdict.CLEAN, figure)
