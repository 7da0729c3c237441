"""MD029: a LoRA adapter on experts whose names or layout a release does not apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from moedoctor.diagnose.checkpoint.adapter_layout import Layout
from moedoctor.faults.base import Parameters
from moedoctor.faults.loading.loading import LoadingFault
from moedoctor.results import Scalar, Tier

Mistake = Literal["other_layout", "gate_and_up_alone", "missing_expert", "missing_part"]


class ExpertLoraParameters(Parameters):
    reads: Layout = Field("each", description="the layout that the model reads; stacked: is_3d_moe_weight")
    mistake: Mistake = Field("other_layout", description="what the adapter's file has")
    hidden: int = Field(256, ge=64, le=1024, multiple_of=64)
    intermediate: int = Field(128, ge=64, le=1024, multiple_of=64)
    experts: int = Field(4, ge=2, le=16)
    rank: int = Field(8, ge=1, le=64)
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.reads == "stacked" and self.mistake.startswith("missing"):
            yield "mistake: one tensor holds all experts; expected reads 'each'"


class ExpertLora(LoadingFault):
    """A manager of adapters that stops, or that leaves out what finds no module."""

    id = "MD029"
    parameters = ExpertLoraParameters
    summary = "{mistake}, the model reads {reads}"

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """At the tier library, return False for models that read stacked adapters: Qwen3-MoE is asked."""
        return tier is Tier.MODEL or parameters["reads"] == "each"
