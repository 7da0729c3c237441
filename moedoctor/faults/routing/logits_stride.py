"""MD024: a top-k that ignores how far apart the rows of the router logits are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    CountFault,
    RoutedParameters,
    claim,
    decide,
    list_tiers,
    untested,
)
from moedoctor.results import Tier


class LogitsStrideParameters(RoutedParameters):
    """One point of the matrix: logits [tokens, experts] in rows of `width` numbers."""

    router: Literal["softmax", "sigmoid"] = "softmax"
    tokens: int = Field(48, ge=2, le=65_536)
    experts: int = Field(60, ge=1, le=1024)
    width: int = Field(64, ge=2, le=2048, description="numbers in memory from one row to the next")
    top_k: int = Field(4, ge=1, le=64)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.width <= self.experts:
            yield f"width: {self.width} leaves no padding; expected more than experts {self.experts}"


@claim("ignores_stride", thresholds=("max_share",))
def judge_ignores_stride(given: ClaimCases) -> ClaimJudgement:
    """Judge the share of rows that releases' kernels route right, the first row left out, case by case."""
    cases = given.select(tier=Tier.KERNEL)
    if not cases:
        return untested("no kernel of a release ran")
    shares = {
        f"{case.subject} {LogitsStride.summary.format(**case.parameters)}": (
            1 - case.evidence["rows_wrong"] / (case.evidence["rows"] - 1)
        )
        for case in cases
    }
    right = [name for name, share in shares.items() if not given.keeps("max_share", share)]
    reason = f"{len(cases) - len(right)} of {len(cases)} cases read rows at the wrong place"
    return decide(not right, {"share_of_rows_right": shares}, reason)


class LogitsStride(CountFault):
    """Experts of a neighboring row, chosen without an error."""

    id = "MD024"
    together = 4
    parameters = LogitsStrideParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.KERNEL, vllm=Tier.KERNEL)
    summary = "{router} E={experts} in rows of {width} K={top_k} {dtype}"
    claims = (judge_ignores_stride,)
    symptoms: ClassVar = {
        "rows_out_of_range": "{} of {rows} rows hold an id out of range",
        "rows_wrong": "{} of {rows} rows have the experts of other logits",
    }
    right = "{rows} of {rows} rows have their own experts"
