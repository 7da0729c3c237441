"""MD013: CPU offload without effect: weights that were to be on the host are on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class OffloadNoopParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cause: Literal["repacked", "v2_runner"] = Field(
        "repacked",
        description="weights that are repacked after loading, or the V2 model runner (a real engine alone)",
    )


class OffloadNoop(Fault):
    """Bytes that count as offloaded, and are not."""

    id = "MD013"
    parameters = OffloadNoopParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.ENGINE),
        "fixed": (Tier.MODEL, Tier.ENGINE),
        "installed": (Tier.LIBRARY,),
        "vllm": (Tier.LIBRARY,),
    }

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters["cause"] == "v2_runner") == (tier is Tier.ENGINE)

    def faulty(self, case: Case) -> Any:
        if case.tier is Tier.ENGINE:
            return {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        from moedoctor.faults.offload.offload_noop_lab import Reload, rebinding, remembering

        return Reload(rebinding, remembering)

    def fixed(self, case: Case) -> Any:
        """In an engine the older runner; else the same functions with what the plug-in puts around them."""
        if case.tier is Tier.ENGINE:
            return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        from moedoctor.faults.offload.offload_noop_lab import Reload, rebinding, remembering
        from moedoctor.upstream.plugin.offload_fix import forgetting

        return Reload(rebinding, forgetting(remembering))

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
            from moedoctor.faults.offload import offload_noop_engine

            return offload_noop_engine.observe(implementation)
        from moedoctor.faults.offload import offload_noop_lab as offload_noop_model

        return offload_noop_model.observe(implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        asked, there = seen["asked_bytes"], seen["host_bytes"]
        if not asked:
            return Judgement(
                CaseVerdict.ERROR, "nothing was to be offloaded", "no weight of the model was chosen"
            )
        figure = f"{there} of {asked} bytes that were to be offloaded are on the host"
        return Judgement(CaseVerdict.CLEAN if there >= asked else CaseVerdict.REPRODUCED, figure)

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over named releases: which leave repacked weights on the GPU."""
        from packaging.version import Version

        run = {
            one.subject.removeprefix("vllm@"): one
            for one in results
            if one.subject.startswith("vllm@") and one.evidence
        }
        order = sorted(run, key=Version)
        if not order:
            return {}
        failing = [name for name in order if run[name].verdict is CaseVerdict.REPRODUCED]
        seen = {name: run[name].evidence for name in failing}
        mended = [
            name for name in failing if seen[name]["host_bytes_with_plug_in"] >= seen[name]["asked_bytes"]
        ]
        return {
            "releases_run": order,
            "repacked_weights_stay_on_the_gpu": failing,
            "of_these_mended_by_the_plug_in": mended,
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        return str(parameters["cause"])
