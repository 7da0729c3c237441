"""MD021: expert tensors under names or in a layout that a release does not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import Parameters
from moedoctor.faults.loading.loading import LoadingFault
from moedoctor.results import Scalar, Tier

Mistake = Literal["gate_renamed", "other_family", "numbered", "one_tensor", "one_tensor_renamed"]


class ExpertNamesParameters(Parameters):
    mistake: Mistake = Field("gate_renamed", description="how the checkpoint names its experts")
    loader: Literal["0.21.0", "0.33.0"] = Field("0.33.0", description="whose loader the control restates")
    hidden: int = Field(256, ge=64, le=1024, multiple_of=64)
    intermediate: int = Field(128, ge=64, le=1024, multiple_of=64)
    experts: int = Field(4, ge=2, le=16)
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.mistake == "one_tensor" and self.loader == "0.33.0":
            yield "mistake: vLLM 0.33.0 reads one_tensor; expected loader '0.21.0'"


class ExpertNames(LoadingFault):
    """A table of names that skips a tensor, or makes a name of a parameter that does not exist."""

    id = "MD021"
    parameters = ExpertNamesParameters
    summary = "{mistake}, loader of {loader}"
    lab = "moedoctor.faults.loading.expert_names_lab"

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """Return False for the second question to one installed release about the same checkpoint."""
        return tier is Tier.MODEL or parameters["loader"] == "0.33.0"
