"""What our catalogue says of MARLIN and input scales, and the engines that decide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Observation, Skip


def _measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Engines with MARLIN on the damaged checkpoint, whose input scales are all zero, and on a whole one."""
    from moedoctor.faults.quantization.checkpoint_engine import observe

    return observe("MD015", "marlin", repaired=False)


def _judge(
    results: Sequence[CaseResult], measured: Sequence[Measurement], thresholds: Mapping[str, float]
) -> ClaimJudgement:
    from moedoctor.faults.quantization.checkpoint_engine import judge

    outcome = next((one.outcome for one in measured), None)
    if not isinstance(outcome, Observation):
        why = outcome.reason if isinstance(outcome, Skip) else "the engines died"
        return ClaimJudgement(ClaimVerdict.UNTESTED, reason=why)
    seen = outcome.evidence
    found = judge(seen)
    if found.verdict is CaseVerdict.ERROR:
        return ClaimJudgement(ClaimVerdict.UNTESTED, seen, f"{found.figure}: {found.reason}")
    holds = found.verdict is CaseVerdict.CLEAN
    verdict = ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, seen, f"vLLM {seen['vllm']}, {seen['moe_backend']}: {found.figure}")


CLAIMS = (ClaimTest("marlin_reads_none", _judge, _measure, needs_gpu=True),)
