"""What is said about MD012, and how it is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

E4M3_MAX = 448.0
SIZES = (1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 448.0, 1000.0, 10_000.0)


def _measure(unit: str, device: str, kernels: Mapping[str, str]) -> Observation:
    from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissingParameters
    from moedoctor.faults.quantization.kv_scales_missing_lab import observe, one

    errors = {}
    for size in SIZES:
        seen = observe(KvScalesMissingParameters.model_validate({"size": size}), one).evidence
        errors[f"{size:g}"] = {"scale_1": seen["error"], "computed": seen["computed_error"]}
    return Observation({"errors": errors})


def _judge(
    results: Sequence[CaseResult], measured: Sequence[Measurement], thresholds: Mapping[str, float]
) -> ClaimJudgement:
    found = next((one.outcome for one in measured if isinstance(one.outcome, Observation)), None)
    if found is None:
        return ClaimJudgement(ClaimVerdict.UNTESTED, reason="the measurement did not end")
    errors = found.evidence["errors"]
    worse = [
        float(size)
        for size, one in errors.items()
        if one["scale_1"] > thresholds["max_ratio"] * one["computed"]
    ]
    inside = [size for size in worse if 1 <= size <= E4M3_MAX]
    shown = ", ".join(f"{size:g}" for size in worse) or "none of the sizes tried"
    verdict = ClaimVerdict.REFUTED if inside or not worse else ClaimVerdict.CONFIRMED
    return ClaimJudgement(verdict, {"errors": errors, "worse_at": worse}, f"worse at {shown}")


def _judge_triton(
    results: Sequence[CaseResult], measured: Sequence[Measurement], thresholds: Mapping[str, float]
) -> ClaimJudgement:
    """TRITON_ATTN on the checkpoints with scales, in the cases that asked engines."""
    from moedoctor.faults.quantization.kv_scales_missing_engine import FLOOR, doubt

    found = [one.evidence["triton_attn"] for one in results if "triton_attn" in one.evidence]
    reasons = [why for one in found if (why := doubt(one)) is not None]
    if reasons or not found:
        why = reasons[0] if reasons else "no engine ran"
        return ClaimJudgement(ClaimVerdict.UNTESTED, reason=why)
    garbage = [
        one["tested_distance"] > max(FLOOR, thresholds["min_ratio"] * one["control_distance"])
        for one in found
    ]
    said = "; ".join(
        f"vLLM {one['vllm']}, {one['moe_backend']}: {one['tested_distance']:.0%} of the probability is moved "
        f"with the right scales, {one['control_distance']:.0%} with scales of 1.0 that fit"
        for one in found
    )
    verdict = ClaimVerdict.CONFIRMED if all(garbage) else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, {"engines": found}, said)


CLAIMS = (
    ClaimTest(key="good_in_range", judge=_judge, measure=_measure, thresholds=("max_ratio",)),
    ClaimTest(key="triton_garbage", judge=_judge_triton, thresholds=("min_ratio",)),
)
