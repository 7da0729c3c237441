"""MD027: a shared expert whose parts are added twice, not at all, or though each is the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from moedoctor.faults.base import CountFault, RoutedParameters


class SharedExpertParallelParameters(RoutedParameters):
    """One point of the matrix: a layer with a shared expert on several ranks."""

    mistake: Literal["reduced_twice", "one_shard", "whole_added"] = Field(
        "reduced_twice",
        description="the shared part is reduced by itself and again with the sum; is one shard of a rank's "
        "own tokens; or is whole on each rank and added up",
    )
    ranks: int = Field(2, ge=2, le=8)
    tokens: int = Field(16, ge=2, le=1024)
    hidden: int = Field(16, ge=1, le=256)
    intermediate: int = Field(16, ge=2, le=256)
    experts: int = Field(8, ge=1, le=64)
    top_k: int = Field(2, ge=1, le=8)
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        for name in ("tokens", "intermediate"):
            if getattr(self, name) % self.ranks:
                yield f"{name}: {getattr(self, name)} is no multiple of ranks {self.ranks}"


class SharedExpertParallel(CountFault):
    """A shared expert that counts for more or less than once."""

    id = "MD027"
    parameters = SharedExpertParallelParameters
    summary = "{mistake} on {ranks} ranks"
    restated_on_cpu = True
    symptoms: ClassVar = {
        "rows_wrong": "{} of {rows} rows differ from one rank's, the shared part counts {times:.2g} times"
    }
    right = "{rows} of {rows} rows are those of one rank"
