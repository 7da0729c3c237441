"""The engines of vllm#37883's table: tiny checkpoints with offload, each compared with the same without.

An engine has a checkpoint with its MoE backend, runs eager or compiled, and keeps its experts on the GPU (the
control), on the host and mapped (UVA), or on the host and copied without pinned memory, as on WSL.

The fix does without CUDA graphs. The control has one for each number of prompts, so that no batch is padded
and both compute the same batches. Compiled engines with the fix get a second control: the very same engine,
with its weights on the GPU instead of on the host (`SAME_GRAPH`). If an engine differs from the first control
but not from the second, its weights are not the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moedoctor.results import Death
from moedoctor.text import load_yaml
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, has_backend, need_engine
from moedoctor.upstream.engine.experiment import (
    ON_HOST,
    Outcome,
    Ran,
    Trial,
    measure_logprob_distance,
    run_trials,
    shorten_error,
    write_checkpoints,
)

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

BACKENDS: Mapping[str, tuple[Scheme, str]] = {
    "BF16 TRITON": ("bf16", "triton"),
    "NVFP4 MARLIN": ("nvfp4", "marlin"),
    "NVFP4 HUMMING": ("nvfp4", "humming"),
    "NVFP4 EMULATION": ("nvfp4", "emulation"),
    "FP8 TRITON": ("fp8", "triton"),
}
"""Name in reports -> (scheme of the checkpoint, ``moe_backend``)."""
TABLE = ("BF16 TRITON", "NVFP4 MARLIN", "NVFP4 HUMMING", "NVFP4 EMULATION")
ON_GPU, UVA, COPIES = "on the GPU", "UVA", "no UVA, unpinned"
PLACES = (ON_GPU, UVA, COPIES)
SAME_GRAPH = "on the GPU, in the graph of the copies"
CONTROLS = (ON_GPU, SAME_GRAPH)
WEIGHTS = "no UVA, unpinned, scales on the GPU"
"""As `COPIES`, with ``--cpu-offload-params w13_weight w2_weight``: what can be done without a fix."""
PROMPTS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    name: tuple(map(tuple, prompts))
    for name, prompts in load_yaml("moedoctor.upstream.engine", "offload_prompts.yaml").items()
}
"""Of 400 random prompts those whose tokens are decided most clearly: in an eager H200 engine without
offload the best token leads by at least 0.75 at every step."""
MAX_TOKENS = 6
LOGPROBS = 5
EAGER, COMPILED = "eager", "compiled"
UNPINNED = {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1", "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}
"""The branch that vLLM takes on WSL."""
SEEN_IN = "moedoctor.upstream.engine.probes:record_layers_and_places"
OFFLOADER = "UVAOffloader"
"""The offloader of `--cpu-offload-gb` in vLLM's log, with UVA and without."""


def measure(backends: Sequence[str], mode: str, places: Sequence[str], *, fixed: bool) -> dict[str, Any]:
    """Run the engines of all backends that this vLLM has, and return the table.

    If `fixed`, with MOEDOCTOR_FIXES=offload. Raises UnavailableError if no engine can run.
    """
    need_engine()
    backends = [backend for backend in backends if has_backend(*BACKENDS[backend])]
    with write_checkpoints(*(BACKENDS[backend][0] for backend in backends)) as folders:
        trials = list_trials(backends, mode, places, "offload" if fixed else "", folders)
        return make_evidence(run_trials(trials))


def list_trials(
    backends: Sequence[str], mode: str, places: Sequence[str], fixes: str, folders: Mapping[Scheme, str]
) -> list[Trial]:
    """Return all engines, the controls among them; compiled copies with the fix have two controls."""
    second = (SAME_GRAPH,) if mode == COMPILED and fixes and COPIES in places else ()
    return [
        make_trial(backend, mode, place, folders[BACKENDS[backend][0]], fixes)
        for backend in backends
        for place in (*places, *second)
    ]


def make_trial(backend: str, mode: str, place: str, folder: str, fixes: str = "") -> Trial:
    """Return one engine of the table, for the checkpoint in `folder`; `fixes` is MOEDOCTOR_FIXES."""
    arguments: dict[str, Any] = {
        "moe_backend": BACKENDS[backend][1],
        "enforce_eager": mode == EAGER,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    if mode == COMPILED:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 3, 4]}
    environ = {"MOEDOCTOR_FIXES": fixes}
    probe: dict[str, Any] = {}
    if place != ON_GPU:
        names = ["w13_weight", "w2_weight"] if place == WEIGHTS else ["experts"]
        arguments |= {"cpu_offload_gb": 1.0, "cpu_offload_params": names}
        probe = {"probe": SEEN_IN, "probe_options": {"names": "experts"}}
    if place not in (ON_GPU, UVA):
        environ |= UNPINNED
    if place == SAME_GRAPH:
        probe = {"probe": "moedoctor.upstream.engine.probes:serve_from_gpu"}
    request = EngineRequest(
        folder,
        PROMPTS[backend],
        arguments,
        environ,
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        probe_when="before",
        seconds=280.0,
        label=f"{backend}, {mode}, {place}",
        **probe,
    )
    control = None if place == ON_GPU else f"{backend}, {mode}, {ON_GPU}"
    return Trial(request, {"backend": backend, "mode": mode, "experts": place}, control)


def make_evidence(ran: Sequence[Ran]) -> dict[str, Any]:
    """Return the engines as a table, counted, with the errors in full."""
    second = {
        engine.trial.columns["backend"]: engine.result
        for engine in ran
        if engine.trial.columns["experts"] == SAME_GRAPH
    }
    table, errors, outcomes = [], [], []
    controls_wrong = 0
    for engine in ran:
        columns, result = engine.trial.columns, engine.result
        outcome, detail, same_code = _judge(engine, second.get(columns["backend"]))
        if columns["experts"] in CONTROLS:
            controls_wrong += outcome is not Outcome.CONTROL
        else:
            outcomes.append(outcome)
        table.append(
            {
                "backend": columns["backend"],
                "chosen": result.log.moe_backend or "not logged",
                "mode": columns["mode"],
                "experts": columns["experts"],
                "offloaded": result.log.offloaded_by_us,
                "offloader": result.log.offloader,
                "host_bytes": _read_probe(result, "host_bytes"),
                "parameter_bytes": _read_probe(result, "parameter_bytes"),
                "same_bits_in_the_same_code": same_code,
                "outcome": outcome.value,
                "detail": detail,
                "seconds": result.seconds.get("total"),
            }
        )
        if result.error is not None:
            errors.append(_describe_error(engine))
    figures: dict[str, Any] = {
        "vllm": next((engine.result.version for engine in ran if engine.result.version), None),
        "fixes": next((engine.result.fixes for engine in ran if engine.result.fixes), None),
        "refused": sorted({line for engine in ran for line in engine.result.log.refused}),
        "cells": len(outcomes),
        "controls_wrong": controls_wrong,
        "same": outcomes.count(Outcome.SAME),
        "other_tokens": outcomes.count(Outcome.OTHER),
        "crashed": sum(outcome.crashed for outcome in outcomes),
        "rounding": outcomes.count(Outcome.ROUNDING),
        "not_fixed": outcomes.count(Outcome.NO_FIX),
        "not_offloaded": outcomes.count(Outcome.NO_OFFLOAD),
        "moved_back": outcomes.count(Outcome.MOVED_BACK),
        "table": table,
    }
    return {**figures, "errors": errors} if errors else figures


def _judge(engine: Ran, second: EngineResult | None) -> tuple[Outcome, str, bool | None]:
    """Return outcome and detail of an engine, and whether it has the bits of its `second` control."""
    place, result = engine.trial.columns["experts"], engine.result
    outcome, detail = engine.compare()
    answered = outcome in (Outcome.SAME, Outcome.OTHER)
    if place == SAME_GRAPH and result.error is None:
        return (Outcome.CONTROL if _is_served_from_gpu(result) else Outcome.NO_CONTROL), detail, None
    asked = engine.trial.request.environ["MOEDOCTOR_FIXES"]
    if answered and asked and place in (COPIES, WEIGHTS) and result.fixes is None:
        return Outcome.NO_FIX, "the fix was asked for and is not active", None
    if place not in CONTROLS and (reason := explain_no_offload(result)) is not None:
        return Outcome.NO_OFFLOAD, reason, None
    on_host, asked_bytes = (_read_probe(result, name) or 0 for name in ("host_bytes", "parameter_bytes"))
    if place not in CONTROLS and outcome is Outcome.SAME and 2 * on_host < asked_bytes:
        return Outcome.MOVED_BACK, f"{on_host} of {asked_bytes} bytes are on the host (MD013)", None
    if place == COPIES and answered and second is not None:
        if second.error is not None or not _is_served_from_gpu(second):
            return outcome, detail, None
        same = result.tokens == second.tokens and measure_logprob_distance(result, second) == 0
        detail = f"{detail}; {'same' if same else 'other'} tokens and logprobs {SAME_GRAPH}"
        return (Outcome.ROUNDING if same and outcome is Outcome.OTHER else outcome), detail, same
    return (_classify_crash(result) if result.error is not None else outcome), detail, None


def _classify_crash(result: EngineResult) -> Outcome:
    """Return which of vllm#37883's crashes the error is."""
    error = result.error
    assert error is not None
    if "OrderedDict" in error.message and "setattr" in error.message:
        return Outcome.CRASH_1
    if any(words in error.message for words in ON_HOST):
        return Outcome.CRASH_2
    return Outcome.CRASH_3 if error.death is Death.ILLEGAL_MEMORY_ACCESS else Outcome.CRASH


def explain_no_offload(result: EngineResult) -> str | None:
    """Return why an engine that should offload shows nothing of it; None if it did, or died.

    The figure in the log does not decide it: that is in GiB, and 0.0 for a small model.
    """
    if result.error is not None:
        unseen = result.error.stage == "probe"
        return f"what it offloaded was not seen: {shorten_error(result.error)}" if unseen else None
    if result.log.offloader != OFFLOADER:
        return f"its offloader in the log is {result.log.offloader or 'missing'}, expected {OFFLOADER}"
    if not _read_probe(result, "host_bytes"):
        return "no byte of the weights is on the host"
    return None


def _read_probe(result: EngineResult, name: str) -> int | None:
    value = (result.probe or {}).get(name)
    return None if value is None else int(value)


def _is_served_from_gpu(result: EngineResult) -> bool:
    """Return True if the engine generated with weights that the probe had taken off the host."""
    return bool(result.fixes and result.probe and result.probe["bytes"])


def _describe_error(engine: Ran) -> dict[str, Any]:
    error = engine.result.error
    assert error is not None
    frames = [line.strip() for line in error.message.splitlines() if "offloader/" in line]
    return {
        "cell": engine.trial.request.label,
        "kind": error.kind,
        "stage": error.stage,
        "message": error.message[:600],
        "frames": " | ".join(error.frames[-3:]),
        "offloader_frame": frames[0] if frames else None,
    }
