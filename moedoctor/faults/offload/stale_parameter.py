"""MD020: a quant config that keeps the offloaded CPU parameter: illegal memory access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    Crash,
    Death,
    Evidence,
    Observation,
    Scalar,
    Tier,
)

_SIMULATED = ("checks", "unchecked")


class StaleParameterParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    backend: Literal["checks", "unchecked", "triton", "torch", "vllm_marlin", "vllm_cutlass"] = Field(
        "unchecked", description="whose product gets the stale reference; checks exists at tier model alone"
    )
    layers: int = Field(4, ge=3, le=64)
    seed: int = Field(0, ge=0)


class StaleParameter(Fault):
    """What each backend does with a parameter that has gone to the host behind its back."""

    id = "MD020"
    parameters = StaleParameterParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.KERNEL),
        "fixed": (Tier.MODEL, Tier.KERNEL),
    }

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """Two simulated backends at tier model, real ones on a GPU."""
        backend = parameters["backend"]
        return backend in _SIMULATED if tier is Tier.MODEL else backend != "checks"

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.offload.stale_config import upstream_offload

        return upstream_offload

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.offload.stale_config import our_offload

        return our_offload

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.offload.stale_parameter_lab import observe

        return observe(
            self.parameters.model_validate(case.parameters), case.tier, case.device, implementation
        )

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        where = f"the config holds {seen['config_holds']}"
        if seen["error"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{seen['kind']}: {seen['error']}; {where}")
        if not seen["same_bits"]:
            return Judgement(CaseVerdict.REPRODUCED, f"runs, and gives other numbers; {where}")
        return Judgement(CaseVerdict.CLEAN, f"the same bits as without offload; {where}")

    def judge_crash(self, case: Case, crash: Crash) -> Judgement:
        """The symptom of the report is the death of the process."""
        if crash.death is Death.ILLEGAL_MEMORY_ACCESS:
            return Judgement(CaseVerdict.REPRODUCED, "illegal memory access", crash.message)
        return super().judge_crash(case, crash)

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """What each backend does with a host address."""
        rows = [
            {
                "tier": one.tier.value,
                "backend": one.parameters["backend"],
                "without the fix": one.evidence.get("error") or one.evidence.get("message") or one.figure,
            }
            for one in results
            if one.subject == "faulty" and one.verdict in (CaseVerdict.REPRODUCED, CaseVerdict.CLEAN)
        ]
        return {"backends": rows} if rows else {}

    def describe(self, parameters: Any) -> str:
        return f"backend {parameters['backend']}"
