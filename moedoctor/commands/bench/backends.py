"""`moedoctor bench --backend`: what to time, the measurement, and its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moedoctor import environment
from moedoctor.bench.gpu_state import sample_gpus
from moedoctor.bench.moe import backends as registry
from moedoctor.bench.moe.run import MachineError, measure_machine, measure_tasks
from moedoctor.bench.moe.task import LayerTask, Routing
from moedoctor.commands.options import (
    InputError,
    check_gpu,
    convert_errors,
    draw_picture,
    parse_names,
    parse_numbers,
    split_texts,
)
from moedoctor.environment import explain_missing_gpu
from moedoctor.fixes.backends.release_tables import SCHEMES, load_releases, load_tables
from moedoctor.models.config_fields import ConfigError
from moedoctor.models.layer_shape import QUANTIZATIONS, LayerShape
from moedoctor.models.presets import find_model
from moedoctor.origin import record_origin
from moedoctor.processes.files import write
from moedoctor.redaction import Redactor
from moedoctor.reference.moe_backend import Variant
from moedoctor.reporters.output import show_progress
from moedoctor.reporters.pages.bench import Bench
from moedoctor.reporters.pages.bench_backends import list_charts
from moedoctor.text import print_message, suggest_expected
from moedoctor.trace.format import TraceError, load

DEFAULT_MODEL = "qwen3-30b-a3b"
_GPU_TOKENS, _CPU_TOKENS = (1, 8, 64, 512, 4096), (1, 8)
_MAX_TOKENS = 8192
_TRACE_ROWS = 8192
_CAPSULE = ".moecapsule"
_PAYS = 1.02  # vLLM's time over that of what was found: a file replaces vLLM's rule for all numbers of tokens
_INSTEAD = "what runs here: --backend REFERENCE, --backend OURS"

Layers = Mapping[str, tuple[LayerShape, str]]
"""Name -> sizes of the layer, and where they come from."""


def find_variants(given: Sequence[str], quantization: Sequence[str] | None) -> list[Variant]:
    """Return the backends with the quantizations that are asked for. Raises InputError."""
    quantizations = parse_names("--quantization", quantization, QUANTIZATIONS) or QUANTIZATIONS
    variants: dict[Variant, None] = {}
    for text in split_texts(given):
        name, _, suffix = text.partition(":")
        asked_for = parse_names("--backend", [suffix], QUANTIZATIONS) if suffix else quantizations
        matching = registry.find(name, asked_for)
        if not matching and registry.find(name):
            has = ", ".join(variant.quantization for variant in registry.find(name))
            raise InputError(f"--backend {name}: has {has}, not {', '.join(asked_for)}")
        if not matching and (schemes := _list_untimed_schemes(name)):
            has = f"vLLM {list(load_releases())[-1]} has it for {', '.join(schemes)}"
            instead = "moedoctor bench --engine --model DIR --moe-backend NAME"
            raise InputError(f"--backend {name}: {has}, but it is timed in engines only: {instead}")
        if not matching:
            raise InputError(f"--backend {name}: {suggest_expected(name, [*registry.list_names(), 'all'])}")
        variants |= dict.fromkeys(matching)
    if not variants:
        raise InputError(f"--backend: expected all or some of {', '.join(registry.list_names())}")
    return list(variants)


def _list_untimed_schemes(name: str) -> list[str]:
    """Return the schemes for which the newest vLLM has a backend of this name, in any case."""
    newest, key = list(load_releases())[-1], name.strip().upper().replace("-", "_")
    return [
        scheme
        for scheme in SCHEMES
        if any(key in order.backends for order in load_tables(scheme, newest).orders)
    ]


def find_layers(models: Sequence[str], sizes: Mapping[str, int | None], activation: str) -> Layers:
    """Return the layers of the models, or the one layer of these sizes. Raises InputError."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if given and models:
        raise InputError(f"{next(iter(given))}: --model gives the sizes already; expected one or the other")
    with convert_errors(ConfigError, ValueError):
        if not given:
            presets = [find_model(text) for text in models or (DEFAULT_MODEL,)]
            return {model.name: (model.experts.layer, model.source) for model in presets}
        if missing := [name for name in sizes if name not in given]:
            raise InputError(f"{missing[0]}: is missing; expected {', '.join(sizes)} together")
        hidden, intermediate, experts, top_k = given.values()
        shape = LayerShape(hidden, intermediate, experts, top_k, activation)
    if shape.hidden % 16 or shape.intermediate % 16:
        raise InputError("--hidden and --intermediate: expected multiples of 16, the block of NVFP4")
    return {"custom": (shape, "command line")}


def find_routing(routing: str, trace: str | None, layers: Layers) -> tuple[str, Routing]:
    """Return the name for the report, and the routing: by name or in a trace. Raises InputError."""
    kind, _, skew = routing.lower().partition(":")
    is_balanced = (kind, skew) == ("balanced", "")
    if trace is not None and not is_balanced:
        raise InputError(f"--routing {routing}: --trace gives the routing already; expected one of them")
    if routing.endswith(_CAPSULE):
        return f"capsule {Path(routing).name}", Routing("trace", rows=_read_capsule_rows(routing, layers))
    if trace is not None:
        return f"trace {Path(trace).name}", Routing("trace", rows=_read_trace_rows(trace, layers))
    if is_balanced:
        return routing, Routing()
    if kind != "zipf":
        raise InputError(
            f"--routing {routing}: expected balanced, zipf, zipf:SKEW or FILE.moecapsule; or --trace"
        )
    try:
        value = float(skew or 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise InputError(f"--routing {routing}: expected a skew from 0 to 10, such as zipf:1.2")
    return routing, Routing("zipf", skew=value)


def _read_capsule_rows(name: str, layers: Layers) -> list[list[int]]:
    """Return the topk_ids of a recorded call, without rows that have an empty place or an id twice."""
    from moedoctor.trace.capsule import CapsuleError, load

    with convert_errors(CapsuleError):
        capsule = load(Path(name))
    record = capsule.record
    for model, (shape, _) in layers.items():
        if (shape.experts, shape.top_k) != (record.experts, record.top_k):
            own = f"it is of {record.experts} experts, top {record.top_k}"
            raise InputError(f"--routing {name}: {own}; {model} has {shape.experts}, top {shape.top_k}")
    ids = capsule.tensors["topk_ids"].tolist()
    rows = [row for row in ids if len(set(row)) == len(row) and min(row) >= 0 and max(row) < record.experts]
    if not rows:
        raise InputError(f"--routing {name}: every token has an empty place, or an expert twice")
    return rows


def _read_trace_rows(name: str, layers: Layers) -> list[list[int]]:
    """Return the topk_ids of the trace's first layer, without rows that have an empty place."""
    with convert_errors(TraceError):
        trace = load(Path(name))
    for model, (shape, _) in layers.items():
        if (trace.top_k, trace.num_experts) != (shape.top_k, shape.experts):
            raise InputError(
                f"--trace {name}: its tokens choose {trace.top_k} of {trace.num_experts} experts, and "
                f"{model} {shape.top_k} of {shape.experts}; expected a trace of the same layer"
            )
    width = trace.top_k * len(trace.layers)
    rows = [
        list(trace.topk_ids[start : start + trace.top_k])
        for start in range(0, min(len(trace.topk_ids), _TRACE_ROWS * width), width)
    ]
    complete = [row for row in rows if min(row) >= 0]
    if not complete:
        raise InputError(f"--trace {name}: no row without an empty slot; expected tokens with all experts")
    return complete


def measure(
    variants: Sequence[Variant],
    layers: Layers,
    routing: tuple[str, Routing],
    *,
    tokens: Sequence[str] | None,
    device: str,
    timeout: float,
    named: Sequence[str],
    tune: Path | None = None,
) -> Bench:
    """Check and time every backend on every layer, in child processes.

    `named` are the backends as the user wrote them. With `tune`, tiles of vLLM's Triton kernel are written
    into that folder. Raises InputError if no backend can run here, or none has tiles to tune.
    """
    counts = parse_numbers("--tokens", tokens, _MAX_TOKENS, f"1 to {_MAX_TOKENS}, such as 1,64,4096")
    facts = environment.collect()
    if device == "auto":
        device = "cpu" if explain_missing_gpu(facts) else "cuda:0"
    check_gpu(device, facts)
    if tune is not None and not any(map(_has_tiles, variants)):
        raise InputError("--tune: only vLLM's Triton kernel has such files; expected --backend TRITON")
    _check_runnable(variants, named, device, facts)
    counts = counts or (_CPU_TOKENS if device == "cpu" else _GPU_TOKENS)
    routing_name, load = routing
    tasks = [
        LayerTask(variant, name, shape, counts, load, tune is not None and _has_tiles(variant))
        for variant in variants
        for name, (shape, _) in layers.items()
    ]
    with convert_errors(MachineError):
        print_message(f"measuring the limits of {device}")
        roofline, harness = measure_machine(device)
    if not sys.stderr.isatty():  # a log gets one line, a terminal a bar
        print_message(f"measuring {', '.join(dict.fromkeys(task.variant.label for task in tasks))}")
    with sample_gpus(facts, device) as readings, show_progress(remaining=True) as progress:
        rows = measure_tasks(tasks, device, roofline, seconds=timeout, progress=progress)
    if all("unavailable" in row for row in rows):
        away = sorted({str(row["unavailable"]) for row in rows})
        raise InputError(f"--backend {', '.join(named)}: {'; '.join(away)}; {_INSTEAD}")
    figures = {
        "layers": {name: {**asdict(shape), "source": source} for name, (shape, source) in layers.items()},
        "routing": routing_name,
        "device": str(facts.get("gpu") or "GPU") if device.startswith("cuda") else "CPU",
        "roofline": roofline,
        "harness": harness,
        "rows": Redactor.from_this_process().record(rows),
    }
    if tune is not None:
        figures["tuned"] = _write_tiles(rows, tune)
    code = int(any(row.get("wrong") or "failed" in row for row in rows))
    iterations = {"rounds": _describe_rounds(rows)}
    origin = record_origin(variables=facts.get("env"), gpu_state=readings, iterations=iterations)
    return Bench.from_figures("backends", figures, facts, code, origin)


def _has_tiles(variant: Variant) -> bool:
    return variant.name == "TRITON" and variant.quantization != "nvfp4"


def _write_tiles(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write tiles into vLLM's files if one pays, beside those of other numbers of tokens; return names."""
    paying = {tiles["file_name"] for row in rows if (tiles := row.get("tiles")) and tiles["ratio"] >= _PAYS}
    files: dict[str, dict[str, Any]] = {}
    for row in rows:
        if tiles := row.get("tiles"):
            files.setdefault(tiles["file_name"], {})[str(row["tokens"])] = tiles["found"]
    for name in sorted(paying):
        path = folder / name
        with convert_errors(OSError, ValueError):
            folder.mkdir(parents=True, exist_ok=True)
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            write(path, json.dumps(before | files[name], indent=4) + "\n")
    return sorted(paying)


def _describe_rounds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many rounds a time is the median of: ``5 to 15``."""
    rounds = sorted({row["rounds"] for row in rows if "rounds" in row})
    return " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))) if rounds else "nothing was timed"


def _check_runnable(
    variants: Sequence[Variant], named: Sequence[str], device: str, facts: Mapping[str, Any]
) -> None:
    """Raise InputError if every backend needs what this machine does not have."""
    if any(variant.name in ("OURS", "REFERENCE") for variant in variants):
        return
    reason = "" if facts.get("vllm") else "vLLM is not installed here"
    if device == "cpu":
        reason = explain_missing_gpu(facts) or "needs a GPU, and --device cpu was given"
    if reason:
        raise InputError(f"--backend {', '.join(named)}: {reason}; {_INSTEAD}")


def draw_pictures(bench: Bench, plot: Path) -> None:
    """Write the latency of each layer as a picture. If none can be drawn, a line on stderr says so."""
    figures = bench.bench["backends"]
    drawn = [charts[0] for name in figures["layers"] if (charts := list_charts(figures, name))]
    for chart in drawn:
        alone = len(drawn) == 1
        draw_picture(chart, plot if alone else plot.with_name(f"{plot.stem}_{chart.name}{plot.suffix}"))
