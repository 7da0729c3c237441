"""MD006: the LFRU expert cache evicts an expert that the same call needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.cache.self_evicting_cache_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier


class SelfEvictingCacheParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    routing: Literal["zipf", "trace"] = Field(
        "zipf", description="trace: the first layer of the recorded trace that ships with moedoctor"
    )
    experts: int = Field(128, ge=1, le=1024)
    capacity: int = Field(8, ge=1, le=1024, description="slots")
    top_k: int = Field(8, ge=1, le=64)
    tokens: int = Field(1, ge=1, le=64, description="tokens a call")
    calls: int = Field(1000, ge=1, le=100_000, description="of the layer, one after another")
    computed: int = Field(
        48, ge=1, le=1000, description="calls whose output is compared, half of them where `faulty` is wrong"
    )
    clock: Literal["access", "call"] = Field(
        "access", description="what the age counts in `faulty`: accesses in the PR, calls in a fork of it"
    )
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> SelfEvictingCacheParameters:
        if self.top_k > self.capacity:
            raise ValueError(f"top_k: {self.top_k} is more than capacity {self.capacity}; that is MD007")
        if self.capacity > self.experts:
            raise ValueError(f"capacity: {self.capacity} is more than experts {self.experts}")
        if self.computed > self.calls:
            raise ValueError(f"computed: {self.computed} is more than calls {self.calls}")
        return self


class SelfEvictingCache(Fault):
    """Wrong experts from a cache that evicts what its own call has just placed."""

    id = "MD006"
    parameters = SelfEvictingCacheParameters
    tiers = {"faulty": (Tier.MODEL,), "fixed": (Tier.MODEL,)}
    claims = CLAIMS

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.cache.self_evicting_cache_lab import FaultyCache

        return FaultyCache(str(case.parameters["clock"]))

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.cache.self_evicting_cache_lab import FixedCache

        return FixedCache()

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.cache.self_evicting_cache_lab import observe

        return observe(self.parameters.model_validate(case.parameters), case.device, implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        wrong, calls = seen["wrong_calls"], seen["calls"]
        outputs, computed = seen["wrong_outputs"], seen["computed"]
        if wrong or outputs:
            figure = f"{wrong / calls:.1%} of {calls} calls hold a wrong expert"
            if outputs:
                figure += f"; {outputs} of {computed} outputs wrong, by up to {seen['worst_error']:.0%}"
            return Judgement(CaseVerdict.REPRODUCED, figure)
        rates = f"hit rate {seen['hit_rate']:.1%} of at most {seen['belady_hit_rate']:.1%}"
        return Judgement(CaseVerdict.CLEAN, f"0 of {calls} calls, 0 of {computed} outputs wrong; {rates}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """The hit rates that the control counts, wrong experts among them, beside LRU and the bound."""
        rows = [
            {
                **{key: one.parameters[key] for key in ("routing", "experts", "capacity", "top_k", "clock")},
                "wrong_calls": f"{one.evidence['wrong_calls'] / one.evidence['calls']:.1%}",
                **{key: one.evidence[key] for key in ("hit_rate", "lru_hit_rate", "belady_hit_rate")},
            }
            for one in results
            if one.subject == "faulty" and "wrong_calls" in one.evidence
        ]
        return {"faulty": rows} if rows else {}

    def describe(self, parameters: Any) -> str:
        shape = f"{parameters['routing']} E={parameters['experts']} C={parameters['capacity']}"
        return f"{shape} K={parameters['top_k']} clock={parameters['clock']}"
