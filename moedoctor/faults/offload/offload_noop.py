"""MD013: CPU offload without effect: weights that should be on the host are on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import Fault, Judgement, Parameters, group_by_release, list_tiers
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class OffloadNoopParameters(Parameters):
    cause: Literal["repacked", "v2_runner"] = Field(
        "repacked",
        description="weights that are repacked after loading, or the V2 model runner (a real engine alone)",
    )


class OffloadNoop(Fault):
    """Bytes that count as offloaded, and are not."""

    id = "MD013"
    parameters = OffloadNoopParameters
    tiers = list_tiers(Tier.MODEL, Tier.ENGINE, installed=Tier.LIBRARY, vllm=Tier.LIBRARY)
    summary = "{cause}"
    restated_on_cpu = True

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return tier is Tier.ENGINE or parameters["cause"] == "repacked"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        asked, on_host = observation.evidence["asked_bytes"], observation.evidence["host_bytes"]
        if not asked:
            return Judgement(
                CaseVerdict.ERROR, "nothing should be offloaded", "no weight of the model was chosen"
            )
        figure = f"{on_host} of {asked} bytes that should be offloaded are on the host"
        return Judgement(CaseVerdict.CLEAN if on_host >= asked else CaseVerdict.REPRODUCED, figure)

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over named releases: which leave repacked weights on the GPU."""
        run = {name: cases[-1] for name, cases in group_by_release(results).items()}
        if not run:
            return {}
        failing = {key: case.evidence for key, case in run.items() if case.verdict is CaseVerdict.REPRODUCED}
        return {
            "releases_run": list(run),
            "repacked_weights_stay_on_the_gpu": list(failing),
            "of_these_mended_by_the_plug_in": [
                name
                for name, evidence in failing.items()
                if evidence["host_bytes_with_plug_in"] >= evidence["asked_bytes"]
            ],
        }
