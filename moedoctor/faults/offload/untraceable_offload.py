"""MD005: `state_dict()` in forward cannot be traced by Dynamo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.faults.offload.speed_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier

LAST_FAILING = "2.12.1"
"""The last torch whose Dynamo refuses. Reports are stored of 2.11.0, which does, and of 2.13.0, which does
not."""


class UntraceableOffloadParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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


class UntraceableOffload(Fault):
    """A compiled forward that gathers its weights by `state_dict()`."""

    id = "MD005"
    parameters = UntraceableOffloadParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.ENGINE),
        "fixed": (Tier.MODEL, Tier.ENGINE),
        "installed": (Tier.LIBRARY,),
        "vllm": (Tier.LIBRARY,),
    }
    claims = CLAIMS

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters["engine"] is not None) == (tier is Tier.ENGINE)

    def faulty(self, case: Case) -> Any:
        if case.tier is Tier.ENGINE:
            return ""  # no fixes
        from moedoctor.faults.offload.untraceable_offload_lab import faulty

        return faulty

    def fixed(self, case: Case) -> Any:
        if case.tier is Tier.ENGINE:
            return "offload"
        from moedoctor.faults.offload.untraceable_offload_lab import fixed

        return fixed

    def installed(self, case: Case) -> Any:
        """The installed vLLM's source. Runs in the child; raises UnavailableError."""
        from moedoctor.results import UnavailableError
        from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError

        try:
            return ReleaseSource.installed()
        except SourceError as error:
            raise UnavailableError(str(error)) from error

    def observe(self, case: Case, implementation: Any) -> Observation:
        if case.tier is Tier.ENGINE:
            from moedoctor.upstream.engine import offload_cells as cells
            from moedoctor.upstream.engine.offload_engine import observe as observe_engines

            places = (cells.ON_GPU, cells.COPIES)
            return observe_engines(("BF16 TRITON",), str(case.parameters["engine"]), places, implementation)
        from moedoctor.faults.offload.untraceable_offload_lab import observe

        return observe(self.parameters.model_validate(case.parameters), case.device, implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        if case.tier is Tier.ENGINE:
            from moedoctor.upstream.engine.offload_engine import judge

            return judge(seen)
        if seen["error"]:
            return Judgement(CaseVerdict.REPRODUCED, f"torch {seen['torch']}: {seen['telling_line']}")
        if seen["same_bits"]:
            return Judgement(CaseVerdict.CLEAN, f"torch {seen['torch']}: one graph, the same bits")
        apart, wrong = seen["distance"], seen["wrong_weights_distance"]
        said = f"the norm of the difference is {apart:.1g}, with one layer's weights wrong {wrong:.1g}"
        if apart <= seen["allowed_distance"]:
            return Judgement(
                CaseVerdict.CLEAN,
                f"torch {seen['torch']}: one graph, the same numbers but for rounding: {said}",
            )
        return Judgement(
            CaseVerdict.REPRODUCED, f"compiles, and gives other numbers than without offload: {said}"
        )

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """Where Dynamo traced the control in every case, it is this torch that can."""
        controls = [one for one in results if one.subject == "faulty" and one.tier is Tier.MODEL]
        traced = [
            one for one in controls if one.evidence.get("graphs") == 1 and not one.evidence.get("error")
        ]
        if not controls or len(traced) != len(controls):
            return None
        torch = controls[0].evidence["torch"]
        return f"Dynamo of torch {torch} traces state_dict(); the failure needs torch {LAST_FAILING} or older"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """What Dynamo of this torch said to the control."""
        controls = [one for one in results if one.subject == "faulty" and "torch" in one.evidence]
        if not controls:
            return {}
        first = controls[0].evidence
        return {"torch": first["torch"], "dynamo": first["telling_line"] or "traces it"}

    def describe(self, parameters: Any) -> str:
        if parameters["engine"] is not None:
            return f"engines, {parameters['engine']}"
        return f"torch.compile with {parameters['compiler']}, {parameters['layers']} MoE layers"
