"""MD003: quantisation scales offloaded off the GPU: "b_scales is not on GPU"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.faults.offload.engine_table import both, marlin_crashes, same_tokens_with_fix
from moedoctor.faults.offload.offloaded_scales_claims import CLAIMS
from moedoctor.interfaces import ClaimTest, Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class OffloadedScalesParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    layers: int = Field(4, ge=3, le=64)
    seed: int = Field(0, ge=0)
    engine: Literal["eager", "compiled"] | None = Field(
        None, description="real engines in this mode instead: the table of vllm#37883"
    )


class OffloadedScales(Fault):
    """A kernel that is handed the scales which the quantisation config kept, and checks where they are."""

    id = "MD003"
    parameters = OffloadedScalesParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.KERNEL, Tier.ENGINE),
        "fixed": (Tier.MODEL, Tier.KERNEL, Tier.ENGINE),
        "vllm": (Tier.KERNEL,),
    }
    claims = (
        *CLAIMS,
        ClaimTest("marlin_crashes", marlin_crashes),
        ClaimTest("same_tokens_with_fix", same_tokens_with_fix),
    )

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters["engine"] is not None) == (tier is Tier.ENGINE)

    def faulty(self, case: Case) -> Any:
        if case.tier is Tier.ENGINE:
            return ""  # no fixes
        from moedoctor.faults.offload.offloaded_scales_lab import Way

        return Way.upstream(case.tier)

    def fixed(self, case: Case) -> Any:
        if case.tier is Tier.ENGINE:
            return "offload"
        from moedoctor.faults.offload.offloaded_scales_lab import Way

        return Way.ours(case.tier)

    def observe(self, case: Case, implementation: Any) -> Observation:
        if case.tier is Tier.ENGINE:
            from moedoctor.upstream.engine import offload_cells as cells
            from moedoctor.upstream.engine.offload_engine import observe as observe_engines

            mode = str(case.parameters["engine"])
            places = cells.PLACES if mode == cells.COMPILED else (*cells.PLACES, cells.WEIGHTS)
            return observe_engines(cells.TABLE, mode, places, implementation)
        from moedoctor.faults.offload.offloaded_scales_lab import observe

        return observe(self.parameters.model_validate(case.parameters), case.device, implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        if case.tier is Tier.ENGINE:
            from moedoctor.upstream.engine.offload_engine import judge

            return judge(seen)
        where = f"the config holds {seen['config_holds']}"
        if seen["error"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{seen['error']}; {where}")
        if not seen["same_bits"]:
            return Judgement(CaseVerdict.REPRODUCED, "runs, and gives other numbers than without offload")
        return Judgement(CaseVerdict.CLEAN, f"the same bits as without offload; {where}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """The table of vllm#37883, where engines ran."""
        return both(results)

    def describe(self, parameters: Any) -> str:
        if parameters["engine"] is not None:
            return f"engines, {parameters['engine']}"
        return f"{parameters['layers']} quantised MoE layers"
