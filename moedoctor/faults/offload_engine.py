"""The engine tier of the offload failures: vllm#37883's table, cell by cell, in real engines side by side.

A cell is a checkpoint with its MoE backend, compiled or eager, and where the experts are: on the GPU (the
control), on the host and mapped (UVA), or on the host and copied without pinned memory, which is the branch
that WSL takes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moedoctor.faults.base import Judgement
from moedoctor.results import CaseVerdict, Death, Observation
from moedoctor.subjects.base import UnavailableError

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme
    from moedoctor.upstream.engine import EngineRequest, EngineResult

BACKENDS: Mapping[str, tuple[Scheme, str]] = {
    "BF16 TRITON": ("bf16", "triton"),
    "NVFP4 MARLIN": ("nvfp4", "marlin"),
    "NVFP4 EMULATION": ("nvfp4", "emulation"),
    "FP8 TRITON": ("fp8", "triton"),
}
"""What a report calls it -> (scheme of the checkpoint, ``moe_backend``)."""
TABLE = ("BF16 TRITON", "NVFP4 MARLIN", "NVFP4 EMULATION")
ON_GPU, UVA, COPIES = "on the GPU", "UVA", "no UVA, unpinned"
PLACES = (ON_GPU, UVA, COPIES)
WEIGHTS = "no UVA, unpinned, scales on the GPU"
"""As `COPIES`, with ``--cpu-offload-params w13_weight w2_weight``: what can be done without a fix."""
PROMPTS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "BF16 TRITON": (
        (257, 351, 473, 458, 169, 430, 259, 259),
        (424, 16, 207, 246, 475, 271),
        (41, 17, 67, 329, 100, 314, 429, 298, 65),
    ),
    "NVFP4 MARLIN": ((265, 511, 43, 73, 395), (290, 346, 157, 185, 327), (364, 101, 424, 166, 406, 153, 200)),
    "NVFP4 EMULATION": (
        (271, 26, 101, 192),
        (23, 327, 303, 94, 332),
        (305, 211, 175, 123, 263, 451, 237, 24, 249),
    ),
    "FP8 TRITON": (
        (492, 203, 91, 5, 260, 74, 322),
        (167, 226, 58, 289, 464, 150),
        (213, 199, 8, 213, 460, 139, 277, 276, 415),
    ),
}
"""Of 400 random prompts those whose tokens are decided most clearly: in an eager H200 engine without
offload the best token leads by at least 0.75 at every step."""
MAX_TOKENS = 6
LOGPROBS = 5
NEAR_TIE = 0.2
"""Where the best token leads by less in the control, compiled code with other fusions may round it away:
with them logprobs moved by up to 0.11, between eager and compiled engines without offload by up to 0.17."""
UNDECIDED = "NVFP4 EMULATION"
"""It rounds activations to FP4, which turns the rounding of other fusions into other tokens: on an H200 an
eager and a compiled engine without offload part as well. So compiled, other tokens there decide nothing; a
crash does."""
PARALLEL = 12
"""Engines at once: each takes one core while it starts and about 1 GiB of the GPU."""
_UNPINNED = {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}
_VARIABLES = {COPIES: _UNPINNED, WEIGHTS: _UNPINNED}


@dataclass(frozen=True)
class Cell:
    """One engine of the table."""

    backend: str
    """A key of `BACKENDS`."""
    mode: str
    """``eager`` or ``compiled``."""
    place: str
    """One of `PLACES`."""
    fixes: str = ""
    """The value of ``MOEDOCTOR_FIXES``."""

    @property
    def label(self) -> str:
        return f"{self.backend}, {self.mode}, {self.place}"


def cells(backends: Sequence[str], mode: str, places: Sequence[str], fixes: str) -> list[Cell]:
    """All cells, the controls among them."""
    return [Cell(backend, mode, place, fixes) for backend in backends for place in places]


def request(cell: Cell, folder: str) -> EngineRequest:
    """The engine of a cell, for the checkpoint in `folder`."""
    from moedoctor.upstream.engine import EngineRequest

    arguments: dict[str, Any] = {
        "moe_backend": BACKENDS[cell.backend][1],
        "enforce_eager": cell.mode == "eager",
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    if cell.mode != "eager":
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4]}
    if cell.place != ON_GPU:
        chosen = ["w13_weight", "w2_weight"] if cell.place == WEIGHTS else ["experts"]
        arguments |= {"cpu_offload_gb": 1.0, "cpu_offload_params": chosen}
    environ = {"MOEDOCTOR_FIXES": cell.fixes, **_VARIABLES.get(cell.place, {})}
    return EngineRequest(
        folder,
        PROMPTS[cell.backend],
        arguments,
        environ,
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        seconds=280.0,
        label=cell.label,
    )


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
    from moedoctor.upstream.engine import run_engines

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
    controls = {
        cell.backend: result for cell, result in zip(chosen, results, strict=True) if cell.place == ON_GPU
    }
    rows, errors = [], []
    for cell, result in zip(chosen, results, strict=True):
        control, is_control = controls.get(cell.backend), cell.place == ON_GPU
        outcome, detail = compare(result, control, is_control=is_control, tie=_tie(cell))
        if outcome == "other tokens" and cell.mode == "compiled" and cell.backend == UNDECIDED:
            outcome = "not decided"
        rows.append(
            {
                "backend": cell.backend,
                "chosen": result.log.moe_backend or "not logged",
                "mode": cell.mode,
                "experts": cell.place,
                "offloaded": result.log.offloaded_by_us,
                "outcome": outcome,
                "detail": detail,
                "seconds": result.seconds.get("total"),
            }
        )
        if result.error is not None:
            said = {"cell": cell.label, "kind": result.error.kind, "stage": result.error.stage}
            frames = " | ".join(result.error.frames[-3:])
            blamed = next(
                (one.strip() for one in result.error.message.splitlines() if "offloader/" in one), None
            )
            message = result.error.message[:600]
            errors.append({**said, "message": message, "frames": frames, "offloader_frame": blamed})
    offloaded = [row for row in rows if row["experts"] != ON_GPU]
    found: dict[str, Any] = {
        "vllm": next((one.version for one in results if one.version), None),
        "fixes": next((one.log.fixes for one in results if one.log.fixes), None),
        "refused": sorted({said for one in results for said in one.log.refused}),
        "cells": len(offloaded),
        "controls_wrong": sum(row["experts"] == ON_GPU and row["outcome"] != "control" for row in rows),
        **{
            name: sum(str(row["outcome"]).startswith(start) for row in offloaded)
            for name, start in (
                ("same", "same"),
                ("other_tokens", "other"),
                ("crashed", "crash"),
                ("not_decided", "not"),
            )
        },
        "table": rows,
    }
    if errors:
        found["errors"] = errors
    return found


def _tie(cell: Cell) -> float:
    """Below which lead another token is no wrong one; eager engines are to agree in every bit."""
    return -1.0 if cell.mode == "eager" else NEAR_TIE


def compare(
    result: EngineResult, control: EngineResult | None, *, is_control: bool, tie: float
) -> tuple[str, str]:
    """What became of a cell in one word or two, and the detail."""
    if result.error is not None:
        return f"crash{_number(result)}", short_error(result)
    if is_control:
        return "control", " ".join(str(one) for one in result.tokens[0][:6])
    if control is None or control.error is not None:
        return "no control", "the engine without offload did not run"
    ties = []
    for prompt, (mine, wanted) in enumerate(zip(result.tokens, control.tokens, strict=True)):
        if mine != wanted:
            at = next(i for i, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b)
            lead = _lead(control, prompt, at)
            if lead <= tie:
                ties.append(f"up to a near tie: prompt {prompt + 1}, token {at + 1}, lead {lead:.2g}")
                continue
            return "other tokens", f"prompt {prompt + 1}, token {at + 1}: {mine[at]}, not {wanted[at]}"
    if ties:
        return "same tokens", "; ".join(ties)
    distance = logprob_distance(result, control)
    return "same tokens", "same logprobs" if distance == 0 else f"logprobs differ by up to {distance:.2g}"


def _lead(control: EngineResult, prompt: int, step: int) -> float:
    """By how much the control's best logprob of a step leads its second one; inf where it has not two."""
    steps = control.logprobs[prompt] if control.logprobs is not None else ()
    best = sorted((float(one) for one in steps[step].values()), reverse=True) if step < len(steps) else []
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _number(result: EngineResult) -> str:
    """Which of vllm#37883's crashes it is: `` 1``, `` 2``, `` 3``, or nothing."""
    error = result.error
    assert error is not None
    if "OrderedDict" in error.message and "setattr" in error.message:
        return " 1"
    if "is not on GPU" in error.message:
        return " 2"
    return " 3" if error.death is Death.ILLEGAL_MEMORY_ACCESS else ""


def short_error(result: EngineResult) -> str:
    """The error in one line: the line of the message that says most."""
    error = result.error
    assert error is not None
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    telling = next((line for line in lines if "OrderedDict" in line or "is not on GPU" in line), None)
    said = telling or (lines[0] if lines else "")
    said = said.removeprefix("Explanation: ").partition(" with argument types")[0]
    return f"{error.kind.rpartition('.')[2]}: {said}"[:240]


def logprob_distance(result: EngineResult, control: EngineResult) -> float:
    """The largest difference between logprobs of tokens that both report; inf where they report none."""
    if result.logprobs is None or control.logprobs is None:
        return float("inf")
    distance = 0.0
    for mine, wanted in zip(result.logprobs, control.logprobs, strict=True):
        for step, other in zip(mine, wanted, strict=True):
            both = set(step) & set(other)
            if not both:
                return float("inf")
            distance = max(distance, *(abs(float(step[token]) - float(other[token])) for token in both))
    return distance


def judge(seen: Mapping[str, Any]) -> Judgement:
    """Reproduced where an engine with offload crashes or gives other tokens than the one without."""
    if seen["controls_wrong"]:
        return Judgement(
            CaseVerdict.ERROR, "no control", f"{seen['controls_wrong']} engines without offload did not run"
        )
    bad = seen["crashed"] + seen["other_tokens"]
    if not bad:
        all_of = (
            f"all {seen['cells']}" if seen["same"] == seen["cells"] else f"{seen['same']} of {seen['cells']}"
        )
        said = f"{all_of} cells give the tokens of the run without offload"
        rest = f", {seen['not_decided']} not decided" if seen["not_decided"] else ""
        return Judgement(CaseVerdict.CLEAN, said + rest)
    first = next(row for row in seen["table"] if str(row["outcome"]).startswith(("crash", "other")))
    said = f"{bad} of {seen['cells']} cells fail: {first['backend']}, {first['experts']}: {first['detail']}"
    return Judgement(CaseVerdict.REPRODUCED, said[:200])
