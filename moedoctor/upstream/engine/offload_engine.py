"""The engine tier of the offload failures: cells in real engines side by side, each judged against the engine
without offload."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moedoctor.interfaces import Judgement
from moedoctor.results import CaseVerdict, Observation, UnavailableError
from moedoctor.upstream.engine.compare import (
    NO_OFFLOAD,
    OTHER,
    ROUNDING,
    SAME,
    compare,
    logprob_distance,
    short_error,
)
from moedoctor.upstream.engine.offload_cells import (
    BACKENDS,
    CONTROLS,
    COPIES,
    ON_GPU,
    SAME_GRAPH,
    WEIGHTS,
    Cell,
    cells,
    request,
)

if TYPE_CHECKING:
    from moedoctor.upstream.engine.engine import EngineResult

PARALLEL = 16
"""Engines at once: each takes one core while it starts and about 1 GiB of the GPU."""
OFFLOADER = "UVAOffloader"
"""What vLLM's log calls the offloader of `--cpu-offload-gb`, with UVA and without."""


def need_engine() -> None:
    """Raises UnavailableError, which skips the case, where no engine can run."""
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError("vllm is not installed here")
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("needs an NVIDIA GPU that torch can use")


def observe(backends: Sequence[str], mode: str, places: Sequence[str], fixes: str) -> Observation:
    """Run all cells and compare each with the control of its backend. Runs in the child of a case."""
    import tempfile
    from pathlib import Path

    from moedoctor.reference.checkpoints import write_qwen3_moe
    from moedoctor.upstream.engine.engine import run_engines

    need_engine()
    chosen = cells(backends, mode, places, fixes)
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folders = {
            scheme: write_qwen3_moe(Path(name) / scheme, scheme=scheme)
            for scheme in sorted({BACKENDS[one][0] for one in backends})
        }
        requests = [request(one, str(folders[BACKENDS[one.backend][0]])) for one in chosen]
        results = run_engines(requests, parallel=PARALLEL)
    return Observation(evidence(chosen, results))


def evidence(chosen: Sequence[Cell], results: Sequence[EngineResult]) -> dict[str, Any]:
    """The cells as a table, counted, with the errors in full."""
    by_place = {(cell.backend, cell.place): result for cell, result in zip(chosen, results, strict=True)}
    rows, errors = [], []
    for cell, result in zip(chosen, results, strict=True):
        control = by_place.get((cell.backend, ON_GPU))
        outcome, detail = compare(result, control, is_control=cell.place == ON_GPU)
        same_code = None
        if cell.place == SAME_GRAPH and result.error is None:
            outcome = "control" if _served_from_gpu(result) else "no control"
        elif outcome in (SAME, OTHER) and _unfixed(cell, result):
            outcome, detail = "no fix", "it was asked for, and the log does not say that it is active"
        elif cell.place not in CONTROLS and (why := not_offloaded(result)) is not None:
            outcome, detail = NO_OFFLOAD, why
        elif cell.place == COPIES and (second := by_place.get((cell.backend, SAME_GRAPH))) is not None:
            outcome, detail, same_code = _decide(outcome, detail, result, second)
        rows.append(
            {
                "backend": cell.backend,
                "chosen": result.log.moe_backend or "not logged",
                "mode": cell.mode,
                "experts": cell.place,
                "offloaded": result.log.offloaded_by_us,
                "offloader": result.log.offloader,
                "host_bytes": _probed(result, "host_bytes"),
                "parameter_bytes": _probed(result, "parameter_bytes"),
                "same_bits_in_the_same_code": same_code,
                "outcome": outcome,
                "detail": detail,
                "seconds": result.seconds.get("total"),
            }
        )
        if result.error is not None:
            errors.append(_error(cell, result))
    offloaded = [row for row in rows if row["experts"] not in CONTROLS]
    found: dict[str, Any] = {
        "vllm": next((one.version for one in results if one.version), None),
        "fixes": next((one.log.fixes for one in results if one.log.fixes), None),
        "refused": sorted({said for one in results for said in one.log.refused}),
        "cells": len(offloaded),
        "controls_wrong": sum(row["experts"] in CONTROLS and row["outcome"] != "control" for row in rows),
        **{
            name: sum(str(row["outcome"]).startswith(start) for row in offloaded)
            for name, start in (
                ("same", SAME),
                ("other_tokens", OTHER),
                ("crashed", "crash"),
                ("rounding", ROUNDING),
                ("not_fixed", "no fix"),
                ("not_offloaded", NO_OFFLOAD),
            )
        },
        "table": rows,
    }
    if errors:
        found["errors"] = errors
    return found


def _unfixed(cell: Cell, result: EngineResult) -> bool:
    """Whether the right answer of an engine without UVA is not the fix's doing."""
    return bool(cell.fixes) and cell.place in (COPIES, WEIGHTS) and result.log.fixes is None


def not_offloaded(result: EngineResult) -> str | None:
    """Why an engine that was to offload shows nothing of offload; None where it did, or died.

    The log's figure does not say it: it is in GiB, and 0.0 for a small model.
    """
    if result.error is not None:
        looking = result.error.stage == "probe"
        return f"what it offloaded was not seen: {short_error(result)}" if looking else None
    if result.log.offloader != OFFLOADER:
        return f"the log says {result.log.offloader or 'nothing'} of its offloader, expected {OFFLOADER}"
    if not _probed(result, "host_bytes"):
        return "no byte of the weights is on the host"
    return None


def _probed(result: EngineResult, name: str) -> int | None:
    found = (result.probe or {}).get(name)
    return None if found is None else int(found)


def _error(cell: Cell, result: EngineResult) -> dict[str, Any]:
    assert result.error is not None
    lines = result.error.message.splitlines()
    return {
        "cell": cell.label,
        "kind": result.error.kind,
        "stage": result.error.stage,
        "message": result.error.message[:600],
        "frames": " | ".join(result.error.frames[-3:]),
        "offloader_frame": next((_frame(one) for one in lines if "offloader/" in one), None),
    }


def _frame(line: str) -> str:
    """A traceback's line about vLLM's file, without the folder that vLLM is installed in."""
    return re.sub(r'"[^"]*/(?=vllm/)', '"', line.strip())


def _served_from_gpu(result: EngineResult) -> bool:
    """Whether the engine generated with weights that it had taken off the host; the probe counts them."""
    return bool(result.log.fixes and result.probe and result.probe["bytes"])


def _decide(
    outcome: str, detail: str, result: EngineResult, second: EngineResult
) -> tuple[str, str, bool | None]:
    """A compiled cell of the fix, beside the engine with the same code and its weights on the GPU; last,
    whether the two agree in every bit that they report.

    Only then are other tokens than the first control's rounding.
    """
    if outcome not in (SAME, OTHER) or second.error is not None or not _served_from_gpu(second):
        return outcome, detail, None
    same = result.tokens == second.tokens and logprob_distance(result, second) == 0
    told = f"{detail}; {'same' if same else 'other'} tokens and logprobs {SAME_GRAPH}"
    return (ROUNDING if outcome == OTHER and same else outcome), told, same


def judge(seen: Mapping[str, Any]) -> Judgement:
    """Reproduced where an engine with offload crashes or gives other tokens than the one without."""
    if seen["controls_wrong"]:
        return Judgement(
            CaseVerdict.ERROR, "no control", f"{seen['controls_wrong']} engines without offload did not run"
        )
    if seen["not_fixed"]:
        said = f"{seen['not_fixed']} engines ran without the fix that they were to have"
        return Judgement(CaseVerdict.ERROR, "the fix was not active", said)
    if seen["not_offloaded"]:
        first = next(row for row in seen["table"] if row["outcome"] == NO_OFFLOAD)
        said = f"{seen['not_offloaded']} engines: {first['backend']}, {first['experts']}: {first['detail']}"
        return Judgement(CaseVerdict.ERROR, "nothing was offloaded", said)
    bad = seen["crashed"] + seen["other_tokens"]
    if not bad:
        rounded = seen["rounding"]
        all_of = f"all {seen['cells']}" if not rounded else f"{seen['same']} of {seen['cells']}"
        said = f"{all_of} cells give the tokens of the run without offload"
        rest = f", {rounded} those of the same compiled code with its weights on the GPU" if rounded else ""
        return Judgement(CaseVerdict.CLEAN, said + rest)
    first = next(row for row in seen["table"] if str(row["outcome"]).startswith(("crash", OTHER)))
    said = f"{bad} of {seen['cells']} cells fail: {first['backend']}, {first['experts']}: {first['detail']}"
    return Judgement(CaseVerdict.REPRODUCED, said[:200])
