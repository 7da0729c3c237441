"""MD019: running expert groups one by one through a shared workspace overwrites the sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    Fault,
    Judgement,
    RoutedParameters,
    claim,
    decide,
    list_tiers,
    only,
)
from moedoctor.results import Case, CaseVerdict, Observation, Tier, find_worst

LAB = "moedoctor.faults.cache.workspace_aliasing_lab"
RESULTS = {"what apply returns": False, "the result before apply copies it": True}
"""The measured result -> True if it is taken before the kernel copies it."""


class WorkspaceAliasingParameters(RoutedParameters):
    alias: Literal["sum", "results", "input"] = Field(
        "sum",
        description="what shares memory with the kernel's output: the running sum, the results that are "
        "kept to be added at the end, or the input",
    )
    groups: int = Field(2, ge=2, le=16)
    experts: int = Field(32, ge=2, le=512)
    top_k: int = Field(8, ge=1, le=64)
    tokens: int = Field(64, ge=1, le=4096)
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.experts % self.groups:
            yield f"groups: {self.groups} does not divide experts {self.experts}"


@claim(
    "modular_kernel",
    measure=f"{LAB}:measure_modular_kernel",
    units=only("installed"),
    needs_gpu=True,
    needs="an installed vLLM",
    thresholds=("min_share",),
)
def judge_modular_kernel(cases: ClaimCases) -> ClaimJudgement:
    """Tokens are wrong because the next group overwrites what vLLM's modular kernel returned."""
    (measured,) = cases.evidence()
    wrong, rows = (
        {result: sum(row[key] for row in measured["rows"] if row["what"] == result) for result in RESULTS}
        for key in ("wrong_rows", "rows")
    )
    figure = "; ".join(f"{result}: {wrong[result]} of {rows[result]} tokens wrong" for result in RESULTS)
    returned = next(iter(RESULTS))
    return decide(cases.keeps("min_share", wrong[returned] / rows[returned]), measured, figure)


class WorkspaceAliasing(Fault):
    """A sum over expert groups that its own kernel overwrites."""

    id = "MD019"
    parameters = WorkspaceAliasingParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.KERNEL)
    summary = "{alias} {groups} groups E={experts}"
    claims = (judge_modular_kernel,)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        rows, wrong, groups = evidence["rows"], evidence["wrong_rows"], case.parameters["groups"]
        if not wrong:
            return Judgement(CaseVerdict.CLEAN, f"{groups} groups: 0 of {rows} tokens wrong")
        error = find_worst(evidence["worst_error"])
        figure = f"{groups} groups: {wrong} of {rows} tokens wrong, by up to {error:.0%}"
        if evidence["same_memory"]:
            figure += f"; {evidence['same_memory']} of {groups} results at the first one's address"
        return Judgement(CaseVerdict.REPRODUCED, figure)
