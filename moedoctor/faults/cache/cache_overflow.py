"""MD007: more unique experts than cache slots: truncation computes with stale weights."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.cache.cache_overflow_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseVerdict, Observation, Tier


class CacheOverflowParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    experts: int = Field(128, ge=2, le=1024)
    capacity: int = Field(32, ge=1, le=1024, description="slots")
    top_k: int = Field(8, ge=1, le=64)
    tokens: int = Field(256, ge=1, le=8192, description="of the prefill")
    prefills: int = Field(2, ge=1, le=16, description="one after another through the same cache")
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _overflows(self) -> CacheOverflowParameters:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")
        if self.capacity >= min(self.experts, self.tokens * self.top_k):
            raise ValueError(f"capacity: {self.capacity} slots hold every expert that the call can need")
        return self


class CacheOverflowFault(Fault):
    """Silently wrong tokens where a call needs more experts than there are slots."""

    id = "MD007"
    parameters = CacheOverflowParameters
    tiers = {"faulty": (Tier.MODEL,), "fixed": (Tier.MODEL,)}
    claims = CLAIMS

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.cache.cache_overflow_lab import Truncating

        return Truncating()

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.cache.cache_overflow_lab import Grouped

        return Grouped()

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.cache.cache_overflow_lab import observe

        return observe(self.parameters.model_validate(case.parameters), case.device, implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        rows, wrong = seen["rows"], seen["wrong_rows"]
        needs = f"{seen['needed']} experts for {case.parameters['capacity']} slots"
        if wrong:
            figure = f"{needs}: {wrong} of {rows} tokens wrong, by up to {seen['worst_error']:.0%}"
            return Judgement(CaseVerdict.REPRODUCED, figure)
        if not seen["refused"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{needs}, and no error")
        return Judgement(
            CaseVerdict.CLEAN, f"{needs}: refused; in {seen['groups']} groups 0 of {rows} tokens wrong"
        )

    def describe(self, parameters: Any) -> str:
        shape = f"E={parameters['experts']} C={parameters['capacity']} K={parameters['top_k']}"
        return f"{shape} T={parameters['tokens']}"
