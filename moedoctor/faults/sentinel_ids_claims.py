"""What the MoE paths that run here make of -1 in topk_ids, by their own kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.base import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Crash, Observation

UPSTREAM = ("TRITON bf16", "TRITON fp8", "MARLIN nvfp4", "MARLIN fp8")
OURS = ("OURS bf16", "OURS fp8", "OURS nvfp4")
Limits = Mapping[str, float]


def judge_paths(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Rows that are not right where some slots hold -1, path by path; a path that died has none right."""
    rows: list[dict[str, Any]] = []
    for one in units:
        if isinstance(one.outcome, Observation):
            rows += [{"path": one.unit, **row} for row in one.outcome.evidence["rows"]]
        elif isinstance(one.outcome, Crash):
            rows.append({"path": one.unit, "ids": "", "death": one.outcome.message})
    ran = dict.fromkeys(row["path"] for row in rows)
    bad = [row for row in rows if "death" in row or row["rows_wrong"] > limits["max_rows"]]
    said = "; ".join(_said(row) for row in bad) or f"all rows right in {len(rows)} calls of {', '.join(ran)}"
    verdict = ClaimVerdict.REFUTED if bad else ClaimVerdict.CONFIRMED
    return ClaimJudgement(verdict, {"rows": rows}, said)


def judge_align(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Empty slots that the kernel puts into a block of a real expert, and real ones that it loses."""
    seen = [one.outcome.evidence for one in units if isinstance(one.outcome, Observation)]
    rows = [row for evidence in seen for row in evidence["rows"]]
    bad = [row for row in rows if row["empty_slots_in_blocks"] + row["slots_lost"] > limits["max_slots"]]
    said = "; ".join(
        f"{row['call']}: {row['empty_slots_in_blocks']} of {row['empty_slots']} empty slots in an expert's "
        f"blocks, {row['slots_lost']} real slots lost"
        for row in rows
    )
    return ClaimJudgement(ClaimVerdict.REFUTED if bad else ClaimVerdict.CONFIRMED, {"rows": rows}, said)


def _said(row: Mapping[str, Any]) -> str:
    if "death" in row:
        return f"{row['path']}: {row['death']}"
    return f"{row['path']}, {row['ids']}: {row['rows_wrong']} of {row['rows']} rows wrong"


def _measure_path(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    from moedoctor.faults import sentinel_ids_paths

    return Observation({"rows": sentinel_ids_paths.path(unit, device)})


def _measure_align(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    from moedoctor.faults import sentinel_ids_paths

    return Observation({"rows": sentinel_ids_paths.align(device)})


CLAIMS = (
    ClaimTest(
        "upstream_paths",
        judge_paths,
        _measure_path,
        lambda subjects: UPSTREAM,
        needs_gpu=True,
        thresholds=("max_rows",),
    ),
    ClaimTest(
        "alignment",
        judge_align,
        _measure_align,
        lambda subjects: ("moe_align_block_size",),
        needs_gpu=True,
        thresholds=("max_slots",),
    ),
    ClaimTest(
        "our_path",
        judge_paths,
        _measure_path,
        lambda subjects: OURS,
        needs_gpu=True,
        thresholds=("max_rows",),
    ),
)
