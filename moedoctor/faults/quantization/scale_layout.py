"""MD018: block scales linear where swizzled are expected, or the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import RoutedParameters, list_tiers
from moedoctor.faults.quantization.checkpoint import CheckpointFault, MoeBackend
from moedoctor.results import Tier


class ScaleLayoutParameters(RoutedParameters):
    """One NVFP4 layer and a kernel that reads its block scales in one order."""

    mistake: Literal["linear_given", "swizzled_given", "stale_padding"] = Field(
        "linear_given",
        description="linear scales to a kernel of tiles, tiles to a linear one, or NaN left in the padding",
    )
    activation: Literal["silu", "relu2"] = "silu"
    tokens: int = Field(9, ge=1, le=1024)
    hidden: int = Field(256, ge=64, le=4096, multiple_of=32)
    intermediate: int = Field(128, ge=64, le=4096, multiple_of=32)
    experts: int = Field(8, ge=2, le=128)
    top_k: int = Field(2, ge=1, le=16)
    seed: int = Field(0, ge=0)
    moe_backend: MoeBackend = None

    def problems(self) -> Iterator[str]:
        if self.mistake == "stale_padding" and (self.hidden // 16) % 4 == 0:
            yield "hidden: stale_padding needs padded columns; expected no multiple of 64"


class ScaleLayout(CheckpointFault):
    """Both layouts have the same shape and type, so nothing notices."""

    id = "MD018"
    together = 4
    parameters = ScaleLayoutParameters
    tiers = list_tiers(Tier.MODEL, Tier.ENGINE, installed=Tier.KERNEL)
