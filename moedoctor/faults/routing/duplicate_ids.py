"""MD011: duplicate expert ids leave a row unwritten in FlashInfer's three-step sort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.routing.duplicate_ids_claims import CLAIMS, OUT_OF_BOUNDS, behaviour_of
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import (
    Case,
    CaseResult,
    CaseVerdict,
    Crash,
    Death,
    Evidence,
    Observation,
    Scalar,
    Tier,
)


class DuplicateIdsParameters(BaseModel):
    """One point of the matrix: a call of the routing maps and finalize."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tokens: int = Field(300, ge=1, le=16_384)
    experts: int = Field(128, ge=1, le=1024, description="of all ranks together")
    top_k: int = Field(8, ge=1, le=64)
    ids: Literal["one_expert", "one_repeat", "distinct", "sentinel"] = Field(
        "one_expert",
        description="all slots the same, the second as the first, none repeated, half are -1",
    )
    memory: Literal["garbage", "earlier", "zeros", "minus_one"] = Field(
        "earlier", description="what the map's memory holds before; earlier is a healthy call's map"
    )
    finalize: Literal["normal", "no_filling"] = Field(
        "normal", description="no_filling is the kernel for expert parallelism with all-to-all"
    )
    ranks: int = Field(1, ge=1, le=64, description="expert-parallel ranks; each has its share of the experts")
    rank: int = Field(0, ge=0, le=63)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> DuplicateIdsParameters:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")
        if self.experts % self.ranks:
            raise ValueError(f"ranks: {self.ranks} does not divide experts {self.experts}")
        if self.rank >= self.ranks:
            raise ValueError(f"rank: must be below ranks {self.ranks}, not {self.rank}")
        if self.finalize == "no_filling" and self.ranks < 2:
            raise ValueError("finalize: no_filling is taken with two ranks or more; expected ranks: 2")
        return self


class DuplicateIds(Fault):
    """Duplicate expert ids in FlashInfer's CUTLASS MoE.

    At the tier `kernel` the control is the installed FlashInfer's own code, given the ids as they are, and
    the fix is `deduplicate` before the same code.
    """

    id = "MD011"
    parameters = DuplicateIdsParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.KERNEL),
        "fixed": (Tier.MODEL, Tier.KERNEL),
        "installed": (Tier.KERNEL,),
        "flashinfer": (Tier.KERNEL,),
    }
    claims = CLAIMS
    installed_package = "flashinfer"

    def faulty(self, case: Case) -> Any:
        if case.tier is Tier.KERNEL:
            return self.installed(case)
        _need_numpy()
        from moedoctor.faults.routing.duplicate_ids_lab import ThreeStepModel

        return ThreeStepModel()

    def fixed(self, case: Case) -> Any:
        code = self.faulty(case)
        from moedoctor.faults.routing.duplicate_ids_rows import Implementation

        return Implementation(code, guard=True)

    def installed(self, case: Case) -> Any:
        from moedoctor.upstream.flashinfer.probe import FlashInferProbe

        return FlashInferProbe.installed(case.device)

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.routing.duplicate_ids_rows import Implementation, observe

        if not isinstance(implementation, Implementation):
            implementation = Implementation(implementation)
        return observe(self.parameters.model_validate(case.parameters), implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        rows = seen["rows"]
        if seen.get("entries_out_of_bounds"):
            said = f"{seen['entries_out_of_bounds']} entries of the map lead out of bounds"
            return Judgement(CaseVerdict.REPRODUCED, said)
        if seen["rows_out_of_bounds"]:
            said = f"{OUT_OF_BOUNDS} in {seen['rows_out_of_bounds']} of {rows} rows, without an error"
            return Judgement(CaseVerdict.REPRODUCED, said)
        if seen["rows_wrong"]:
            said = f"{seen['rows_wrong']} of {rows} rows hold a wrong sum, without an error"
            return Judgement(CaseVerdict.REPRODUCED, said)
        if seen["rows_with_the_repeat_dropped"]:
            said = f"the repeat is dropped in {seen['rows_with_the_repeat_dropped']} of {rows} rows"
            return Judgement(CaseVerdict.REPRODUCED, said)
        if seen["unwritten_entries"]:
            said = f"{seen['unwritten_entries']} entries of the map are not written"
            return Judgement(CaseVerdict.REPRODUCED, said)
        return Judgement(CaseVerdict.CLEAN, f"{rows} of {rows} rows are right, {seen['path']}")

    def judge_crash(self, case: Case, crash: Crash) -> Judgement:
        if crash.death is Death.ILLEGAL_MEMORY_ACCESS:
            return Judgement(CaseVerdict.REPRODUCED, "illegal memory access in finalize")
        return super().judge_crash(case, crash)

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """Where the installed FlashInfer gives right sums, the control has nothing to show at this tier."""
        control = [
            one for one in results if one.subject == "faulty" and one.verdict is not CaseVerdict.SKIPPED
        ]
        silent = [one for one in control if one.verdict is CaseVerdict.CLEAN]
        if not silent or any(one.tier is not Tier.KERNEL for one in silent):
            return None
        kernel = sum(one.tier is Tier.KERNEL for one in control)
        return f"the installed FlashInfer gives the right sums in {len(silent)} of {kernel} cases"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """For each kind of call, what each release does."""
        table: dict[str, dict[str, str]] = {}
        releases: list[str] = []
        for one in results:
            if one.subject not in ("faulty", "fixed") and one.verdict is not CaseVerdict.SKIPPED:
                if one.subject not in releases:
                    releases.append(one.subject)
                table.setdefault(self.describe(one.parameters), {})[one.subject] = behaviour_of(one)
        if not releases:
            return {}
        rows = [
            {"call": call, **{name: seen.get(name, "") for name in releases}} for call, seen in table.items()
        ]
        return {"finalize": rows}

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        shape = f"T={parameters['tokens']} E={parameters['experts']} K={parameters['top_k']}"
        kernel = "" if parameters["finalize"] == "normal" else " no_filling"
        ranks = f" rank {parameters['rank']}/{parameters['ranks']}" if parameters["ranks"] != 1 else ""
        return f"{shape} {parameters['ids']} {parameters['memory']}{kernel}{ranks}"


def _need_numpy() -> None:
    from importlib.util import find_spec

    if find_spec("numpy") is None:
        from moedoctor.results import UnavailableError

        raise UnavailableError("the restated sort needs numpy: pip install numpy")
