"""MD016: ids of -1, which mean "no expert", used as an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    CountFault,
    Measurement,
    RoutedParameters,
    claim,
    decide,
    untested,
)
from moedoctor.results import Crash, Observation, Scalar


class SentinelIdsParameters(RoutedParameters):
    """One point of the matrix: a batch in which some ids are -1."""

    use: Literal["expert_map", "gather", "row_map"] = Field(
        "expert_map",
        description="what the id indexes: the map to local ids, the experts themselves, or a map of rows",
    )
    tokens: int = Field(64, ge=2, le=16_384)
    experts: int = Field(32, ge=1, le=1024, description="of all ranks together")
    top_k: int = Field(4, ge=1, le=64)
    ranks: int = Field(1, ge=1, le=64)
    rank: int = Field(0, ge=0, le=63)
    slots: Literal["padding", "dropped"] = Field(
        "padding", description="-1 in the whole last quarter of the rows, or once in every row"
    )
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.use != "expert_map" and self.ranks > 1:
            yield f"ranks: {self.use} knows no ranks; expected use: expert_map"


# --- Claims: what the MoE paths that run here do with -1, by their own kernels --------------------------

_LAB = "moedoctor.faults.routing.sentinel_ids_lab"
UPSTREAM = ("TRITON bf16", "TRITON fp8", "MARLIN nvfp4", "MARLIN fp8")
NO_SENTINEL = "no -1"
"""The kind of ids that is the control of the others."""
IDS = (NO_SENTINEL, "padding rows of -1", "one slot of -1 a row")
Row = Mapping[str, Any]


@claim(
    "upstream_paths",
    measure=f"{_LAB}:measure_path",
    # A process for each path and kind of ids, so that a death loses no other figure.
    units=lambda subjects: tuple(f"{path}, {ids}" for path in UPSTREAM for ids in IDS),
    needs_gpu=True,
    thresholds=("max_rows",),
)
def judge_upstream_paths(given: ClaimCases) -> ClaimJudgement:
    """Judge the rows that are wrong if some ids are -1, path by path. A path that died has no right row.

    Only a path that is right without any -1 can show something about -1. Others are named, with the reason.
    """
    rows = [_read_row(measurement) for measurement in given.measurements]
    ran = [row for row in rows if "skipped" not in row]
    bad = [row for row in ran if "death" in row or not given.keeps("max_rows", row["rows_wrong"])]
    broken = [row for row in bad if row["ids"] == NO_SENTINEL]
    broken_paths = {row["path"] for row in broken}
    sound = {row["path"] for row in ran if row["ids"] == NO_SENTINEL} - broken_paths
    tried = [row for row in ran if row["ids"] != NO_SENTINEL and row["path"] in sound]
    wrong = [row for row in tried if row in bad]
    parts = [_describe_row(row) for row in wrong]
    if tried and not wrong:
        paths = ", ".join(dict.fromkeys(row["path"] for row in tried))
        parts = [f"all rows right in {len(tried)} calls of {paths}"]
    parts += [f"{_describe_row(row)}, so it says nothing of -1" for row in broken]
    parts += dict.fromkeys(f"{row['path']} not run: {row['skipped']}" for row in rows if "skipped" in row)
    reason = _name_release(given) + "; ".join(parts)
    if not wrong and (broken or not tried):
        return untested(reason, {"rows": rows})
    return decide(not wrong, {"rows": rows}, reason)


@claim(
    "alignment",
    measure=f"{_LAB}:measure_alignment",
    units=lambda subjects: ("moe_align_block_size",),
    needs_gpu=True,
    thresholds=("max_slots",),
)
def judge_alignment(given: ClaimCases) -> ClaimJudgement:
    """Judge the empty pairs that the kernel puts into a block of a real expert, and real ones that it loses.

    Calls without any -1 are the control: if one of them is wrong, the others show nothing about -1.
    """
    rows = given.rows()
    bad = [
        row for row in rows if not given.keeps("max_slots", row["empty_slots_in_blocks"] + row["slots_lost"])
    ]
    control = [row for row in rows if not row["empty_slots"]]
    broken = [row for row in control if row in bad]
    reason = _name_release(given) + "; ".join(
        f"{row['call']}: {row['empty_slots_in_blocks']} of {row['empty_slots']} empty slots in an expert's "
        f"blocks, {row['slots_lost']} real slots lost"
        for row in rows
    )
    if broken:
        reason += "; wrong without any -1, so it says nothing of -1"
    if broken or not control or len(control) == len(rows):
        return untested(reason, {"rows": rows})
    return decide(not bad, {"rows": rows}, reason)


def _read_row(measurement: Measurement) -> dict[str, Any]:
    """Return what one process measured of its path and kind of ids, or why it measured nothing."""
    path, _, ids = measurement.unit.partition(", ")
    outcome = measurement.outcome
    if isinstance(outcome, Observation):
        return {"path": path, "ids": ids, **outcome.evidence["row"]}
    if isinstance(outcome, Crash):
        return {"path": path, "ids": ids, "death": outcome.message}
    return {"path": path, "ids": ids, "skipped": outcome.reason}


def _describe_row(row: Row) -> str:
    figure = row.get("death") or f"{row['rows_wrong']} of {row['rows']} rows wrong"
    return f"{row['path']}, {row['ids']}: {figure}"


def _name_release(given: ClaimCases) -> str:
    """Name the release that the figures are of, because the verdict holds for no other."""
    return next((f"vLLM {figures['vllm']}: " for figures in given.evidence() if figures.get("vllm")), "")


class SentinelIds(CountFault):
    """An id that means "no expert", taken for one."""

    id = "MD016"
    parameters = SentinelIdsParameters
    restated_on_cpu = True
    claims = (judge_upstream_paths, judge_alignment)
    symptoms: ClassVar = {
        "rows_wrong": "{} of {rows} rows hold a wrong sum",
        "empty_slots_given_to_an_expert": "{} empty slots go to expert {expert}",
    }
    right = "{rows} of {rows} rows are right"

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        rank = f" rank {parameters['rank']}/{parameters['ranks']}" if parameters["ranks"] != 1 else ""
        return f"{parameters['use']} {parameters['slots']}{rank}"
