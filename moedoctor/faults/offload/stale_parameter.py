"""MD020: what backends do with a quantization config that keeps the offloaded parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import Fault, Judgement, Parameters, list_tiers
from moedoctor.faults.offload.offloaded_scales import judge_config
from moedoctor.results import Case, CaseResult, CaseVerdict, Crash, Death, Evidence, Observation, Scalar, Tier

_SIMULATED = ("checks", "unchecked")


class StaleParameterParameters(Parameters):
    backend: Literal["checks", "unchecked", "triton", "torch", "vllm_marlin", "vllm_cutlass"] = Field(
        "unchecked", description="whose product gets the stale reference; checks exists at tier model alone"
    )
    layers: int = Field(4, ge=3, le=64)
    seed: int = Field(0, ge=0)


class StaleParameter(Fault):
    """A parameter that was moved to the host unnoticed, and a backend that still reads it."""

    id = "MD020"
    parameters = StaleParameterParameters
    tiers = list_tiers(Tier.MODEL, Tier.KERNEL)
    summary = "backend {backend}"
    restated_on_cpu = True

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """Two simulated backends at tier model, real ones on a GPU."""
        backend = parameters["backend"]
        return backend in _SIMULATED if tier is Tier.MODEL else backend != "checks"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        return judge_config(evidence, f"{evidence.get('kind')}: {evidence['error']}")

    def judge_crash(self, case: Case, crash: Crash) -> Judgement:
        """The symptom of the report is the death of the process."""
        if crash.death is Death.ILLEGAL_MEMORY_ACCESS:
            return Judgement(CaseVerdict.REPRODUCED, "illegal memory access", crash.message)
        return super().judge_crash(case, crash)

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return what each backend does with a host address."""
        rows = [
            {
                "tier": case.tier.value,
                "backend": case.parameters["backend"],
                "without the fix": case.evidence.get("error") or case.evidence.get("message") or case.figure,
            }
            for case in results
            if case.subject == "faulty" and case.verdict in (CaseVerdict.REPRODUCED, CaseVerdict.CLEAN)
        ]
        return {"backends": rows} if rows else {}
