"""MD005: `state_dict()` in forward cannot be traced by Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, Parameters, claim, decide, in_lab, untested
from moedoctor.faults.offload import engine_table
from moedoctor.interfaces import ClaimJudgement, ClaimTest, Fault, Judgement
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, Scalar, Tier

LAST_FAILING = "2.12.1"
"""The last torch whose Dynamo refuses. There are reports of 2.11.0, which refuses, and of 2.13.0, which does
not."""
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


Row = Mapping[str, Any]
"""The figures of one way to run the stack."""


def speed_claim(
    key: str, threshold: str
) -> Callable[[Callable[[ClaimCases, Evidence, Mapping[str, Row]], ClaimJudgement]], ClaimTest]:
    """Make a claim on speed of a function of (cases, figures, figures of each way by its name).

    `moedoctor.bench.offload` measures them on a GPU, peer and ours in turn. A way with a wrong result is not
    timed: if it is ours, the claim is refuted, otherwise untested.
    """

    def decorate(judge: Callable[[ClaimCases, Evidence, Mapping[str, Row]], ClaimJudgement]) -> ClaimTest:
        def judge_right_results(given: ClaimCases) -> ClaimJudgement:
            (figures,) = given.evidence()
            wrong = [way for way, right in figures["right"].items() if not right]
            if not wrong:
                return judge(given, figures, {row["way"]: row for row in figures["rows"]})
            reason = f"wrong result, not timed: {', '.join(wrong)}"
            if any(way.startswith("ours") for way in wrong):
                return decide(False, figures, reason)
            return untested(reason, figures)

        judge_right_results.__doc__ = judge.__doc__
        return claim(
            key,
            measure=in_lab(f"{LAB}:speed"),
            units=lambda subjects: (key,),
            needs_gpu=True,
            thresholds=(threshold,),
        )(judge_right_results)

    return decorate


@speed_claim("bandwidth", "min_share")
def bandwidth(given: ClaimCases, figures: Evidence, ways: Mapping[str, Row]) -> ClaimJudgement:
    """GB/s of weights over a whole pass, compared with one large pinned copy alone."""
    ours, alone = ways["ours"]["gb_per_s"], figures["pinned_gb_per_s"]["median"]
    share = ours / alone
    reason = f"{ours:.1f} of {alone:.1f} GB/s, {share:.1%}"
    return decide(given.keeps("min_share", share), {**figures, "share": share}, reason)


@speed_claim("against_functional_call", "min_speedup")
def against_functional_call(given: ClaimCases, figures: Evidence, ways: Mapping[str, Row]) -> ClaimJudgement:
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
    return decide(given.keeps("min_speedup", pageable), figures, reason)


def _not_slower(given: ClaimCases, figures: Evidence, ways: Mapping[str, Row]) -> ClaimJudgement:
    """The time of vLLM's path over ours."""
    (way,) = (name for name in figures["whose"] if name != "ours")
    ratio = ways[way]["over_ours"]
    reason = (
        f"{way} ({figures['whose'][way]}): {ratio['median']:.3f} of our time"
        f" ({ratio['p20']:.3f}–{ratio['p80']:.3f})"
    )
    return decide(given.keeps("min_ratio", ratio["median"]), figures, reason)


against_uva = speed_claim("against_uva", "min_ratio")(_not_slower)
against_prefetch = speed_claim("against_prefetch", "min_ratio")(_not_slower)


@speed_claim("one_token", "max_ratio")
def one_token(given: ClaimCases, figures: Evidence, ways: Mapping[str, Row]) -> ClaimJudgement:
    """If few experts are used, the path that reads only those is faster than ours."""
    ratio = ways["uva"]["over_ours"]["median"]
    whose = figures["whose"]["uva"]
    reason = f"uva ({whose}): {ratio:.3f} of our time; offload(access='view') does the same"
    return decide(given.keeps("max_ratio", ratio), figures, reason)


@speed_claim("resident", "max_share")
def resident(given: ClaimCases, figures: Evidence, ways: Mapping[str, Row]) -> ClaimJudgement:
    """The stack after an offload that had nothing to do, over the stack alone."""
    ratio = ways["ours_budget_0"]["over_ours"]
    reason = f"{ratio['median'] - 1:+.2%} ({ratio['p20'] - 1:+.2%} to {ratio['p80'] - 1:+.2%})"
    return decide(given.keeps("max_share", abs(ratio["median"] - 1)), figures, reason)


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
    claims = (bandwidth, against_functional_call, against_uva, against_prefetch, one_token, resident)

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
        distance, wrong = evidence["distance"], evidence["wrong_weights_distance"]
        norms = (
            f"the norm of the difference is {distance:.1g}, with one layer's weights wrong it is {wrong:.1g}"
        )
        if distance <= evidence["allowed_distance"]:
            return Judgement(
                CaseVerdict.CLEAN, f"{torch}: one graph, the same numbers except for rounding: {norms}"
            )
        return Judgement(
            CaseVerdict.REPRODUCED, f"compiles, and gives other numbers than without offload: {norms}"
        )

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """If Dynamo traced the control in every case, this torch does not have the failure."""
        controls = [case for case in results if case.subject == "faulty" and case.tier is Tier.MODEL]
        traced = [
            case for case in controls if case.evidence.get("graphs") == 1 and not case.evidence.get("error")
        ]
        if not controls or len(traced) != len(controls):
            return None
        torch = controls[0].evidence["torch"]
        return f"Dynamo of torch {torch} traces state_dict(); the failure needs torch {LAST_FAILING} or older"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return what Dynamo of this torch answers to the control."""
        controls = [case for case in results if case.subject == "faulty" and "torch" in case.evidence]
        if not controls:
            return {}
        first = controls[0].evidence
        return {"torch": first["torch"], "dynamo": first["telling_line"] or "traces it"}

    def describe(self, parameters: Any) -> str:
        if parameters["engine"] is not None:
            return f"engines, {parameters['engine']}"
        return f"torch.compile with {parameters['compiler']}, {parameters['layers']} MoE layers"
