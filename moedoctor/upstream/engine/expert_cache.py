"""Real engines with the fix `expert_cache`: tokens, refusals, the memory they leave, their decode speed.

`tokens` and `refusals` use tiny checkpoints of 8 experts, top-2, side by side on one GPU. With 6 slots a
decode step of three sequences fits and is one call of the kernel; with 2 slots even that goes in groups, and
so does every prefill. `memory` and `qwen` use random weights.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from moedoctor.results import UnavailableError
from moedoctor.upstream.engine.engine import EngineRequest
from moedoctor.upstream.engine.experiment import (
    Outcome,
    Ran,
    Trial,
    checkpoints,
    run_trials,
    short_error,
    write_shape,
)
from moedoctor.upstream.engine.offload_table import LOGPROBS, MAX_TOKENS, PROMPTS
from moedoctor.upstream.plugin.expert_cache_fix import NAME
from moedoctor.upstream.plugin.expert_cache_options import VARIABLE

if TYPE_CHECKING:
    from moedoctor.reference.checkpoints import Scheme

EAGER, GRAPHS = "eager", "CUDA graphs"
BACKENDS: Mapping[str, tuple[Scheme, str, str]] = {
    "BF16 TRITON": ("bf16", "triton", "BF16 TRITON"),
    "FP8 TRITON": ("fp8", "triton", "FP8 TRITON"),
    "FP8 MARLIN": ("fp8", "marlin", "FP8 TRITON"),
    "NVFP4 MARLIN": ("nvfp4", "marlin", "NVFP4 MARLIN"),
    "NVFP4 HUMMING": ("nvfp4", "humming", "NVFP4 MARLIN"),
}
"""Name in reports -> (scheme of the checkpoint, ``moe_backend``, whose prompts)."""
_SINCE = {"humming": "0.30.0"}
"""Backend -> the first release whose layers have it and can have a cache; the others have it always."""
SLOTS = (None, 2, 6)
"""Slots for 8 experts; None is the control without a cache."""
_HITS_FIRST = 6
"""Slots of the engines of one sequence, whose two pairs are few enough to be computed in two calls."""
PROBES = "moedoctor.upstream.engine.expert_cache_probes:"
SECONDS = 200.0
QWEN_CACHES = ("128:packed=0", "32", "16", "64", "8")
"""In the order of their measurement: if time runs out, the last ones are left out."""
_OLD = "policy=lfru,packed=0,stream=0,overlap=0,fill=0"
GAIN_CACHES = (
    *(f"32:{_OLD}", f"16:{_OLD}", f"64:{_OLD}", "64", "32", "16"),
    *("32:overlap=0", "16:overlap=0", "64:overlap=0", "64:overlap=own", "32:overlap=own"),
)
"""What the plug-in did before, what it does now, and what it could do: what decides comes first."""
NVFP4_CACHES = ("8", "16")
_ALL, _LAYERS = 128, 48
_BATCHES, _STEPS, _TEXTS, _PROMPT = (1, 8), (24, 8), (3, 1), 256
"""One sequence decodes faster than eight, so it takes three texts."""
_QWEN_SECONDS, _MEASURING_SECONDS, _GAIN_SECONDS = 560.0, 240.0, 360.0


def cached(slots: int | str | None) -> dict[str, str]:
    """Return the environment of an engine with a cache of so many slots, or without a cache.

    `slots` may also be the whole value of the variable.
    """
    return {"MOEDOCTOR_FIXES": "" if slots is None else NAME, VARIABLE: "" if slots is None else str(slots)}


def trial(
    backend: str,
    mode: str,
    slots: int | str | None,
    folder: str,
    *,
    planted: bool = False,
    sequences: int = 3,
    **arguments: Any,
) -> Trial:
    """Return one engine for the checkpoint in `folder`; `slots` as in `cached`.

    `planted`: its last layer computes with wrong experts. If its tokens stay the same, equal tokens of the
    other engines prove nothing.
    """
    _, moe_backend, prompts = BACKENDS[backend]
    own: dict[str, Any] = {
        "moe_backend": moe_backend,
        "enforce_eager": mode == EAGER,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
    if mode == GRAPHS:
        # The default: full graphs for decode, piecewise ones for the rest; 3 sequences fill a graph.
        own["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 3, 4, 8, 16, 32]}
    engine = f"{backend}, {mode}" + (", one sequence" if sequences == 1 else "")
    held = "no cache" if slots is None else f"{slots} slots"
    request = EngineRequest(
        folder,
        PROMPTS[prompts][:sequences],
        {**own, **arguments},
        cached(slots),
        max_tokens=MAX_TOKENS,
        logprobs=LOGPROBS,
        probe=f"{PROBES}{'caches_with_a_fault' if planted else 'caches'}",
        probe_when="before" if planted else "after",
        seconds=SECONDS,
        label=f"{engine}, {held}{', wrong experts' if planted else ''}",
    )
    columns = {"backend": backend, "mode": mode, "slots": slots, "planted": planted, "sequences": sequences}
    return Trial(request, columns, None if slots is None else f"{engine}, no cache")


def offered(version: str | None) -> list[str]:
    """Return the names in `BACKENDS` that a release of vLLM offers; None for the newest release."""
    return [
        name
        for name, (_, backend, _) in BACKENDS.items()
        if version is None or Version(version) >= Version(_SINCE.get(backend, "0"))
    ]


def _installed() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def trials(folders: Mapping[Scheme, str], version: str | None = None) -> list[Trial]:
    """Return all engines of the table, the slower ones first; each backend has one with a planted fault."""
    backends = offered(version)
    folder = {backend: folders[BACKENDS[backend][0]] for backend in backends}
    most, triton = max(filter(None, SLOTS)), "BF16 TRITON"
    return [
        *(trial(backend, GRAPHS, most, folder[backend], planted=True) for backend in backends),
        *(
            trial(backend, mode, slots, folder[backend])
            for mode in (GRAPHS, EAGER)
            for backend in backends
            for slots in SLOTS
        ),
        *(
            trial(triton, mode, slots, folder[triton], sequences=1)
            for mode in (GRAPHS, EAGER)
            for slots in (None, _HITS_FIRST)
        ),
    ]


def tokens(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each engine with a cache, compared with the same engine without one.

    Rows that are `planted` must have other tokens. Raises UnavailableError.
    """
    with checkpoints(*(scheme for scheme, _, _ in BACKENDS.values())) as folders:
        return [row(ran) for ran in run_trials(trials(folders, _installed())) if ran.control is not None]


def row(ran: Ran) -> dict[str, Any]:
    """Return what became of an engine with a cache."""
    assert ran.control is not None
    columns, probe = ran.trial.columns, ran.result.probe or {}
    outcome, detail = ran.compare()
    if ran.control.error is not None:
        outcome, detail = Outcome.NO_CONTROL, short_error(ran.control.error)
    return {
        "backend": columns["backend"],
        "asked": BACKENDS[columns["backend"]][1].upper(),
        "chosen": ran.result.log.moe_backend or "not logged",
        "mode": columns["mode"],
        "slots": columns["slots"],
        "planted": columns["planted"],
        "sequences": columns["sequences"],
        "outcome": outcome.value,
        "detail": detail,
        **{key: probe.get(key) for key in ("engine", "hits_first", "layers", "hits", "misses")},
        "seconds": ran.result.seconds.get("total"),
    }


_REFUSALS: tuple[tuple[str, str, tuple[str, str, int], Mapping[str, Any]], ...] = (
    (
        "fewer slots than top-k",
        "1 slots hold fewer experts than one token needs (top_k 2)",
        ("BF16 TRITON", GRAPHS, 1),
        {},
    ),
    (
        "a backend without support",
        "expected --moe-backend triton, marlin or humming",
        ("NVFP4 MARLIN", EAGER, 4),
        {"moe_backend": "emulation"},
    ),
    (
        "weight offload at the same time",
        "weights are offloaded by --cpu-offload-gb",
        ("BF16 TRITON", EAGER, 4),
        {"cpu_offload_gb": 1.0},
    ),
    (
        "expert parallel",
        "experts are spread over several GPUs",
        ("BF16 TRITON", EAGER, 4),
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
)
"""Setting in reports, what the error must say, (backend, mode, slots), and the arguments that are refused.
The last one needs two GPUs."""


def refusals(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each engine that must not start, with what its error says. Raises UnavailableError."""
    import torch

    chosen = _REFUSALS if torch.cuda.device_count() > 1 else _REFUSALS[:-1]
    with checkpoints(*(BACKENDS[backend][0] for _, _, (backend, *_), _ in chosen)) as folders:
        ran = run_trials(
            [
                replace(trial(backend, mode, slots, folders[BACKENDS[backend][0]], **arguments), control=None)
                for _, _, (backend, mode, slots), arguments in chosen
            ]
        )
    table = [
        _refused(setting, reason, engine) for (setting, reason, *_), engine in zip(chosen, ran, strict=True)
    ]
    left = [
        {"setting": setting, "refused": None, "said": "not run: needs two GPUs"}
        for setting, *_ in _REFUSALS[len(chosen) :]
    ]
    return [*table, *left]


def _refused(setting: str, reason: str, ran: Ran) -> dict[str, Any]:
    error = ran.result.error
    if error is None:
        answered = f"started, {len(ran.result.tokens)} prompts answered"
        return {"setting": setting, "refused": False, "stage": None, "said": answered}
    lines = (*ran.result.log.refused, *error.message.splitlines())  # a worker's reason is only in the log
    line = next((line for line in lines if VARIABLE in line), error.message.partition("\n")[0])
    refused = any(reason in line for line in lines)
    return {"setting": setting, "refused": refused, "stage": error.stage, "said": line[:300]}


def memory(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the memory that vLLM's profile leaves to the KV cache, without a cache and with 8 of 64 slots.

    Four layers with random weights, engines one after the other. Raises UnavailableError.
    """
    shape = {"num_hidden_layers": 4, "num_experts": 64, "hidden_size": 1024, "num_attention_heads": 8}
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_shape(Path(name), **shape, vocab_size=512)
        ran = run_trials([_profiled(str(folder), slots) for slots in (None, 8)], parallel=1)
    table = []
    for engine in ran:
        error, probe = engine.result.error, engine.result.probe
        figures = (
            {key: probe[key] for key in ("kv_cache_bytes", "saved_bytes", "unreleased_bytes", "layers")}
            if error is None
            else {"error": short_error(error)}
        )
        table.append({**engine.trial.columns, **figures})
    return table


def _profiled(folder: str, slots: int | None) -> Trial:
    request = EngineRequest(
        folder,
        [[3, 5, 7]],
        {
            "load_format": "dummy",
            "moe_backend": "triton",
            "enforce_eager": True,
            "kv_cache_memory_bytes": None,
            "gpu_memory_utilization": 0.2,
        },
        cached(slots),
        max_tokens=2,
        probe=f"{PROBES}profiled",
        seconds=SECONDS,
        label=f"{slots} slots",
    )
    return Trial(request, {"slots": slots})


def qwen(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the decode speed of Qwen3-30B-A3B's shape at each number of slots. Raises UnavailableError.

    One engine with random weights: it loads with the fewest slots and profiles its memory so. Then its layers
    get other caches over the same host memory, and its graphs are captured anew.
    """
    measured, engine = decoded(QWEN_CACHES, seconds=_MEASURING_SECONDS)
    every = {row["batch"]: row["tokens"] for row in measured if row["slots"] == _ALL}
    if not every:
        raise UnavailableError("there was no time to measure with all experts on the GPU")
    table = []
    for row in sorted(measured, key=lambda row: (row["slots"], row["batch"])):
        drawn = row.pop("tokens")
        equal = sum(ids == expected for ids, expected in zip(drawn, every[row["batch"]], strict=True))
        length = {"sequences": len(drawn), "tokens_a_sequence": len(drawn[0])}
        table.append({**row, "sequences_as_with_all": equal, **length})
    table[0] |= engine
    return table


def gain(sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the decode speeds with the old and the new defaults at 16, 32 and 64 slots, in one engine.

    The engine is that of `qwen`. `sequences_as_before`: sequences that draw the tokens of the old defaults at
    the same slots. Raises UnavailableError.
    """
    measured, engine = decoded(GAIN_CACHES, seconds=_GAIN_SECONDS, optimum=False, prompt=_PROMPT)
    old = {(row["slots"], row["batch"]): row for row in measured if row["cache"].endswith(_OLD)}
    table = []
    for row in measured:
        before = old.get((row["slots"], row["batch"]))
        if before is not row and before is not None:
            pairs = zip(row["tokens"], before["tokens"], strict=True)
            row["sequences"] = len(row["tokens"])
            row["sequences_as_before"] = sum(ids == expected for ids, expected in pairs)
            row["times_before"] = round(row["tokens_per_second"] / before["tokens_per_second"], 3)
            if row["gpu_tokens_per_second"] and before["gpu_tokens_per_second"]:
                gained = row["gpu_tokens_per_second"] / before["gpu_tokens_per_second"]
                row["gpu_times_before"] = round(gained, 3)
        table.append({key: value for key, value in row.items() if key != "tokens"})
    table[0] |= engine
    return table


def nvfp4(unit: Scheme) -> list[dict[str, Any]]:
    """Return the decode speeds of the same shape in one format, NVFP4 or BF16, at 8 and 16 slots.

    Each format is a unit of the claim, so that one is kept if the other does not finish. Raises
    UnavailableError.
    """
    measured, engine = decoded(NVFP4_CACHES, unit, seconds=_MEASURING_SECONDS / 2, optimum=False)
    table = [
        {"scheme": unit, **{key: value for key, value in row.items() if key != "tokens"}} for row in measured
    ]
    table[0] |= engine
    return table


def decoded(
    caches: Sequence[str], scheme: Scheme = "bf16", **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what `decode_speeds` measured in one engine, and what a table says once about the engine.

    That is its ``seconds_to_load``, and ``cut``: why it did not measure everything. Raises UnavailableError
    if it measured nothing.
    """
    from moedoctor.reference.checkpoints import quantization_fields

    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = write_shape(Path(name), **quantization_fields(scheme, _LAYERS))
        vocab = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
        request = _qwen_request(str(folder), vocab, scheme, {"caches": caches, **options})
        (ran,) = run_trials([Trial(request)])
    error, rows = ran.result.error, list(ran.result.probe or ())
    reason = None if error is None else f"{error.stage}: {short_error(error)}"
    if not rows:
        raise UnavailableError(reason or "nothing was measured")
    return rows, {"seconds_to_load": ran.result.seconds.get("load"), **({"cut": reason} if reason else {})}


def _qwen_request(folder: str, vocab: int, scheme: Scheme, options: Mapping[str, Any]) -> EngineRequest:
    fewest = min(int(text.partition(":")[0]) for text in options["caches"])
    return EngineRequest(
        folder,
        [[17, 4711]],
        {
            "load_format": "dummy",
            "moe_backend": "triton" if scheme == "bf16" else "marlin",
            "enforce_eager": False,
            "compilation_config": {
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": list(_BATCHES),
            },
            "gpu_memory_utilization": 0.9,
            "kv_cache_memory_bytes": 4 << 30,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": max(_BATCHES),
            "enable_prefix_caching": False,
        },
        cached(f"{fewest}:packed=0"),
        max_tokens=2,
        probe=f"{PROBES}decode_speeds",
        probe_options={"batches": _BATCHES, "steps": _STEPS, "texts": _TEXTS, "vocab": vocab, **options},
        seconds=_QWEN_SECONDS,
        label=f"Qwen3-30B-A3B, {scheme}",
    )
