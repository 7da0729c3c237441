"""MD019: running expert groups one by one through a shared workspace overwrites the sum."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.cache.workspace_aliasing_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseVerdict, Observation, Tier


class WorkspaceAliasingParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    alias: Literal["sum", "results", "input"] = Field(
        "sum",
        description="what shares memory with the kernel's output: the running sum, the results that are "
        "kept to be added at the end, or the input",
    )
    groups: int = Field(2, ge=2, le=16)
    experts: int = Field(32, ge=2, le=512)
    top_k: int = Field(8, ge=1, le=64)
    tokens: int = Field(64, ge=1, le=4096)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> WorkspaceAliasingParameters:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")
        if self.experts % self.groups:
            raise ValueError(f"groups: {self.groups} does not divide experts {self.experts}")
        return self


class WorkspaceAliasing(Fault):
    """A sum over expert groups that its own kernel overwrites."""

    id = "MD019"
    parameters = WorkspaceAliasingParameters
    tiers = {
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.KERNEL,),
    }
    claims = CLAIMS

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.cache.workspace_aliasing_lab import SharedWorkspace

        return SharedWorkspace()

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.cache.workspace_aliasing_lab import OwnSum

        return OwnSum()

    def installed(self, case: Case) -> Any:
        """vLLM's modular kernel with its Triton experts, called once a group. Runs in the child."""
        from moedoctor.upstream.moe_backends.modular_moe import ModularMoe

        return ModularMoe.installed(case.device)

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.cache.workspace_aliasing_lab import observe

        return observe(self.parameters.model_validate(case.parameters), case.device, implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        rows, wrong, groups = seen["rows"], seen["wrong_rows"], case.parameters["groups"]
        if wrong:
            said = f"{groups} groups: {wrong} of {rows} tokens wrong, by up to {seen['worst_error']:.0%}"
            if seen["same_memory"]:
                said += f"; {seen['same_memory']} of {groups} results at the first one's address"
            return Judgement(CaseVerdict.REPRODUCED, said)
        return Judgement(CaseVerdict.CLEAN, f"{groups} groups: 0 of {rows} tokens wrong")

    def describe(self, parameters: Any) -> str:
        return f"{parameters['alias']} {parameters['groups']} groups E={parameters['experts']}"
