"""Real engines with the fix `moe`: tokens beside the float32 reference's, and decode speed beside vLLM's own.

`tokens` uses tiny checkpoints. The control computes its MoE layers by the float32 reference in plain torch;
beside it are vLLM's own backend and moedoctor's kernels, eager and with CUDA graphs, and one engine with a
planted fault: the experts of the last layer have changed places. `speed` uses Qwen3-30B-A3B's shape with
random weights; the engines that it compares are up at once, and one at a time has the GPU.
"""

from __future__ import annotations

import fcntl
import importlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.decode_speed import decode_replays, graph_events
from moedoctor.upstream.engine.engine import EngineRequest, need_engine
from moedoctor.upstream.engine.experiment import (
    Outcome,
    Ran,
    Trial,
    checkpoints,
    logprob_distance,
    run_trials,
    short_error,
    write_shape,
)
from moedoctor.upstream.engine.offload_table import LOGPROBS, MAX_TOKENS, PROMPTS
from moedoctor.upstream.engine.probes import decoder_layers, model_of
from moedoctor.upstream.plugin.moe_fix import KERNELS, NAME, REFERENCE, VARIABLE

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

EAGER, GRAPHS = "eager", "CUDA graphs"
SCHEMES: Mapping[str, tuple[Scheme, str]] = {
    "BF16": ("bf16", "BF16 TRITON"),
    "FP8": ("fp8", "FP8 TRITON"),
    "NVFP4": ("nvfp4", "NVFP4 MARLIN"),
}
"""Name in reports -> (scheme of the checkpoint, whose prompts)."""
REFERENCE_ENGINE, OURS, THEIRS, PLANTED = "float32 reference", "moedoctor", "vLLM", "experts exchanged"
ENGINES = (
    (REFERENCE_ENGINE, EAGER),
    (OURS, EAGER),
    (OURS, GRAPHS),
    (PLANTED, EAGER),
    (THEIRS, EAGER),
    (THEIRS, GRAPHS),
)
HERE = "moedoctor.upstream.engine.moe_layers"
"""The module of the probes."""
_SECONDS = 200.0
_BATCHES, _STEPS, _ROUNDS = (1, 8), 64, 8
_AT_ONCE = (("BF16",), ("FP8", "NVFP4"))
"""Whose engines are up at the same time: those of BF16 take as much memory as all the others."""
_BESIDE_WEIGHTS, _FOR_EXPERTS = 4 << 30, 0.85
"""Bytes of an engine that are no layer's weights, and the share of the rest that experts may take."""
_SPEED_SECONDS = 240.0
_PATIENCE = 90.0
"""Seconds that an engine waits for the others to start."""


def fixed(computer: str) -> dict[str, str]:
    """Return the environment of an engine whose MoE layers `computer` computes."""
    if computer == THEIRS:
        return {"MOEDOCTOR_FIXES": ""}
    return {"MOEDOCTOR_FIXES": NAME, VARIABLE: REFERENCE if computer == REFERENCE_ENGINE else KERNELS}


def trial(
    quantization: str, computer: str, mode: str, folder: str, prompts: Sequence[Sequence[int]]
) -> Trial:
    """Return one engine for the checkpoint in `folder`. `prompts` are token ids."""
    arguments: dict[str, Any] = {
        "enforce_eager": mode == EAGER,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    if quantization == "BF16":
        # Beside FlashInfer vLLM would choose kernels of it, which compile for half an hour.
        arguments["moe_backend"] = "triton"
    if mode == GRAPHS:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 3, 4, 8, 16, 32]}
    request = EngineRequest(
        folder,
        prompts,
        arguments,
        fixed(computer),
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        probe=f"{HERE}:{'exchange_experts' if computer == PLANTED else 'computed_by'}",
        probe_when="before",
        seconds=_SECONDS,
        label=f"{quantization}, {computer}, {mode}",
    )
    columns = {"quantization": quantization, "computer": computer, "mode": mode}
    control = None if computer == REFERENCE_ENGINE else f"{quantization}, {REFERENCE_ENGINE}, {EAGER}"
    return Trial(request, columns, control)


def tokens(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each engine of each quantization. Raises UnavailableError if no engine can run."""
    with checkpoints(*(scheme for scheme, _ in SCHEMES.values())) as folders:
        trials = [
            trial(quantization, computer, mode, folders[scheme], PROMPTS[prompts])
            for quantization, (scheme, prompts) in SCHEMES.items()
            for computer, mode in ENGINES
        ]
        return [_row(ran) for ran in run_trials(trials)]


def _row(ran: Ran) -> dict[str, Any]:
    outcome, detail = ran.compare()
    probe = ran.result.probe or {}
    if ran.result.error is None and (reason := uncomputed(ran)) is not None:
        outcome, detail = Outcome.NO_FIX, reason
    compared = ran.control is not None and ran.result.error is None and ran.control.error is None
    distance = logprob_distance(ran.result, ran.control) if compared and ran.control else None
    return {
        **ran.trial.columns,
        "backend": ran.result.log.moe_backend or "not logged",
        "version": ran.result.version,
        "outcome": outcome.value,
        "detail": detail,
        "logprob_distance": distance,
        "farthest_logprob": farthest_logprob(ran.result, ran.control) if compared and ran.control else None,
        "layers": probe.get("layers"),
        "layers_by_moedoctor": probe.get("ours"),
        "seconds": ran.result.seconds.get("total"),
    }


def uncomputed(ran: Ran) -> str | None:
    """Return why an engine with the fix proves nothing: it computed no layer.

    None if it did, or if it has no fix.
    """
    if ran.trial.columns["computer"] == THEIRS or (ran.result.probe or {}).get("ours"):
        return None
    return "no layer of this engine was computed by moedoctor"


def farthest_logprob(result: Any, control: Any) -> dict[str, float] | None:
    """Return where logprobs differ most: prompt, step, token and its logprob in both, or None."""
    apart = [
        (abs(float(value) - float(other[token])), prompt, step, token, float(value), float(other[token]))
        for prompt, pairs in enumerate(zip(result.logprobs or (), control.logprobs or (), strict=False))
        for step, (at, other) in enumerate(zip(*pairs, strict=False))
        for token, value in at.items()
        if token in other and math.isfinite(float(value)) and math.isfinite(float(other[token]))
    ]
    if not apart:
        return None
    _, prompt, step, token, value, expected = max(apart)
    return {"prompt": prompt, "step": step, "token": int(token), "logprob": value, "reference": expected}


def computed_by(llm: Any) -> dict[str, int]:
    """Probe: return how many MoE layers there are, and how many moedoctor computes."""
    kernels = [
        type(method.moe_kernel.impl.fused_experts).__name__ if method.moe_kernel is not None else ""
        for method in _methods(model_of(llm))
    ]
    return {"layers": len(kernels), "ours": kernels.count("MoedoctorExperts")}


def _methods(model: Any) -> list[Any]:
    """Return the methods of the model's MoE layers, each once."""
    owned = (getattr(module, "quant_method", None) for module in model.modules())
    methods = [method for method in owned if hasattr(method, "moe_kernel")]
    return list({id(method): method for method in methods}.values())


def exchange_experts(llm: Any) -> dict[str, int]:
    """Probe before generating: exchange all experts of the last layer with their neighbours."""
    import torch

    model = model_of(llm)
    *_, (_, last) = decoder_layers(model)
    weights = [parameter for name, parameter in last.named_parameters() if name.endswith("w2_weight")]
    for weight in weights:
        values = weight.data.view(torch.uint8)  # torch cannot roll 8-bit floats
        values.copy_(values.roll(1, 0))
    return {**computed_by(llm), "exchanged": len(weights)}


def speed(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return decode times of engines with and without the fix, for BF16, FP8 and NVFP4 weights.

    They have as many of the model's layers as fit. With few layers a step is as long as the host's work for
    it, which all engines share. Raises UnavailableError if no engine can run.
    """
    from moedoctor.reference.checkpoints import quantization_fields

    need_engine()
    layers = _layers_that_fit()
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        ran: list[Ran] = []
        for wave, quantizations in enumerate(_AT_ONCE):
            meet = Path(name) / f"wave{wave}"
            trials = []
            for quantization in quantizations:
                folder = meet / quantization
                fields = quantization_fields(SCHEMES[quantization][0], layers)
                write_shape(folder, num_hidden_layers=layers, **fields)
                trials += [
                    Trial(
                        _timed(str(folder), str(meet), computer, 2 * len(quantizations)),
                        {"quantization": quantization, "computer": computer},
                    )
                    for computer in (THEIRS, OURS)
                ]
            ran += run_trials(trials, parallel=len(trials))
        return _speeds(ran, layers)


def _layers_that_fit() -> int:
    """Return how many layers two BF16 engines can have. Raises UnavailableError if not one fits."""
    import torch

    from moedoctor.models.presets import preset_document

    shape = preset_document("qwen3-30b-a3b")
    experts = (
        6 * shape["num_experts"] * shape["moe_intermediate_size"] * shape["hidden_size"]
    )  # bytes in BF16
    free, _ = torch.cuda.mem_get_info()
    layers = int((free - 2 * _BESIDE_WEIGHTS) * _FOR_EXPERTS / (2 * experts))
    if layers < 1:
        raise UnavailableError(
            f"two engines with a layer each do not fit in {free / 1e9:.1f} GB of GPU memory"
        )
    return min(layers, int(shape["num_hidden_layers"]))


def _timed(folder: str, meet: str, computer: str, engines: int) -> EngineRequest:
    return EngineRequest(
        folder,
        [[17, 4711]],
        {
            "load_format": "dummy",
            "enforce_eager": False,
            "compilation_config": {
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": list(_BATCHES),
            },
            "gpu_memory_utilization": 0.05,  # which must be free when it starts, beside the others
            "kv_cache_memory_bytes": 256 << 20,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "max_num_seqs": max(_BATCHES),
            "enable_prefix_caching": False,
        },
        fixed(computer),
        max_tokens=2,
        probe=f"{HERE}:decode_times",
        probe_options={
            "batches": _BATCHES,
            "steps": _STEPS,
            "rounds": _ROUNDS,
            "meet": meet,
            "engines": engines,
        },
        seconds=_SPEED_SECONDS,
        label=f"{Path(folder).name}, {computer}",
    )


def decode_times(
    llm: Any, *, batches: Sequence[int], steps: int, rounds: int, meet: str, engines: int
) -> dict[str, Any]:
    """Probe: return the milliseconds of a decode step in each round, for each batch.

    They are given by the host's clock and by events on the GPU. A round has the GPU for itself: engines take
    turns by a lock in the folder `meet`. They begin when `engines` of them are up, or when `_PATIENCE` is
    over, so that one that did not start stops no other.
    """
    folder = Path(meet)
    times: dict[str, list[float]] = {str(batch): [] for batch in batches}
    gpu: dict[str, list[float]] = {str(batch): [] for batch in batches}
    for batch in batches:
        _generate_seconds(llm, batch, steps)  # warm-up
    (folder / f"{os.getpid()}.up").touch()
    until = time.monotonic() + _PATIENCE
    while len(list(folder.glob("*.up"))) < engines and time.monotonic() < until:
        time.sleep(0.05)
    with (folder / "turn").open("w") as turn, graph_events() as events:
        for _ in range(rounds):
            fcntl.flock(turn, fcntl.LOCK_EX)
            for batch in batches:
                # A generation of two tokens has the prefill and one decode step; the rest is decode steps.
                short = _generate_seconds(llm, batch, 2)
                events.clear()
                times[str(batch)].append((_generate_seconds(llm, batch, steps + 2) - short) / steps * 1e3)
                if on_gpu := decode_replays(events, steps):
                    gpu[str(batch)].append(statistics.median(on_gpu))
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(0.05)  # let another have the lock
    return {**computed_by(llm), "step_ms": times, "gpu_ms": gpu}


def _generate_seconds(llm: Any, batch: int, tokens: int) -> float:
    vllm: Any = importlib.import_module("vllm")
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    # Other tokens for each sequence, so that a batch reaches other experts.
    prompts = [
        {"prompt_token_ids": [(37 * (index + 1) + 11 * i) % 1000 for i in range(8)]} for index in range(batch)
    ]
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started


def _speeds(ran: Sequence[Ran], layers: int) -> list[dict[str, Any]]:
    by_columns = {tuple(engine.trial.columns.values()): engine.result for engine in ran}
    table: list[dict[str, Any]] = []
    for quantization in SCHEMES:
        theirs, ours = by_columns[quantization, THEIRS], by_columns[quantization, OURS]
        row = {"quantization": quantization, "layers": layers}
        error = theirs.error or ours.error
        if error is not None:
            table.append({**row, "error": short_error(error)})
            continue
        row |= {"version": ours.version, "backend": theirs.log.moe_backend or "not logged"}
        if theirs.probe["ours"] or ours.probe["ours"] != ours.probe["layers"]:
            table.append({**row, "error": "an engine was not computed by what it was asked for"})
            continue
        for batch in _BATCHES:
            own, other = (sorted(engine.probe["step_ms"][str(batch)]) for engine in (ours, theirs))
            step, step_of_backend = statistics.median(own), statistics.median(other)
            on_gpu = [engine.probe["gpu_ms"][str(batch)] for engine in (ours, theirs)]
            table.append(
                {
                    **row,
                    "batch": batch,
                    "step_ms": step,
                    "step_ms_of_backend": step_of_backend,
                    "tokens_per_second": batch / step * 1e3,
                    "tokens_per_second_of_backend": batch / step_of_backend * 1e3,
                    "share": step_of_backend / step,
                    "gpu_share": statistics.median(on_gpu[1]) / statistics.median(on_gpu[0])
                    if all(on_gpu)
                    else None,
                    "spread": max(_spread(own), _spread(other)),
                }
            )
    return table


def _spread(times: Sequence[float]) -> float:
    """Return how far the middle six tenths of sorted times reach, relative to the shortest of them."""
    return times[len(times) * 4 // 5] / times[len(times) // 5] - 1
