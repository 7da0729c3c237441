"""MD017: gate and up halves swapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import RoutedParameters, list_tiers
from moedoctor.faults.quantization.checkpoint import CheckpointFault, MoeBackend
from moedoctor.results import Tier


class GateUpOrderParameters(RoutedParameters):
    """One layer, handed to a kernel that reads the up half first."""

    quantization: Literal["nvfp4", "fp8", "bf16"] = "nvfp4"
    mistake: Literal["not_swapped", "only_values", "only_scales"] = Field(
        "not_swapped", description="what the loader forgot; block scales exist in nvfp4 alone"
    )
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tokens: int = Field(9, ge=1, le=1024)
    hidden: int = Field(256, ge=128, le=4096, multiple_of=128)
    intermediate: int = Field(128, ge=128, le=4096, multiple_of=128)
    experts: int = Field(8, ge=2, le=128)
    top_k: int = Field(2, ge=1, le=16)
    seed: int = Field(0, ge=0)
    moe_backend: MoeBackend = None

    def problems(self) -> Iterator[str]:
        if self.mistake != "not_swapped" and self.quantization != "nvfp4":
            yield f"mistake: {self.quantization} has no block scales; expected not_swapped"


class GateUpOrder(CheckpointFault):
    """A kernel that reads ``[up; gate]`` given ``[gate; up]``."""

    id = "MD017"
    parameters = GateUpOrderParameters
    tiers = list_tiers(Tier.MODEL, Tier.ENGINE, installed=Tier.LIBRARY)
