"""MD009: CPU offload refused by an assertion for block sizes other than the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier


class OffloadReinitParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.offload.offload_reinit_lab import refuses

        return refuses

    def fixed(self, case: Case) -> Any:
        """The same function under what the plug-in puts around it."""
        from moedoctor.faults.offload.offload_reinit_lab import refuses
        from moedoctor.upstream.plugin.offload_fix import unasserted

        return unasserted(refuses)

    def installed(self, case: Case) -> Any:
        """The installed vLLM's source. Runs in the child; raises UnavailableError."""
        from moedoctor.results import UnavailableError
        from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError

        try:
            return ReleaseSource.installed()
        except SourceError as error:
            raise UnavailableError(str(error)) from error

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.offload.offload_reinit_lab import observe

        return observe(self.parameters.model_validate(case.parameters), implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        if seen["without_offload"] != "rebuilt" or seen["default_sizes"] != "kept":
            said = f"without offload: {seen['without_offload']}; default block sizes: {seen['default_sizes']}"
            return Judgement(CaseVerdict.ERROR, said, f"the function does not do what it is for: {said}")
        if seen["with_offload"] == "rebuilt":
            return Judgement(CaseVerdict.CLEAN, "rebuilt for other block sizes, with offload and without")
        return Judgement(CaseVerdict.REPRODUCED, f"with offload: {seen['with_offload']}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over named releases: which refuse, and the first that does not."""
        from packaging.version import Version

        verdicts: dict[str, set[CaseVerdict]] = {}
        for one in results:
            if one.subject.startswith("vllm@") and one.evidence:
                verdicts.setdefault(one.subject.removeprefix("vllm@"), set()).add(one.verdict)
        order = sorted(verdicts, key=Version)
        failing = [one for one in order if CaseVerdict.REPRODUCED in verdicts[one]]
        after = order[order.index(failing[-1]) + 1 :] if failing else []
        if not order:
            return {}
        return {
            "releases_run": order,
            "refusing": failing,
            "first_fixed_of_these": after[0] if after else None,
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        return f"{parameters['layout']} offload={parameters['offload_gb']} GB"
