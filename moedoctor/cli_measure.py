"""`plan` and `bench`: parsed, and handed to the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.cli_options import OutputOption, TableFormatOption


def plan(
    model: Annotated[
        str,
        typer.Option(metavar="NAME|FOLDER", help="A preset (see the README) or a folder with a config.json."),
    ],
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="Memory of the GPU.")] = None,
    utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="vLLM's --gpu-memory-utilization.")
    ] = 0.9,
    available_kv: Annotated[
        float | None, typer.Option(metavar="GIB", help="KV memory from vLLM's log, in place of --gpu-memory.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Tokens of a request; default: the model's most.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16 or fp8.")] = "bf16",
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens of a KV block; hybrid models raise it.")
    ] = 16,
    batched_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", help="vLLM's --max-num-batched-tokens.")
    ] = 8192,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help="Of the experts: nvfp4, mxfp4, fp8 or bf16; default: by config.json, nvfp4 of a preset.",
        ),
    ] = None,
    other_scheme: Annotated[str, typer.Option(metavar="SCHEME", help="Of everything else.")] = "bf16",
    backend: Annotated[str, typer.Option(metavar="NAME", help="MoE backend, for its workspace.")] = "MARLIN",
    workspace: Annotated[
        float | None, typer.Option(metavar="GIB", help="Measured workspace, in place of the computed one.")
    ] = None,
    offload: Annotated[float, typer.Option(metavar="GIB", help="Weights kept in host memory.")] = 0.0,
    offload_mode: Annotated[
        str, typer.Option(metavar="MODE", help="uva, or copy: everything in every step.")
    ] = "uva",
    expert_cache: Annotated[
        int | None, typer.Option(metavar="SLOTS", help="Slots a layer of an expert cache.")
    ] = None,
    hit_rate: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of that cache, from bench --cache; default: uniform routing."),
    ] = None,
    pcie: Annotated[float, typer.Option(metavar="GB/S", help="Host to device bandwidth.")] = 50.0,
    format: TableFormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Weigh memory against speed.

    Weights, workspace, KV tokens, concurrency and the bound that PCIe sets, computed for a model and a GPU.
    Exit code 1 where not one request of the context fits.
    """
    from moedoctor.commands.plan import PlanOptions, plan_command

    options = PlanOptions(
        model=model,
        gpu_memory=gpu_memory,
        utilization=utilization,
        available_kv=available_kv,
        context=context,
        kv_type=kv_dtype.lower(),
        block_size=block_size,
        batched_tokens=batched_tokens,
        scheme=None if scheme is None else scheme.lower(),
        other_scheme=other_scheme.lower(),
        backend=backend,
        workspace=workspace,
        offload=offload,
        offload_mode=offload_mode.lower(),
        expert_cache=expert_cache,
        hit_rate=hit_rate,
        bandwidth=pcie,
        format=format,
        output=output,
    )
    raise typer.Exit(plan_command(options))


def bench(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:QUANTIZATION][,...]|all", help="Check and time MoE backends, by vLLM's names."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help="Preset or folder with a config.json; may be repeated. Default: qwen3-30b-a3b.",
        ),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(metavar="N", min=16, max=65536, help="In place of --model.")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(metavar="N", min=16, max=65536, help="Of one expert.")
    ] = None,
    experts: Annotated[int | None, typer.Option(metavar="N", min=1, max=4096)] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", min=1, max=256, help="Experts a token.")] = None,
    activation: Annotated[
        str, typer.Option(metavar="NAME", help="silu, gelu_tanh or relu2, with --hidden.")
    ] = "silu",
    quantization: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="nvfp4, fp8 or bf16; default: all that the backends have."),
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(metavar="N[,N...]", help="Tokens a call, 1 to 8192.")
    ] = None,
    routing: Annotated[
        str, typer.Option(metavar="NAME", help="balanced, zipf or zipf:SKEW; --trace FILE takes a trace's.")
    ] = ("balanced"),
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda:N; with --backend.")
    ] = "auto",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds that the backends of one package may take.")
    ] = 900.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Latency over tokens as SVG; with --backend.")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Replay expert routing through cache policies.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|zipf[:KEY=VALUE,...]", help="Routing trace; default: a real one that ships along."
        ),
    ] = None,
    capacity: Annotated[
        list[str] | None, typer.Option(metavar="N[,N...]", help="Slots a layer; default: doubles from top-k.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="lru, lfu, lfru, aging or belady; default: all.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Sequences side by side; default: the trace's own calls."),
    ] = None,
    scope: Annotated[
        str, typer.Option(metavar="NAME", help="layer: a cache a layer; global: one for all.")
    ] = "layer",
    speed: Annotated[
        bool, typer.Option("--speed", help="With --cache: also tokens per second, on a GPU.")
    ] = False,
    format: TableFormatOption = "table",
    output: OutputOption = None,
) -> None:
    """Measure backends or an expert cache.

    --backend compares every result with the reference first and times only what is right.
    --cache gives hit rates over capacity, each beside the Belady bound; a Markdown report with -o gets
    its pictures (SVG) beside it.
    """
    from moedoctor.commands.errors import InputError

    if backend and cache:
        raise InputError("bench: --backend and --cache are two benchmarks; expected one of them")
    if backend:
        from moedoctor.commands.bench_backends import BenchBackendsRequest, bench_backends_command

        raise typer.Exit(
            bench_backends_command(
                BenchBackendsRequest(
                    backends=tuple(backend),
                    models=tuple(model or ()),
                    hidden=hidden,
                    intermediate=intermediate,
                    experts=experts,
                    top_k=top_k,
                    activation=activation,
                    quantizations=tuple(quantization or ()),
                    tokens=tuple(tokens or ()),
                    routing=routing,
                    trace=trace,
                    device=device,
                    timeout=timeout,
                    format=format,
                    output=output,
                    plot=plot,
                )
            )
        )
    if cache:
        from moedoctor.commands.bench_cache import BenchCacheRequest, bench_cache_command

        request = BenchCacheRequest(
            trace=trace,
            capacities=tuple(capacity or ()),
            policies=tuple(policy or ()),
            batch=batch,
            scope=scope,
            speed=speed,
            format=format,
            output=output,
        )
        raise typer.Exit(bench_cache_command(request))
    raise InputError("bench: say what to measure: --backend NAME or --cache")
