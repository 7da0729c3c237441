"""MD009: CPU offload refused by an assertion for block sizes other than the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from packaging.version import Version
from pydantic import Field

from moedoctor.faults.base import Parameters
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class OffloadReinitParameters(Parameters):
    """One point of the matrix."""

    layout: Literal["hybrid", "block_size"] = Field(
        "hybrid", description="groups of a hybrid model's KV cache, or one group with --block-size"
    )
    offload_gb: float = Field(4.0, gt=0, le=1024, description="--cpu-offload-gb")


class OffloadReinit(Fault):
    """The input batch cannot be made again while weights are offloaded."""

    id = "MD009"
    parameters = OffloadReinitParameters
    tiers = {
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.LIBRARY,),
        "vllm": (Tier.LIBRARY,),
    }
    lab = "moedoctor.faults.offload.offload_reinit_lab"

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        without_offload, default_sizes = evidence["without_offload"], evidence["default_sizes"]
        if without_offload != "rebuilt" or default_sizes != "kept":
            outcome = f"without offload: {without_offload}; default block sizes: {default_sizes}"
            return Judgement(
                CaseVerdict.ERROR,
                outcome,
                f"the function does not even do its work otherwise: {outcome}",
            )
        if evidence["with_offload"] == "rebuilt":
            return Judgement(CaseVerdict.CLEAN, "rebuilt for other block sizes, with offload and without")
        return Judgement(CaseVerdict.REPRODUCED, f"with offload: {evidence['with_offload']}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over named releases: which refuse, and the first that does not."""
        verdicts: dict[str, set[CaseVerdict]] = {}
        for case in results:
            if case.subject.startswith("vllm@") and case.evidence:
                verdicts.setdefault(case.subject.removeprefix("vllm@"), set()).add(case.verdict)
        order = sorted(verdicts, key=Version)
        if not order:
            return {}
        refusing = [release for release in order if CaseVerdict.REPRODUCED in verdicts[release]]
        after = order[order.index(refusing[-1]) + 1 :] if refusing else []
        return {
            "releases_run": order,
            "refusing": refusing,
            "first_fixed_of_these": after[0] if after else None,
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        return f"{parameters['layout']} offload={parameters['offload_gb']} GB"
