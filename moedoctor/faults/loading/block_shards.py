"""MD022: shards of experts that are no multiple of a quantization block, or of MARLIN's tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, ClaimJudgement, Parameters, claim, decide, untested
from moedoctor.faults.loading.loading import LoadingFault
from moedoctor.results import CaseVerdict, Scalar, Tier


class BlockShardsParameters(Parameters):
    """Experts of one layer with FP8 blocks of 128 × 128, or with FP4 for MARLIN, shared by some ranks."""

    loader: Literal["0.28.0", "0.33.0", "MARLIN 0.23.0"] = Field(
        "0.33.0", description="whose loader or kernel the control restates"
    )
    intermediate: int = Field(192, ge=64, le=4096, multiple_of=16)
    tensor_parallel: int = Field(1, ge=1, le=8)
    expert_parallel: bool = Field(False, description="each rank holds whole experts")
    hidden: int = Field(256, ge=128, le=1024, multiple_of=128)
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.intermediate % self.tensor_parallel:
            yield f"tensor_parallel: {self.tensor_parallel} does not divide intermediate {self.intermediate}"


@claim("cannot_load_320")
def judge_320(cases: ClaimCases) -> ClaimJudgement:
    """The claim holds if the installed vLLM loads none of the three sizes."""
    asked = {
        int(str(case.parameters["tensor_parallel"])): case.verdict is CaseVerdict.REPRODUCED
        for case in cases.select(subject="installed", tier=Tier.LIBRARY)
        if case.parameters["intermediate"] == 320
    }
    if sorted(asked) != [2, 4, 8]:
        return untested("needs an installed vLLM, which is asked with each of the three sizes")
    loads = ", ".join(str(size) for size, stops in asked.items() if not stops) or "none"
    return decide(all(asked.values()), {"loads_with": loads}, f"loads with TP {loads} of 2, 4 and 8")


class BlockShards(LoadingFault):
    """A loader or kernel that refuses a shard, or repeats the scales of a partial block too often."""

    id = "MD022"
    parameters = BlockShardsParameters
    summary = "I={intermediate} TP={tensor_parallel} EP={expert_parallel}, loader of {loader}"
    lab = "moedoctor.faults.loading.block_shards_lab"
    claims = (judge_320,)

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        """At the tier library, return True for a few sizes: each question takes seconds."""
        size = parameters["intermediate"], parameters["tensor_parallel"]
        few = size in ((192, 1), (320, 2), (320, 4), (320, 8)) and not parameters["expert_parallel"]
        return tier is Tier.MODEL or (parameters["loader"] == "0.33.0" and few)
