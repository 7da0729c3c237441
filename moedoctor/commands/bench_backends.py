"""`moedoctor bench --backend`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moedoctor import environment
from moedoctor.bench.moe import backends as registry
from moedoctor.bench.moe.run import LayerTask, MachineError, measure_machine, measure_tasks
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.environment import no_gpu
from moedoctor.models.config_fields import ConfigError
from moedoctor.models.layer_shape import QUANTIZATIONS, LayerShape
from moedoctor.models.presets import find_model
from moedoctor.redaction import Redactor
from moedoctor.reference.moe_backend import Variant
from moedoctor.reporters.bench_backends import (
    FORMATS,
    draw,
    drawable,
    render,
    slug,
    summary_line,
)
from moedoctor.reporters.bench_backends_json import BackendBench
from moedoctor.reporters.output import OutputError, check_writable, write
from moedoctor.reporters.plots import PlotError
from moedoctor.trace.format import TraceError, load

DEFAULT_MODEL = "qwen3-30b-a3b"
_GPU_TOKENS, _CPU_TOKENS = (1, 8, 64, 512, 4096), (1, 8)
_MAX_TOKENS = 8192
_TRACE_ROWS = 8192
_LONGEST = 1e6


@dataclass(frozen=True)
class BenchBackendsRequest:
    """The command line of `moedoctor bench --backend`, as text and numbers."""

    backends: tuple[str, ...]
    models: tuple[str, ...] = ()
    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    top_k: int | None = None
    activation: str = "silu"
    quantizations: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    routing: str = "balanced"
    trace: str | None = None
    device: str = "auto"
    timeout: float = 900.0
    format: str = "table"
    output: Path | None = None
    plot: Path | None = None


def bench_backends_command(request: BenchBackendsRequest) -> int:
    """Check, time and report; 1 where a backend was wrong or failed.

    Raises InputError for wrong usage, and where no backend that was named can run here.
    """
    if request.format not in FORMATS:
        raise InputError(f"--format {request.format}: expected one of {', '.join(FORMATS)}")
    if not 0 < request.timeout < _LONGEST:  # not so for NaN either
        raise InputError(f"--timeout {request.timeout:g}: expected seconds, above 0 and below {_LONGEST:g}")
    variants = _variants(request)
    with as_input_error(ConfigError, OutputError, ValueError, TraceError):
        check_writable(request.output)
        check_writable(request.plot)
        layers = _layers(request)
        routing = _routing(request, {name: shape for name, (shape, _) in layers.items()})
    facts = environment.collect()
    device = _device(request.device, facts)
    _check_runnable(variants, request, device, facts)
    tokens = _tokens(request.tokens) or (_CPU_TOKENS if device == "cpu" else _GPU_TOKENS)
    tasks = [
        LayerTask(variant, name, shape, tokens, routing)
        for variant in variants
        for name, (shape, _) in layers.items()
    ]
    with as_input_error(MachineError):
        _say(f"measuring the limits of {device}")
        roofline, harness = measure_machine(device)
    rows = measure_tasks(
        tasks, device, roofline, seconds=request.timeout, progress=lambda text: _say(f"measuring {text}")
    )
    if all("unavailable" in row for row in rows):
        reasons = {str(row["unavailable"]) for row in rows}
        raise InputError(
            f"--backend {', '.join(request.backends)}: {'; '.join(sorted(reasons))}; {_instead()}"
        )
    bench = BackendBench(
        layers={name: {**asdict(shape), "source": source} for name, (shape, source) in layers.items()},
        routing=request.routing if request.trace is None else f"trace {Path(request.trace).name}",
        device=str(facts.get("gpu") or "GPU") if device.startswith("cuda") else "CPU",
        rows=tuple(rows),
        roofline=roofline,
        harness=harness,
        environment=facts,
        exit_code=1 if any(row.get("wrong") or "failed" in row for row in rows) else 0,
    )
    with as_input_error(OutputError):
        write_report(bench, request.format, request.output, request.plot)
    return bench.exit_code


def _variants(request: BenchBackendsRequest) -> list[Variant]:
    quantizations = _listed("--quantization", request.quantizations, QUANTIZATIONS) or QUANTIZATIONS
    names = [one.strip() for text in request.backends for one in text.split(",") if one.strip()]
    found: dict[Variant, None] = {}
    for text in names:
        name, _, one = text.partition(":")
        wanted = _listed("--backend", (one,), QUANTIZATIONS) if one else quantizations
        variants = registry.find(name, wanted)
        if not variants and registry.find(name):
            has = ", ".join(one.quantization for one in registry.find(name))
            raise InputError(f"--backend {name}: has {has}, not {', '.join(wanted)}")
        if not variants:
            raise InputError(f"--backend {name}: expected all or some of {', '.join(registry.names())}")
        found |= dict.fromkeys(variants)
    if not found:
        raise InputError(f"--backend: expected all or some of {', '.join(registry.names())}")
    return list(found)


def _layers(request: BenchBackendsRequest) -> dict[str, tuple[LayerShape, str]]:
    sizes = {
        "--hidden": request.hidden,
        "--intermediate": request.intermediate,
        "--experts": request.experts,
        "--top-k": request.top_k,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    if given and request.models:
        raise InputError(f"{next(iter(given))}: --model gives the sizes already; expected one or the other")
    if given:
        missing = [name for name in sizes if name not in given]
        if missing:
            raise InputError(f"{missing[0]}: is missing; expected {', '.join(sizes)} together")
        hidden, intermediate, experts, top_k = given.values()
        shape = LayerShape(hidden, intermediate, experts, top_k, request.activation)
        if shape.hidden % 16 or shape.intermediate % 16:
            raise InputError("--hidden and --intermediate: expected multiples of 16, the block of NVFP4")
        return {"custom": (shape, "command line")}
    found = {}
    for text in request.models or (DEFAULT_MODEL,):
        model = find_model(text)
        found[model.name] = (model.experts.layer, model.source)
    return found


def _routing(request: BenchBackendsRequest, shapes: Mapping[str, LayerShape]) -> dict[str, Any]:
    if request.trace is not None:
        return {"kind": "trace", "rows": _trace_rows(request, request.trace, shapes)}
    kind, _, skew = request.routing.lower().partition(":")
    if kind == "balanced" and not skew:
        return {"kind": "balanced"}
    if kind != "zipf":
        raise InputError(
            f"--routing {request.routing}: expected balanced, zipf or zipf:SKEW; or --trace FILE"
        )
    try:
        value = float(skew or 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise InputError(f"--routing {request.routing}: expected a skew from 0 to 10, such as zipf:1.2")
    return {"kind": "zipf", "skew": value}


def _trace_rows(
    request: BenchBackendsRequest, name: str, shapes: Mapping[str, LayerShape]
) -> list[list[int]]:
    """The choices of the trace's first layer, row by row; those with a slot of no expert are left out."""
    if request.routing.lower() != "balanced":
        raise InputError(
            f"--routing {request.routing}: --trace gives the routing already; expected one of them"
        )
    trace = load(Path(name))
    for model, shape in shapes.items():
        if (trace.top_k, trace.num_experts) != (shape.top_k, shape.experts):
            raise InputError(
                f"--trace {name}: its tokens choose {trace.top_k} of {trace.num_experts} experts, those of "
                f"{model} {shape.top_k} of {shape.experts}; expected a trace of the same layer"
            )
    width = trace.top_k * len(trace.layers)
    rows = [
        list(trace.topk_ids[start : start + trace.top_k])
        for start in range(0, min(len(trace.topk_ids), _TRACE_ROWS * width), width)
    ]
    kept = [row for row in rows if min(row) >= 0]
    if not kept:
        raise InputError(f"--trace {name}: no row without an empty slot; expected tokens with all experts")
    return kept


def _tokens(given: Sequence[str]) -> tuple[int, ...]:
    found = []
    for text in (one.strip() for part in given for one in part.split(",")):
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _MAX_TOKENS):
            raise InputError(f"--tokens {text[:40]}: expected 1 to {_MAX_TOKENS}, such as 1,64,4096")
        found.append(int(text))
    return tuple(sorted(set(found)))


def _device(wanted: str, facts: Mapping[str, Any]) -> str:
    if wanted == "cpu" or (wanted == "auto" and no_gpu(facts)):
        return "cpu"
    if wanted == "auto":
        return "cuda:0"
    number = wanted.removeprefix("cuda:")
    if wanted == number or not number.isdigit():
        raise InputError(f"--device {wanted}: expected auto, cpu or cuda:N")
    reason = no_gpu(facts)
    if reason is None and int(number) >= len(facts.get("gpus") or ()):
        reason = "there is no such GPU"
    if reason is not None:
        raise InputError(f"--device {wanted}: {reason}")
    return wanted


def _check_runnable(
    variants: Sequence[Variant], request: BenchBackendsRequest, device: str, facts: Mapping[str, Any]
) -> None:
    """Raise InputError where every backend that was named needs what this machine has not."""
    if any(one.name in ("OURS", "REFERENCE") for one in variants):
        return
    reason = no_gpu(facts) if device == "cpu" else None
    if device == "cpu" and reason is None:
        reason = "needs a GPU, and --device cpu was given"
    if reason is None and not facts.get("vllm"):
        reason = "vLLM is not installed here"
    if reason is not None:
        raise InputError(f"--backend {', '.join(request.backends)}: {reason}; {_instead()}")


def _instead() -> str:
    return "what runs here: --backend REFERENCE, --backend OURS"


def _listed(option: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(one.strip().lower() for text in given for one in text.split(",")))
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name}: expected one of {', '.join(known)}")
    return names


def write_report(bench: BackendBench, format: str, output: Path | None, plot: Path | None = None) -> None:
    """Print the report or write it to a file; a Markdown file gets its pictures (SVG) beside it.

    Raises OutputError where a file cannot be written; that no picture can be drawn is said on stderr.
    """
    pictures: list[str] = []
    try:
        pictures = _draw(bench, output if format == "markdown" else None, plot)
    except PlotError as error:
        _say(f"no picture: {error}")
    text = Redactor.of_this_process().text(render(bench, format, pictures=pictures))
    if output is None:
        sys.stdout.write(text)
    else:
        write(output, text)
        _say(f"{summary_line(bench)}; written to {output}")


def _draw(bench: BackendBench, report: Path | None, plot: Path | None) -> list[str]:
    """Draw what was asked for; the names of the pictures beside `report`."""
    names = drawable(bench)
    drawn = []
    for name in names:
        if plot is not None:
            own = plot if len(names) == 1 else plot.with_name(f"{plot.stem}_{slug(name)}{plot.suffix}")
            draw(bench, name, own)
        if report is not None:
            path = report.with_name(f"{report.stem}_{slug(name)}.svg")
            draw(bench, name, path)
            drawn.append(path.name)
    return drawn


def _say(text: str) -> None:
    print(f"moedoctor: {text}", file=sys.stderr)
