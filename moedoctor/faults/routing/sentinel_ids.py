"""MD016: topk_ids of -1 used as an index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.routing.sentinel_ids_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseVerdict, Observation, Scalar, Tier


class SentinelIdsParameters(BaseModel):
    """One point of the matrix: a batch in which some slots hold -1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    use: Literal["expert_map", "gather", "row_map"] = Field(
        "expert_map",
        description="what the id indexes: the map to local ids, the experts themselves, or a map of rows",
    )
    tokens: int = Field(64, ge=2, le=16_384)
    experts: int = Field(32, ge=1, le=1024, description="of all ranks together")
    top_k: int = Field(4, ge=1, le=64)
    ranks: int = Field(1, ge=1, le=64)
    rank: int = Field(0, ge=0, le=63)
    slots: Literal["padding", "dropped"] = Field(
        "padding", description="-1 in all slots of the last quarter of the rows, or in one slot of every row"
    )
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> SentinelIdsParameters:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")
        if self.experts % self.ranks:
            raise ValueError(f"ranks: {self.ranks} does not divide experts {self.experts}")
        if self.rank >= self.ranks:
            raise ValueError(f"rank: must be below ranks {self.ranks}, not {self.rank}")
        if self.use != "expert_map" and self.ranks > 1:
            raise ValueError(f"ranks: {self.use} knows no ranks; expected use: expert_map")
        return self


class SentinelIds(Fault):
    """An id that says "no expert", taken for one."""

    id = "MD016"
    parameters = SentinelIdsParameters
    tiers = {"faulty": (Tier.MODEL,), "fixed": (Tier.MODEL,)}
    claims = CLAIMS

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.routing.sentinel_ids_lab import FaultyUse

        return FaultyUse()

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.routing.sentinel_ids_lab import FixedUse

        return FixedUse()

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.routing.sentinel_ids_lab import observe

        return observe(self.parameters.model_validate(case.parameters), implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        if seen["rows_wrong"]:
            said = f"{seen['rows_wrong']} of {seen['rows']} rows hold a wrong sum"
            return Judgement(CaseVerdict.REPRODUCED, said)
        if seen["empty_slots_given_to_an_expert"]:
            said = f"{seen['empty_slots_given_to_an_expert']} empty slots go to expert {seen['expert']}"
            return Judgement(CaseVerdict.REPRODUCED, said)
        return Judgement(CaseVerdict.CLEAN, f"{seen['rows']} of {seen['rows']} rows are right")

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        rank = f" rank {parameters['rank']}/{parameters['ranks']}" if parameters["ranks"] != 1 else ""
        return f"{parameters['use']} {parameters['slots']}{rank}"
