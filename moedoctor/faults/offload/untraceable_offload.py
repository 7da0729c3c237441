"""MD005: `state_dict()` in forward cannot be traced by Dynamo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, Parameters, claim, decide, untested
from moedoctor.faults.offload import engine_table
from moedoctor.interfaces import ClaimJudgement, ClaimTest, Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier, worst

FAILING = "2.10.0 to 2.12.1 and 2.14.0 to 2.15.0"
"""The releases of torch whose Dynamo refuses: both ends of each range have a stored report."""
LAB = "moedoctor.faults.offload.untraceable_offload_lab"


class UntraceableOffloadParameters(Parameters):
    """One point of the matrix."""

    compiler: Literal["eager", "aot_eager", "inductor"] = Field(
        "eager", description="the backend of torch.compile; Dynamo traces before any of them"
    )
    layers: int = Field(4, ge=3, le=64)
    experts: int = Field(8, ge=2, le=1024)
    hidden: int = Field(64, ge=16, le=8192)
    intermediate: int = Field(32, ge=16, le=8192)
    seed: int = Field(0, ge=0)
    engine: Literal["compiled"] | None = Field(
        None, description="real engines in this mode instead: no offload, and offload without UVA"
    )


Rows = Mapping[str, Mapping[str, Any]]
"""The name of a way to run the stack -> its figures."""


def _bandwidth(figures: Evidence, ways: Rows) -> tuple[float, str]:
    """GB/s of weights over a whole pass, compared with one large pinned copy alone."""
    ours, alone = ways["ours"]["gb_per_s"], figures["pinned_gb_per_s"]["median"]
    return ours / alone, f"{ours:.1f} of {alone:.1f} GB/s, {ours / alone:.1%}"


def _against_functional_call(figures: Evidence, ways: Rows) -> tuple[float, str]:
    """The functional_call path from pageable memory over ours from pinned memory, which decides.

    The reason also gives both from pinned memory, and both from pageable memory if that was measured, for
    machines that cannot pin.
    """
    pageable = ways["functional_call"]["over_ours"]["median"]
    pinned = ways["functional_call_pinned"]["over_ours"]["median"]
    reason = (
        f"ours from pinned memory is {pageable:.2f} times as fast as it is from pageable memory,"
        f" {pinned:.2f} times as fast as it is from pinned memory"
    )
    if "ours_unpinned" in ways:
        ours, theirs = (ways[way]["ms"]["median"] for way in ("ours_unpinned", "functional_call"))
        reason += f"; both from pageable memory: {theirs / ours:.2f} times as fast"
    return pageable, reason


def _not_slower(figures: Evidence, ways: Rows) -> tuple[float, str]:
    """The time of vLLM's path over ours."""
    (way,) = (name for name in figures["whose"] if name != "ours")
    ratio = ways[way]["over_ours"]
    spread = f"{ratio['median']:.3f} of our time ({ratio['p20']:.3f}–{ratio['p80']:.3f})"
    return ratio["median"], f"{way} ({figures['whose'][way]}): {spread}"


def _one_token(figures: Evidence, ways: Rows) -> tuple[float, str]:
    """If few experts are used, the path that reads only those is faster than ours."""
    ratio, whose = ways["uva"]["over_ours"]["median"], figures["whose"]["uva"]
    return ratio, f"uva ({whose}): {ratio:.3f} of our time; offload(access='view') does the same"


def _resident(figures: Evidence, ways: Rows) -> tuple[float, str]:
    """The stack after an offload that had nothing to do, over the stack alone."""
    ratio = ways["ours_budget_0"]["over_ours"]
    low, median, high = (ratio[name] - 1 for name in ("p20", "median", "p80"))
    return abs(median), f"{median:+.2%} ({low:+.2%} to {high:+.2%})"


def speed_claim(key: str, threshold: str, judge: Callable[[Evidence, Rows], tuple[float, str]]) -> ClaimTest:
    """Make a claim that a figure keeps `threshold`. `judge` returns the figure and the reason.

    `moedoctor.bench.offload` measures on a GPU, peer and ours in turn. A way with a wrong result is not
    timed: if it is ours, the claim is refuted, otherwise untested.
    """

    def judge_right_results(given: ClaimCases) -> ClaimJudgement:
        (figures,) = given.evidence()
        wrong = [way for way, right in figures["right"].items() if not right]
        if wrong:
            reason = f"wrong result, not timed: {', '.join(wrong)}"
            ours = any(way.startswith("ours") for way in wrong)
            return decide(False, figures, reason) if ours else untested(reason, figures)
        figure, reason = judge(figures, {row["way"]: row for row in figures["rows"]})
        evidence = {**figures, "share": figure} if key == "bandwidth" else figures
        return decide(given.keeps(threshold, figure), evidence, reason)

    return claim(
        key,
        measure=f"{LAB}:speed",
        units=lambda subjects: (key,),
        needs_gpu=True,
        thresholds=(threshold,),
    )(judge_right_results)


class UntraceableOffload(Fault):
    """A compiled forward gathers its weights by `state_dict()`."""

    id = "MD005"
    parameters = UntraceableOffloadParameters
    tiers = {
        "faulty": (Tier.MODEL, Tier.ENGINE),
        "fixed": (Tier.MODEL, Tier.ENGINE),
        "installed": (Tier.LIBRARY,),
        "vllm": (Tier.LIBRARY,),
    }
    lab = LAB
    claims = (
        speed_claim("bandwidth", "min_share", _bandwidth),
        speed_claim("against_functional_call", "min_speedup", _against_functional_call),
        speed_claim("against_uva", "min_ratio", _not_slower),
        speed_claim("against_prefetch", "min_ratio", _not_slower),
        speed_claim("one_token", "max_ratio", _one_token),
        speed_claim("resident", "max_share", _resident),
    )

    def has_point(self, tier: Tier, parameters: Mapping[str, Scalar]) -> bool:
        return (parameters["engine"] is not None) == (tier is Tier.ENGINE)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        if case.tier is Tier.ENGINE:
            return engine_table.judge(evidence)
        torch = f"torch {evidence['torch']}"
        if evidence["error"]:
            return Judgement(CaseVerdict.REPRODUCED, f"{torch}: {evidence['telling_line']}")
        if evidence["same_bits"]:
            return Judgement(CaseVerdict.CLEAN, f"{torch}: one graph, the same bits")
        distance, wrong = worst(evidence["distance"]), worst(evidence["wrong_weights_distance"])
        norms = (
            f"the norm of the difference is {distance:.1g}, with one layer's weights wrong it is {wrong:.1g}"
        )
        if math.isfinite(distance) and distance <= float(evidence["allowed_distance"]):
            figure = f"{torch}: one graph, the same numbers except for rounding: {norms}"
            return Judgement(CaseVerdict.CLEAN, figure)
        figure = f"compiles, and gives other numbers than without offload: {norms}"
        return Judgement(CaseVerdict.REPRODUCED, figure)

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """If Dynamo traced the control in every case, this torch does not have the failure."""
        controls = [case.evidence for case in results if case.subject == "faulty" and case.tier is Tier.MODEL]
        if not controls or any(control.get("graphs") != 1 or control.get("error") for control in controls):
            return None
        torch = controls[0]["torch"]
        return f"Dynamo of torch {torch} traces state_dict(); the failure was seen with torch {FAILING}"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return what Dynamo of this torch answers to the control."""
        for case in results:
            if case.subject == "faulty" and "torch" in case.evidence:
                dynamo = case.evidence["telling_line"] or "traces it"
                return {"torch": case.evidence["torch"], "dynamo": dynamo}
        return {}

    def describe(self, parameters: Any) -> str:
        if parameters["engine"] is not None:
            return f"engines, {parameters['engine']}"
        return f"torch.compile with {parameters['compiler']}, {parameters['layers']} MoE layers"
