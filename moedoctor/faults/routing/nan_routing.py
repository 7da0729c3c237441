"""MD001: NaN router logits give one token the same expert K times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moedoctor.faults.routing.nan_routing_claims import CLAIMS
from moedoctor.interfaces import Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Tier

_COUNTED = (
    "nan_rows",
    "duplicates_from_nan",
    "rows_with_nonfinite_weights",
    "clean_rows",
    "clean_rows_with_duplicates",
    "clean_rows_wrong",
)
"""Columns of the conclusions, summed over the cases of a release."""


class NanRoutingParameters(BaseModel):
    """One point of the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    router: Literal["softmax", "sigmoid", "grouped"] = "softmax"
    tokens: int = Field(96, ge=1, le=65_536, description="rows of logits; every other one is clean")
    experts: int = Field(128, ge=1, le=1024)
    top_k: int = Field(8, ge=1, le=64)
    bias: Literal["none", "random", "negative"] = Field(
        "none", description="correction bias, for the choice only"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    renormalize: bool = True
    num_groups: int | None = Field(
        None, ge=1, le=64, description="groups of experts; the grouped router alone"
    )
    topk_groups: int | None = Field(None, ge=1, le=64, description="groups a token may use")
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> NanRoutingParameters:
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")
        if self.router != "grouped":
            if self.num_groups is not None or self.topk_groups is not None:
                raise ValueError("num_groups: only the grouped router has groups; expected router: grouped")
            return self
        if self.num_groups is None or self.topk_groups is None:
            raise ValueError("num_groups: the grouped router needs num_groups and topk_groups")
        if self.experts % self.num_groups:
            raise ValueError(f"num_groups: {self.num_groups} does not divide experts {self.experts}")
        if self.topk_groups > self.num_groups:
            raise ValueError(f"topk_groups: {self.topk_groups} is more than num_groups {self.num_groups}")
        if self.top_k > self.experts // self.num_groups * self.topk_groups:
            raise ValueError(f"top_k: {self.top_k} is more than the experts of {self.topk_groups} groups")
        return self


class NanRouting(Fault):
    """Duplicate expert ids from NaN router logits."""

    id = "MD001"
    parameters = NanRoutingParameters
    tiers = {
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.KERNEL,),
        "vllm": (Tier.KERNEL,),
    }
    claims = CLAIMS

    def faulty(self, case: Case) -> Any:
        from moedoctor.faults.routing.nan_routing_lab import FaultyRouting

        return {"greater-than argmax": FaultyRouting()}

    def fixed(self, case: Case) -> Any:
        from moedoctor.faults.routing.nan_routing_lab import FixedRouting

        return {policy: FixedRouting(policy) for policy in ("zero", "finite")}

    def installed(self, case: Case) -> Any:
        from moedoctor.upstream.releases.moe_kernels import MoeKernels

        return MoeKernels.installed()

    def observe(self, case: Case, implementation: Any) -> Observation:
        from moedoctor.faults.routing.nan_routing_lab import observe

        return observe(self.parameters.model_validate(case.parameters), case.device, implementation)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        seen = observation.evidence
        rows = seen["rows"]
        symptoms = [
            (seen["clean_rows_with_duplicates"], "are clean and hold a duplicate id: not because of NaN"),
            (seen["rows_with_duplicates"], "hold a duplicate id"),
            (seen["rows_out_of_range"], "hold an id out of range"),
            (seen["rows_with_nonfinite_weights"], "have a weight that is NaN or Inf"),
            (seen["clean_rows_wrong"], "are clean and differ from the reference"),
        ]
        said = [f"{count} of {rows} rows {what}" for count, what in symptoms if count]
        if said:
            return Judgement(CaseVerdict.REPRODUCED, said[0])
        return Judgement(CaseVerdict.CLEAN, f"0 of {rows} rows hold a duplicate id")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Over named releases: what each does to its rows, and the first release that NaN does not harm.

        Where clean rows hold duplicates too, those of the NaN rows have another cause and are not counted.
        """
        from packaging.version import Version

        releases: dict[str, dict[str, int]] = {}
        for one in results:
            if one.subject.startswith("vllm@") and "rows_with_duplicates" in one.evidence:
                sums = releases.setdefault(one.subject.removeprefix("vllm@"), dict.fromkeys(_COUNTED, 0))
                for key in _COUNTED:
                    if key in one.evidence:
                        sums[key] += one.evidence[key]
                if not one.evidence["clean_rows_with_duplicates"]:
                    sums["duplicates_from_nan"] += one.evidence["nan_rows_with_duplicates"]
        if not releases:
            return {}
        order = sorted(releases, key=Version)
        failing = [name for name in order if releases[name]["duplicates_from_nan"]]
        after = order[order.index(failing[-1]) + 1 :] if failing else []
        return {
            "releases": [{"release": name, **releases[name]} for name in order],
            "last_failing_release": failing[-1] if failing else None,
            "first_fixed_release": after[0] if after else None,
        }

    def describe(self, parameters: Any) -> str:
        shape = (
            f"{parameters['router']} E={parameters['experts']} K={parameters['top_k']} {parameters['dtype']}"
        )
        return shape if parameters["bias"] == "none" else f"{shape} {parameters['bias']} bias"
