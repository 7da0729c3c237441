"""`moedoctor plan`: memory against speed for a model, a GPU and a backend. Computed, not measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import Output, PageFormat, as_input_error, deliver, number, one_of

_ABOVE_0 = "a number above 0"
_SCHEMES = "moedoctor.diagnose.plan.plan:SCHEMES"


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FOLDER",
            help="The model: a preset such as qwen3-30b-a3b, or a folder with config.json.",
        ),
    ],
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", parser=number("--gpu-memory", _ABOVE_0, low=0), help="Memory of the GPU in GiB."
        ),
    ] = None,
    utilization: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            parser=number("--utilization", "0 to 1", most=1),
            help="Share of the GPU's memory that vLLM may use, as in its --gpu-memory-utilization.",
        ),
    ] = 0.9,
    available_kv: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            parser=number("--available-kv", _ABOVE_0, low=0),
            help="Memory of the KV cache from vLLM's log; replaces --gpu-memory.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            parser=number("--context", _ABOVE_0, low=0, whole=True),
            help="Tokens of one request. Default: the longest context of the model.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            parser=one_of("--kv-dtype", "moedoctor.diagnose.plan.plan:KV_TYPES"),
            help="Type of the KV cache: bf16 or fp8.",
        ),
    ] = "bf16",
    block_size: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            parser=number("--block-size", _ABOVE_0, low=0, whole=True),
            help="Tokens of one KV block. Hybrid models raise it.",
        ),
    ] = 16,
    batched_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            parser=number("--batched-tokens", _ABOVE_0, low=0, whole=True),
            help="Tokens of one batch, as in vLLM's --max-num-batched-tokens.",
        ),
    ] = 8192,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            parser=one_of("--scheme", _SCHEMES),
            help="Quantization of the experts: nvfp4, mxfp4, fp8 or bf16. Default: from config.json; nvfp4 "
            "for a preset.",
        ),
    ] = None,
    other_scheme: Annotated[
        str,
        typer.Option(
            metavar="SCHEME",
            parser=one_of("--other-scheme", _SCHEMES),
            help="Quantization of all other weights: nvfp4, mxfp4, fp8 or bf16.",
        ),
    ] = "bf16",
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="MoE backend whose workspace is counted, by vLLM's name.")
    ] = "MARLIN",
    workspace: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            parser=number("--workspace", "GiB, 0 or more", most=1e9),
            help="Measured workspace of the backend; replaces the computed one.",
        ),
    ] = None,
    offload: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            parser=number("--offload", "GiB, 0 or more", most=1e9),
            help="Weights that are kept in host memory, in GiB.",
        ),
    ] = 0.0,
    offload_mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            parser=one_of("--offload-mode", "moedoctor.diagnose.plan.plan:MODES"),
            help="How offloaded weights reach the GPU: uva reads what is used, copy moves all in every step.",
        ),
    ] = "uva",
    expert_cache: Annotated[
        int | None,
        typer.Option(metavar="SLOTS", help="Experts a layer that an expert cache keeps on the GPU."),
    ] = None,
    hit_rate: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=number("--hit-rate", "0 to 1", most=1),
            help="Hit rate of the expert cache, from bench --cache. Default: that of uniform routing.",
        ),
    ] = None,
    pcie: Annotated[
        float,
        typer.Option(
            metavar="GB/S",
            parser=number("--pcie", _ABOVE_0, low=0),
            help="Bandwidth from host memory to the GPU, in GB/s.",
        ),
    ] = 50.0,
    format: PageFormat = "table",
    output: Output = None,
) -> int:
    """Compute what fits on a GPU and how fast it can be.

    Weights, workspace, KV tokens, concurrent requests, and the limit that PCIe sets on speed. Nothing is
    measured. Exit code 1 if not one request of the context fits.
    """
    from moedoctor.diagnose.plan.kv_cache import PlanError
    from moedoctor.diagnose.plan.plan import GIB, PlanRequest, plan
    from moedoctor.diagnose.plan.weights import checkpoint_bytes
    from moedoctor.diagnose.plan.workspace import check_backend
    from moedoctor.models.config_fields import ConfigError
    from moedoctor.models.presets import find_model
    from moedoctor.redaction import Redactor
    from moedoctor.reporters.plan import plan_document, plan_page

    def size(gib: float | None) -> int | None:
        return None if gib is None else round(gib * GIB)

    with as_input_error(ConfigError, PlanError):
        shape = find_model(model)
        expert_scheme, source = (scheme, None) if scheme is not None else _scheme_of(Path(model))
        request = PlanRequest(
            shape=shape,
            scheme=expert_scheme,
            scheme_source=source,
            other_scheme=other_scheme,
            checkpoint_bytes=checkpoint_bytes(Path(model)) if os.path.isdir(model) else None,
            gpu_bytes=size(gpu_memory),
            utilization=utilization,
            available_kv_bytes=size(available_kv),
            context=context or shape.max_context or 32768,
            kv_type=kv_dtype,
            block_size=block_size,
            batched_tokens=batched_tokens,
            backend=check_backend(backend),
            workspace_bytes=size(workspace),
            offload_bytes=round(offload * GIB),
            offload_mode=offload_mode,
            cache_slots=expert_cache,
            hit_rate=hit_rate,
            bandwidth=pcie * 1e9,
        )
        result = plan(request)
    code = 0 if result.kv.concurrency >= 1 else 1
    deliver(
        plan_page(request, result),
        plan_document(request, result, code),
        format=format,
        output=output,
        summary="plan",
        redactor=Redactor.of_this_process(),
    )
    return code


def _scheme_of(model: Path) -> tuple[str, str | None]:
    """Return (quantization of the experts, the file that declares it)."""
    from moedoctor.diagnose.plan.weights import expert_scheme

    if os.path.isdir(model):
        return expert_scheme(model / "config.json")
    if model.name == "config.json":
        return expert_scheme(model)
    return "nvfp4", "the default of a preset"
