"""MD004: kernels built for the wrong CUDA architecture suffix, 120 for 120a or 120f."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moedoctor.faults.selection.arch_suffix_claims import CLAIMS
from moedoctor.fixes.arch.targets import NEWEST_CUDA_MAJOR, OLDEST_CUDA, parse_cuda
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier


class ArchSuffixParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    capability: Literal["10.0", "10.3", "11.0", "12.0", "12.1"] = Field(
        "12.0", description="the GPU's; older ones get their MoE targets from no list"
    )
    cuda: str = Field("13.0", description="the toolkit that compiles, MAJOR.MINOR")
    arch_list: str | None = Field(None, max_length=200, description="FLASHINFER_CUDA_ARCH_LIST, if set")

    @field_validator("cuda")
    @classmethod
    def _is_covered(cls, value: str) -> str:
        release = parse_cuda(value)
        if not OLDEST_CUDA <= release < (NEWEST_CUDA_MAJOR + 1, 0) or value != f"{release[0]}.{release[1]}":
            raise ValueError(
                f"must be a release from 12.0 to {NEWEST_CUDA_MAJOR}.x, such as '13.0', not '{value}'"
            )
        return value


class ArchSuffix(Fault):
    """The wrong suffix, or none, for the CUDA target of MoE kernels."""

    id = "MD004"
    parameters = ArchSuffixParameters
    tiers = {
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.LIBRARY,),
    }
    claims = CLAIMS
    installed_package = "flashinfer"

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.selection.arch_suffix_lab import FaultyArch

        return FaultyArch()

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.selection.arch_suffix_lab import FixedArch

        return FixedArch()

    def installed(self, case: Case) -> Any:
        """The installed FlashInfer's own choice. Runs in the child; raises UnavailableError."""
        from moedoctor.upstream.flashinfer.context import FlashInferContext

        return FlashInferContext.installed()

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.selection.arch_suffix_lab import observe

        return observe(self.parameters.model_validate(case.parameters), implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        symptom = _symptom(seen, str(case.parameters["capability"]), str(case.parameters["cuda"]))
        if symptom is not None:
            return Judgement(CaseVerdict.REPRODUCED, *symptom)
        if seen["error"]:
            return Judgement(CaseVerdict.CLEAN, "refused, and no target would do", seen["error"])
        return Judgement(CaseVerdict.CLEAN, f"{' '.join(seen['targets'])}: every instruction compiles")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """How often each symptom was seen, by subject."""
        counts: dict[str, dict[str, int]] = {}
        for subject in dict.fromkeys(one.subject for one in results):
            shown = [
                one for one in results if one.subject == subject and one.verdict is CaseVerdict.REPRODUCED
            ]
            kinds = Counter(_kind(one.evidence) for one in shown)
            if kinds:
                counts[subject] = dict(sorted(kinds.items()))
        return {"symptoms": counts} if counts else {}

    def describe(self, parameters: Any) -> str:
        setting = "no list" if parameters["arch_list"] is None else f"list {parameters['arch_list']!r}"
        return f"GPU {parameters['capability']} CUDA {parameters['cuda']} {setting}"


def _kind(seen: Evidence) -> str:
    """The symptom that `seen` shows, in two words."""
    if seen["error"]:
        return "no target"
    if not all(one["known"] for one in seen["checked"]):
        return "unknown target"
    return "missing instructions" if any(one["loads"] for one in seen["checked"]) else "does not load"


def _symptom(seen: Evidence, gpu: str, cuda: str) -> tuple[str, str | None] | None:
    """(what is wrong, what the compiler or the resolver said); None where nothing is."""
    checked, would_do = seen["checked"], seen["would_do"]
    if seen["error"]:
        return (f"no target, although {' or '.join(would_do)} would do", seen["error"]) if would_do else None
    unknown = [one for one in checked if not one["known"]]
    if unknown:
        return f"{unknown[0]['target']} is unknown to CUDA {cuda}", unknown[0]["said"]
    loading = [one for one in checked if one["loads"]]
    if not loading:
        return f"{' '.join(seen['targets'])} does not load on {gpu}", None
    best = min(loading, key=lambda one: len(one["lacks"]))
    if best["lacks"]:
        return f"{best['target']} lacks {', '.join(best['lacks'])}", best["said"]
    return None
