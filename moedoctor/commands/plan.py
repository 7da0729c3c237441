"""`moedoctor plan`: memory against speed for a model, a GPU and a backend. Computed, not measured."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.diagnose.plan.kv_cache import PlanError
from moedoctor.diagnose.plan.plan import GIB, KV_TYPES, MODES, SCHEMES, Plan, PlanRequest, plan
from moedoctor.diagnose.plan.weights import checkpoint_bytes, expert_scheme
from moedoctor.diagnose.plan.workspace import check_backend
from moedoctor.models.config_fields import ConfigError
from moedoctor.models.presets import find_model
from moedoctor.models.shape import ModelShape
from moedoctor.redaction import Redactor
from moedoctor.reporters.output import OutputError, check_writable, write

FORMATS = ("table", "json", "markdown")
_PRESET_SCHEME = "nvfp4"


@dataclass(frozen=True)
class PlanOptions:
    """The command line of `moedoctor plan`; sizes in GiB, bandwidth in GB/s."""

    model: str
    gpu_memory: float | None = None
    utilization: float = 0.9
    available_kv: float | None = None
    context: int | None = None
    kv_type: str = "bf16"
    block_size: int = 16
    batched_tokens: int = 8192
    scheme: str | None = None
    """None: what the model's config.json says, and of a preset nvfp4."""
    other_scheme: str = "bf16"
    backend: str = "MARLIN"
    workspace: float | None = None
    offload: float = 0.0
    offload_mode: str = "uva"
    expert_cache: int | None = None
    hit_rate: float | None = None
    bandwidth: float = 50.0
    format: str = "table"
    output: Path | None = None


def plan_command(options: PlanOptions) -> int:
    """Print the plan; 0 where a request of the whole context fits, 1 where it does not.

    Raises InputError for input that cannot be planned.
    """
    _check(options)
    with as_input_error(ConfigError, PlanError, OutputError):
        check_writable(options.output)
        shape = find_model(options.model)
        request = _request(options, shape)
        result = plan(request)
    code = 0 if result.kv.concurrency >= 1 else 1
    redactor = Redactor.of_this_process()
    if options.format == "json":
        text = redactor.text(json.dumps(_document(request, result, code), indent=1, allow_nan=False)) + "\n"
    else:
        text = redactor.text(_page(request, result, options.format))
    if options.output is None:
        sys.stdout.write(text)
    else:
        with as_input_error(OutputError):
            write(options.output, text)
        print(f"moedoctor: plan written to {options.output}", file=sys.stderr)
    return code


def _check(options: PlanOptions) -> None:
    """Raises InputError for a value outside its range."""
    for flag, value, known in (
        ("--format", options.format, FORMATS),
        ("--kv-dtype", options.kv_type, KV_TYPES),
        ("--scheme", options.scheme if options.scheme is not None else _PRESET_SCHEME, SCHEMES),
        ("--other-scheme", options.other_scheme, SCHEMES),
        ("--offload-mode", options.offload_mode, MODES),
    ):
        if value not in known:
            raise InputError(f"{flag} {value}: expected one of {', '.join(known)}")
    positive = {
        "--gpu-memory": options.gpu_memory,
        "--available-kv": options.available_kv,
        "--pcie": options.bandwidth,
        "--context": options.context,
        "--block-size": options.block_size,
        "--batched-tokens": options.batched_tokens,
    }
    for flag, number in positive.items():
        if number is not None and not 0 < number < 1e12:
            raise InputError(f"{flag} {number:g}: expected a number above 0")
    for flag, share in (("--utilization", options.utilization), ("--hit-rate", options.hit_rate)):
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"{flag} {share:g}: expected 0 to 1")
    for flag, size in (("--workspace", options.workspace), ("--offload", options.offload)):
        if size is not None and not 0 <= size < 1e9:
            raise InputError(f"{flag} {size:g}: expected GiB, 0 or more")


def _request(options: PlanOptions, shape: ModelShape) -> PlanRequest:
    def size(value: float | None) -> int | None:
        return None if value is None else round(value * GIB)

    scheme, source = _scheme(options)
    return PlanRequest(
        shape=shape,
        scheme=scheme,
        scheme_source=source,
        other_scheme=options.other_scheme,
        checkpoint_bytes=checkpoint_bytes(Path(options.model)) if os.path.isdir(options.model) else None,
        gpu_bytes=size(options.gpu_memory),
        utilization=options.utilization,
        available_kv_bytes=size(options.available_kv),
        context=options.context or shape.max_context or 32768,
        kv_type=options.kv_type,
        block_size=options.block_size,
        batched_tokens=options.batched_tokens,
        backend=check_backend(options.backend),
        workspace_bytes=size(options.workspace),
        offload_bytes=round(options.offload * GIB),
        offload_mode=options.offload_mode,
        cache_slots=options.expert_cache,
        hit_rate=options.hit_rate,
        bandwidth=options.bandwidth * 1e9,
    )


def _scheme(options: PlanOptions) -> tuple[str, str | None]:
    """(the experts' scheme, where it is said); given ones are said nowhere else."""
    if options.scheme is not None:
        return options.scheme, None
    path = Path(options.model)
    if os.path.isdir(path):
        return expert_scheme(path / "config.json")
    if path.name == "config.json":
        return expert_scheme(path)
    return _PRESET_SCHEME, "the default of a preset"


def _rows(request: PlanRequest, result: Plan) -> list[tuple[str, str, str]]:
    """(what, how much, how it comes about), for a person."""
    kv, traffic, experts = result.kv, result.traffic, request.shape.experts
    held = f"{experts.count} layers × {experts.layer.experts} experts in {request.scheme}"
    rows = [
        ("expert weights", _gib(result.expert_bytes), held),
        (
            "other weights",
            _gib(result.other_bytes),
            "attention, shared experts, embeddings"
            + (
                f" in {request.other_scheme}"
                if request.checkpoint_bytes is None
                else ": the checkpoint's rest"
            ),
        ),
    ]
    if result.on_host_bytes:
        rows.append(
            ("of these on the host", _gib(result.on_host_bytes), "pinned memory that the host must have")
        )
    rows.append(
        ("weights on the GPU", _gib(result.on_device_bytes), "with the slots of an expert cache, if any")
    )
    space = result.workspace
    rows.append((f"workspace of {request.backend}", _gib(space.bytes), space.how))
    if result.budget_bytes is not None:
        rows.append(
            ("GPU budget", _gib(result.budget_bytes), f"memory × utilisation {request.utilization:g}")
        )
    group = f"{kv.groups} group{'s' if kv.groups > 1 else ''} of {kv.layers_per_group} layers"
    rows += [
        ("KV memory", _gib(result.available_kv_bytes), f"{kv.blocks:,} blocks of {kv.block_bytes:,} bytes"),
        ("KV block", f"{kv.block_size:,} tokens", group),
        ("KV of one token", f"{kv.bytes_per_token:,} bytes", f"attention layers only, {request.kv_type}"),
    ]
    if kv.state_bytes_per_request:
        rows.append(
            ("state of one request", f"{kv.state_bytes_per_request / (1 << 20):.1f} MiB", "recurrent layers")
        )
    rows += [
        ("KV tokens", f"{kv.tokens_printed_to_0_20:,}", "as vLLM 0.17.1 to 0.20.0 print them"),
        ("", f"{kv.tokens_printed_from_0_21:,}", "as vLLM 0.21.0 and newer print them"),
        ("concurrency", f"{kv.concurrency:.2f}", f"requests of {request.context:,} tokens at once"),
        ("PCIe per token", f"{traffic.bytes_per_token / 1e6:,.1f} MB", traffic.how),
    ]
    if traffic.tokens_per_second is not None:
        bound = f"at {request.bandwidth / 1e9:g} GB/s, one request; nothing real is faster"
        rows.append(("bound by PCIe", f"{traffic.tokens_per_second:.1f} tokens/s", bound))
    return rows


def _page(request: PlanRequest, result: Plan, format: str) -> str:
    shape = request.shape
    head = f"plan for {shape.name}: computed from {shape.source}; nothing was measured"
    rows = _rows(request, result)
    if format == "markdown":
        body = ["# " + head, "", "| what | how much | how |", "|---|---:|---|"]
        body += [f"| {what} | {much} | {how.replace('|', chr(92) + '|')} |" for what, much, how in rows]
        notes = ["", *(f"- {one}" for one in result.notes)]
    else:
        wide = max(len(what) for what, _, _ in rows), max(len(much) for _, much, _ in rows)
        body = [head, ""] + [f"{what:<{wide[0]}}  {much:>{wide[1]}}  {how}" for what, much, how in rows]
        notes = ["", *result.notes]
    return "\n".join([*body, *notes]) + "\n"


def _gib(size: int | None) -> str:
    return "not known" if size is None else f"{size / GIB:.2f} GiB"


def _document(request: PlanRequest, result: Plan, code: int) -> dict[str, Any]:
    inputs = dataclasses.asdict(request)
    inputs["shape"] = {"name": request.shape.name, "source": request.shape.source}
    return {
        "schema_version": 1,
        "moedoctor": moedoctor.__version__,
        "command": "plan",
        "inputs": inputs,
        "plan": dataclasses.asdict(result),
        "summary": {"exit_code": code},
    }
