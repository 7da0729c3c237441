"""MD005: `state_dict()` in forward cannot be traced by Dynamo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import EngineFault, Judgement, Parameters, list_tiers
from moedoctor.faults.offload import engine_table
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier, find_worst

FAILING = "2.10.0 to 2.12.1 and 2.14.0 to 2.15.0"
"""The releases of torch whose Dynamo refuses: both ends of each range have a stored report."""


class UntraceableOffloadParameters(Parameters):
    compiler: Literal["eager", "aot_eager", "inductor"] = Field(
        "eager", description="the backend of torch.compile; Dynamo traces before any of them"
    )
    layers: int = Field(4, ge=3, le=64)
    experts: int = Field(8, ge=2, le=1024)
    hidden: int = Field(64, ge=16, le=8192)
    intermediate: int = Field(32, ge=16, le=8192)
    seed: int = Field(0, ge=0)
    engine: Literal["compiled"] | None = Field(
        None, description="real engines in this mode instead: no offload, and offload without UVA"
    )


class UntraceableOffload(EngineFault):
    """A compiled forward gathers its weights by `state_dict()`."""

    id = "MD005"
    parameters = UntraceableOffloadParameters
    tiers = list_tiers(Tier.MODEL, Tier.ENGINE, installed=Tier.LIBRARY, vllm=Tier.LIBRARY)
    summary = "torch.compile with {compiler}, {layers} MoE layers"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        if case.tier is Tier.ENGINE:
            return engine_table.judge(evidence)
        torch = f"torch {evidence['torch']}"
        if evidence["error"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{torch}: {evidence['telling_line']}")
        if evidence["same_bits"]:
            return Judgement(CaseVerdict.CLEAN, f"{torch}: one graph, the same bits")
        distance, wrong = find_worst(evidence["distance"]), find_worst(evidence["wrong_weights_distance"])
        norms = (
            f"the norm of the difference is {distance:.1g}, with one layer's weights wrong it is {wrong:.1g}"
        )
        if math.isfinite(distance) and distance <= float(evidence["allowed_distance"]):
            figure = f"{torch}: one graph, the same numbers except for rounding: {norms}"
            return Judgement(CaseVerdict.CLEAN, figure)
        figure = f"compiles, and gives other numbers than without offload: {norms}"
        return Judgement(CaseVerdict.REPRODUCED, figure)

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """If Dynamo traced the control in every case, this torch does not have the failure."""
        controls = [case.evidence for case in results if case.subject == "faulty" and case.tier is Tier.MODEL]
        if not controls or any(control.get("graphs") != 1 or control.get("error") for control in controls):
            return None
        torch = controls[0]["torch"]
        return f"Dynamo of torch {torch} traces state_dict(); the failure was seen with torch {FAILING}"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return what Dynamo of this torch answers to the control."""
        for case in results:
            if case.subject == "faulty" and "torch" in case.evidence:
                dynamo = case.evidence["telling_line"] or "traces it"
                return {"torch": case.evidence["torch"], "dynamo": dynamo}
        return {}
