"""MD010: a backend setting that is unknown, removed, invalid or silently ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moedoctor.faults.selection.backend_override_claims import CLAIMS
from moedoctor.fixes.backends import release_tables as backend_tables
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class BackendOverrideParameters(BaseModel):
    """One point of the matrix: somebody wants a backend, and sets something for it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    release: str = Field(description="a vLLM release of the tables")
    setting: str = Field(max_length=200, description="NAME=VALUE, or a flag such as '--moe-backend marlin'")
    wants: str = Field(
        max_length=80, description="the backend that whoever sets it wants, as vLLM's log names it"
    )
    scheme: Literal["nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "fp8-block", "bf16"] = "nvfp4"
    capability: str = Field("12.0", description="the GPU's compute capability")
    activation: str = "silu"

    @field_validator("release")
    @classmethod
    def _is_known(cls, value: str) -> str:
        known = list(backend_tables.releases())
        if value not in known:
            raise ValueError(f"must be a release of the tables, {known[0]} to {known[-1]}, not '{value}'")
        return value

    @field_validator("capability")
    @classmethod
    def _is_a_capability(cls, value: str) -> str:
        if value not in backend_tables.CAPABILITIES:
            known = ", ".join(backend_tables.CAPABILITIES)
            raise ValueError(f"must be one of {known}, quoted, not '{value}'")
        return value

    @field_validator("setting")
    @classmethod
    def _is_a_setting(cls, value: str) -> str:
        if not value.startswith("--") and "=" not in value:
            raise ValueError(f"must be NAME=VALUE or a flag that begins with --, not '{value}'")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> BackendOverrideParameters:
        known = backend_tables.releases()[self.release].activations
        if self.activation not in known:
            raise ValueError(
                f"activation: vLLM {self.release} knows {', '.join(known)}, not '{self.activation}'"
            )
        backends = {one.backend for one in backend_tables.tables(self.scheme, self.release).kernels}
        if self.wants not in backends:
            listed = ", ".join(sorted(backends))
            raise ValueError(f"wants: vLLM {self.release} has {listed} for {self.scheme}, not '{self.wants}'")
        return self


class BackendOverride(Fault):
    """A setting that is given and changes nothing, while nobody says what would."""

    id = "MD010"
    parameters = BackendOverrideParameters
    tiers = {
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.LIBRARY,),
    }
    claims = CLAIMS

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.selection.backend_override_lab import UpstreamSelection

        return UpstreamSelection()

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.selection.backend_override_lab import OurSelection

        return OurSelection()

    def installed(self, case: Case) -> Any:
        """The selection of the installed vLLM. Runs in the child; raises UnavailableError."""
        from moedoctor.upstream.selection.installed import InstalledSelection

        return InstalledSelection.of_this_environment(str(case.parameters["release"]))

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.selection.backend_override_lab import observe

        return observe(self.parameters.model_validate(case.parameters), implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        wants = str(case.parameters["wants"])
        if seen["refused"]:
            return Judgement(CaseVerdict.CLEAN, f"refused: {seen['refused']}")
        if seen["selected"] == wants:
            return Judgement(CaseVerdict.CLEAN, f"{wants} selected, as asked for")
        if seen["advice"]:
            return Judgement(CaseVerdict.CLEAN, f"no effect, and said so: use {seen['advice']}")
        told = "one warning in the log names it" if seen["warned"] else "not a word"
        if seen["selected"] == seen["without"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{seen['selected']} all the same, {told}")
        return Judgement(CaseVerdict.REPRODUCED, f"{seen['selected']}, not {wants}, {told}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over the releases: where the control is not told a word, and where the fix gets what was asked
        for."""
        silent = [one for one in results if one.subject == "faulty" and not one.evidence.get("warned")]
        honoured = [one for one in results if one.subject == "fixed" and _honoured(one)]
        return {
            "settings_without_a_word": len([one for one in silent if one.verdict is CaseVerdict.REPRODUCED]),
            "settings_honoured_by_the_fix": len(honoured),
            "releases": len({one.parameters["release"] for one in results if one.subject == "fixed"}),
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        where = f"{parameters['release']} {parameters['scheme']} {parameters['capability']}"
        return f"{where} {parameters['setting']}"


def _honoured(result: CaseResult) -> bool:
    return bool(result.evidence) and result.evidence.get("selected") == result.parameters["wants"]
