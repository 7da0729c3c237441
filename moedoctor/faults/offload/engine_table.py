"""vllm#37883's table with and without the fix, put together from the cases of the engine tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Evidence, Tier
from moedoctor.upstream.engine.compare import NO_OFFLOAD, ROUNDING, SAME
from moedoctor.upstream.engine.offload_cells import CONTROLS, COPIES


def both(results: Sequence[CaseResult]) -> Evidence:
    """Each cell once: what happens in vLLM as it is, and what with the plug-in's fix. Empty without
    engines."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in results:
        if one.tier is not Tier.ENGINE:
            continue
        column = "without_fix" if one.subject == "faulty" else "with_fix"
        for cell in one.evidence.get("table", ()):
            key = (cell["backend"], cell["mode"], cell["experts"])
            row = rows.setdefault(key, {"backend": key[0], "mode": key[1], "experts": key[2]})
            row[column] = said(cell)
    if not rows:
        return {}
    order = [key for key in rows if key[2] not in CONTROLS]
    return {"table_of_vllm_37883": [rows[key] for key in order]}


def said(cell: dict[str, Any]) -> str:
    """A cell's outcome in a few words, with the error where it crashed."""
    outcome, detail = str(cell["outcome"]), str(cell["detail"])
    return (
        f"{outcome}: {detail}"[:110]
        if outcome.startswith(("crash", "other", "no ", ROUNDING))
        else f"{outcome}, {detail}"
    )


def marlin_crashes(
    results: Sequence[CaseResult], measured: Sequence[Measurement], thresholds: Any
) -> ClaimJudgement:
    """Whether NVFP4 on Marlin crashes without UVA in vLLM as it is, eager and compiled."""
    cells = [
        cell
        for one in results
        if one.tier is Tier.ENGINE and one.subject == "faulty"
        for cell in one.evidence.get("table", ())
        if cell["experts"] == COPIES and cell["backend"] == "NVFP4 MARLIN"
    ]
    if not cells:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "no engine ran")
    if any(cell["outcome"] == NO_OFFLOAD for cell in cells):
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "an engine offloaded nothing")
    crashed = [cell for cell in cells if str(cell["outcome"]).startswith("crash")]
    evidence = {
        "combinations": len(cells),
        "crashed": len(crashed),
        "cells": [{"mode": one["mode"], "outcome": said(one)} for one in cells],
    }
    verdict = ClaimVerdict.CONFIRMED if len(crashed) == len(cells) else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, evidence, f"{len(crashed)} of {len(cells)} combinations crash")


def same_tokens_with_fix(
    results: Sequence[CaseResult], measured: Sequence[Measurement], thresholds: Any
) -> ClaimJudgement:
    """Whether every cell with offload gives the control's tokens under the fix.

    A compiled cell that parts, and is in every bit what the same code gives with its weights on the GPU, is
    counted apart: it refutes as any other, and says that the weights are right.
    """
    cells = [
        cell
        for one in results
        if one.tier is Tier.ENGINE and one.subject == "fixed"
        for cell in one.evidence.get("table", ())
        if cell["experts"] not in CONTROLS
    ]
    if not cells:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "no engine ran")
    if any(cell["outcome"] == NO_OFFLOAD for cell in cells):
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "an engine offloaded nothing")
    same = sum(cell["outcome"] == SAME for cell in cells)
    rounded = [cell for cell in cells if cell["outcome"] == ROUNDING]
    evidence = {
        "cells": len(cells),
        "same_tokens": same,
        "same_logprobs": sum(cell["detail"].startswith("same logprobs") for cell in cells),
        "rounding": len(rounded),
        "same_bits_in_the_same_compiled_code": sum(
            cell.get("same_bits_in_the_same_code") is True for cell in cells
        ),
        "others": [
            {"backend": one["backend"], "mode": one["mode"], "experts": one["experts"], "outcome": said(one)}
            for one in cells
            if one["outcome"] != SAME
        ],
    }
    told = f"{same} of {len(cells)} cells give the same tokens, {evidence['same_logprobs']} the same logprobs"
    rest = f", {len(rounded)} those of the same compiled code with its weights on the GPU"
    verdict = ClaimVerdict.CONFIRMED if same == len(cells) else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, evidence, told + (rest if rounded else ""))
