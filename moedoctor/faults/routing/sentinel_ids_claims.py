"""What the MoE paths that run here make of -1 in topk_ids, by their own kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Crash, Observation

UPSTREAM = ("TRITON bf16", "TRITON fp8", "MARLIN nvfp4", "MARLIN fp8")
OURS = ("OURS bf16", "OURS fp8", "OURS nvfp4")
NO_SENTINEL = "no -1"
"""The kind of ids that is the control of the others."""
IDS = (NO_SENTINEL, "padding rows of -1", "one slot of -1 a row")
Limits = Mapping[str, float]


def units_of(paths: Sequence[str]) -> tuple[str, ...]:
    """A process for each path and kind of ids: a death takes no other figure with it."""
    return tuple(f"{path}, {ids}" for path in paths for ids in IDS)


def judge_paths(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Rows that are not right where some slots hold -1, path by path; one that died has none right.

    Only a path that is right without any -1 says something of -1. One that is not, or did not run, is named.
    """
    rows = [_row(one) for one in units]
    ran = [row for row in rows if "skipped" not in row]
    broken = [row for row in ran if row["ids"] == NO_SENTINEL and _is_bad(row, limits)]
    sound = {row["path"] for row in ran if row["ids"] == NO_SENTINEL} - {row["path"] for row in broken}
    tried = [row for row in ran if row["ids"] != NO_SENTINEL and row["path"] in sound]
    bad = [row for row in tried if _is_bad(row, limits)]
    said = [_said(row) for row in bad]
    if tried and not bad:
        said = [
            f"all rows right in {len(tried)} calls of {', '.join(dict.fromkeys(r['path'] for r in tried))}"
        ]
    said += [f"{_said(row)}, so it says nothing of -1" for row in broken]
    said += dict.fromkeys(f"{row['path']} not run: {row['skipped']}" for row in rows if "skipped" in row)
    verdict = ClaimVerdict.CONFIRMED if tried and not broken else ClaimVerdict.UNTESTED
    verdict = ClaimVerdict.REFUTED if bad else verdict
    return ClaimJudgement(verdict, {"rows": rows}, _release(units) + "; ".join(said))


def judge_align(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Empty slots that the kernel puts into a block of a real expert, and real ones that it loses.

    Calls without any -1 are the control: where one of them is not right, the others say nothing of -1.
    """
    seen = [one.outcome.evidence for one in units if isinstance(one.outcome, Observation)]
    rows = [row for evidence in seen for row in evidence["rows"]]
    bad = [row for row in rows if row["empty_slots_in_blocks"] + row["slots_lost"] > limits["max_slots"]]
    broken = [row for row in bad if not row["empty_slots"]]
    sound = any(not row["empty_slots"] for row in rows) and not broken
    said = "; ".join(
        f"{row['call']}: {row['empty_slots_in_blocks']} of {row['empty_slots']} empty slots in an expert's "
        f"blocks, {row['slots_lost']} real slots lost"
        for row in rows
    )
    if broken:
        said += "; wrong without any -1, so it says nothing of -1"
    tried = any(row["empty_slots"] for row in rows)
    verdict = ClaimVerdict.REFUTED if bad else ClaimVerdict.CONFIRMED
    verdict = verdict if tried and sound else ClaimVerdict.UNTESTED
    return ClaimJudgement(verdict, {"rows": rows}, _release(units) + said)


def _row(one: Measurement) -> dict[str, Any]:
    """What one process said of its path and kind of ids, or why it said nothing."""
    path, _, ids = one.unit.partition(", ")
    named: dict[str, Any] = {"path": path, "ids": ids}
    if isinstance(one.outcome, Observation):
        return {**named, **one.outcome.evidence["row"]}
    if isinstance(one.outcome, Crash):
        return {**named, "death": one.outcome.message}
    return {**named, "skipped": one.outcome.reason}


def _is_bad(row: Mapping[str, Any], limits: Limits) -> bool:
    return "death" in row or row["rows_wrong"] > limits["max_rows"]


def _said(row: Mapping[str, Any]) -> str:
    what = row.get("death") or f"{row['rows_wrong']} of {row['rows']} rows wrong"
    return f"{row['path']}, {row['ids']}: {what}"


def _release(units: Sequence[Measurement]) -> str:
    """The release that the figures are of, for a verdict is about no other."""
    seen = [one.outcome.evidence for one in units if isinstance(one.outcome, Observation)]
    return next((f"vLLM {one['vllm']}: " for one in seen if one.get("vllm")), "")


def _measure_path(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    from moedoctor.faults.routing import sentinel_ids_paths

    path, _, ids = unit.partition(", ")
    figures: dict[str, Any] = {"row": sentinel_ids_paths.path(path, ids, device)}
    return Observation({**figures, **(_vllm() if path in UPSTREAM else {})})


def _measure_align(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    from moedoctor.faults.routing import sentinel_ids_paths

    return Observation({"rows": sentinel_ids_paths.align(device), **_vllm()})


def _vllm() -> dict[str, str]:
    from moedoctor.upstream.releases.sentinel_probe import installed_release

    return {"vllm": installed_release()}


CLAIMS = (
    ClaimTest(
        "upstream_paths",
        judge_paths,
        _measure_path,
        lambda subjects: units_of(UPSTREAM),
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
        lambda subjects: units_of(OURS),
        needs_gpu=True,
        thresholds=("max_rows",),
    ),
)
