"""What is said of crash 2 of vllm#37883, and what runs of vLLM's own operator say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Tier


def _at_kernel(cases: Sequence[CaseResult]) -> list[CaseResult]:
    return [one for one in cases if one.tier is Tier.KERNEL and "config_holds" in one.evidence]


def judge_marlin_refuses(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Marlin's own operator, given scales in host memory."""
    ran = [one for one in _at_kernel(cases) if one.evidence["config_holds"] == "host memory"]
    if not ran:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "vLLM's Marlin operator did not run here")
    said = sorted({str(one.evidence["error"]) for one in ran})
    holds = all("b_scales is not on GPU" in text for text in said)
    verdict = ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, {"errors": said, "runs": len(ran)}, "; ".join(said))


def judge_stale_reference(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Whether it is the config's reference: Marlin runs where that is in device memory, weights offloaded."""
    ran = _at_kernel(cases)
    stale = [one for one in ran if one.evidence["config_holds"] == "host memory"]
    fresh = [one for one in ran if one.evidence["config_holds"] == "device memory"]
    if not stale or not fresh:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "vLLM's Marlin operator did not run here both ways")
    holds = all(one.evidence["error"] for one in stale) and all(one.evidence["same_bits"] for one in fresh)
    said = (
        "with the scales' parameter in host memory it refuses, although forward runs with copies on the GPU;"
        " with it in device memory it gives the same bits, weights offloaded all the same"
    )
    return ClaimJudgement(
        ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED,
        {"stale": len(stale), "fresh": len(fresh)},
        said if holds else "where the config's scales were did not decide it",
    )


CLAIMS = (
    ClaimTest("marlin_refuses", judge_marlin_refuses),
    ClaimTest("stale_reference", judge_stale_reference),
)
