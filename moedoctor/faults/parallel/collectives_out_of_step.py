"""MD028: ranks that do not call the same collectives wait for each other."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from moedoctor.faults.base import CountFault, Parameters


class CollectivesOutOfStepParameters(Parameters):
    """One point of the matrix: a step of several data-parallel ranks."""

    way: Literal["idle_rank", "sizes_differ", "order_differs"] = Field(
        "idle_rank",
        description="the last rank has no tokens and returns early; pads to a size of its own; or splits its "
        "batch in two without asking",
    )
    ranks: int = Field(2, ge=2, le=8)
    layers: int = Field(2, ge=2, le=16)
    tokens: int = Field(6, ge=2, le=64, description="of the first rank; the others have fewer")
    seconds: float = Field(2.0, ge=0.5, le=60.0, description="limit of a collective")


class CollectivesOutOfStep(CountFault):
    """A hang, an assertion or wrong values, because one rank takes another path."""

    id = "MD028"
    parameters = CollectivesOutOfStepParameters
    summary = "{way} on {ranks} ranks"
    restated_on_cpu = True
    symptoms: ClassVar = {
        "ranks_waiting": "{} of {ranks} ranks wait until the limit; {named}",
        "ranks_stopped": "{} of {ranks} ranks stopped; {named}",
        "ranks_wrong": "{} of {ranks} ranks have wrong values",
    }
    right = "{ranks} of {ranks} ranks end with the right values"
