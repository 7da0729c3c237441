"""MD009: CPU offload refused by an assertion for block sizes other than the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import Fault, Judgement, Parameters, find_first_after, group_by_release, list_tiers
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier


class OffloadReinitParameters(Parameters):
    layout: Literal["hybrid", "block_size"] = Field(
        "hybrid", description="groups of a hybrid model's KV cache, or one group with --block-size"
    )
    offload_gb: float = Field(4.0, gt=0, le=1024, description="--cpu-offload-gb")


class OffloadReinit(Fault):
    """The input batch cannot be made again while weights are offloaded."""

    id = "MD009"
    parameters = OffloadReinitParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.LIBRARY, vllm=Tier.LIBRARY)
    summary = "{layout} offload={offload_gb} GB"
    restated_on_cpu = True

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        without_offload, default_sizes = evidence["without_offload"], evidence["default_sizes"]
        if without_offload != "rebuilt" or default_sizes != "kept":
            outcome = f"without offload: {without_offload}; default block sizes: {default_sizes}"
            return Judgement(
                CaseVerdict.ERROR, outcome, f"the function does not even do its work otherwise: {outcome}"
            )
        if evidence["with_offload"] == "rebuilt":
            return Judgement(CaseVerdict.CLEAN, "rebuilt for other block sizes, with offload and without")
        return Judgement(CaseVerdict.REPRODUCED, f"with offload: {evidence['with_offload']}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over named releases: which refuse, and the first that does not."""
        groups = group_by_release(results)
        if not groups:
            return {}
        order, reproduced = list(groups), CaseVerdict.REPRODUCED
        refusing = [name for name in order if any(case.verdict is reproduced for case in groups[name])]
        first_fixed = find_first_after(order, refusing)
        return {"releases_run": order, "refusing": refusing, "first_fixed_of_these": first_fixed}
