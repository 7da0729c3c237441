"""`moedoctor bench`: MoE backends, engines, or an expert cache."""

from __future__ import annotations

from pathlib import Path

from moedoctor.commands.options import (
    Device,
    Full,
    InputError,
    Output,
    PageFormat,
    choose_from,
    declare,
    number,
    option,
    parse_names,
    parse_numbers,
    require_writable,
)
from moedoctor.commands.pages import deliver_document


@declare(
    backend=option(
        "NAME[:QUANTIZATION][,...]|all", "MoE backends to check and time, by vLLM's names; may be repeated."
    ),
    model=option(
        "NAME|FOLDER",
        "Model whose MoE layer is timed: a preset or a folder with config.json; may be repeated. "
        "Default: qwen3-30b-a3b. With --engine, the folder of the model that is served, or "
        "random[:KEY=VALUE,...] for random weights.",
    ),
    hidden=option("N", "Hidden size of a layer of your own, instead of --model.", min=16, max=65536),
    intermediate=option("N", "Intermediate size of one expert, with --hidden.", min=16, max=65536),
    experts=option("N", "number of experts, with --hidden.", min=1, max=4096),
    top_k=option("N", "Experts a token, with --hidden.", min=1, max=256),
    activation=option("NAME", "Activation of the experts: silu, gelu_tanh or relu2, with --hidden."),
    quantization=option(
        "NAME", "Quantizations to time: nvfp4, fp8, fp8-block, bf16. Default: all of a backend."
    ),
    tokens=option("N[,N...]", "Numbers of tokens in a call, 1 to 8192."),
    routing=option(
        "NAME", "How tokens choose experts: balanced, zipf, zipf:SKEW or FILE.moecapsule. Or use --trace."
    ),
    timeout=option(
        "SECONDS",
        "Seconds that the backends of one package may take.",
        number("seconds, above 0 and below 1e+06", most=1e6),
    ),
    plot=option(
        "FILE", "Also draw latency over tokens to this SVG file, with --backend.", callback=require_writable
    ),
    tune=option(
        "FOLDER",
        "Also look for faster tiles of vLLM's Triton kernel, with --backend TRITON, and write them there "
        "as files for VLLM_TUNED_CONFIG_FOLDER. Takes minutes a layer.",
    ),
    cache="Replay expert routing through the policies of an expert cache.",
    trace=option(
        "FILE|zipf[:KEY=VALUE,...]", "Routing trace. Default: a recorded one that comes with moedoctor."
    ),
    capacity=option(
        "N[,N...]", "Cache sizes to replay, in slots a layer. Default: top-k, doubled up to all experts."
    ),
    policy=option("NAME", "Cache policies to replay: lru, lfu, lfru, aging or belady. Default: all."),
    batch=option(
        "N[,N...]",
        "Sequences at once: with --engine several numbers, default 1,8; with --cache one number, "
        "default the calls of the trace itself.",
    ),
    scope=option(
        "NAME",
        "layer for one cache a layer, global for one cache for all layers.",
        choose_from("moedoctor.bench.cache.replay:SCOPES"),
    ),
    engine="Start vLLM itself with --model FOLDER and time its decode, on a GPU.",
    variant=option(
        "NAME='VAR=VALUE … --flag …'",
        "An engine with these variables and flags of vllm serve, with --engine; may be repeated. The "
        "others, also with a --model of their own, are compared with the first.",
    ),
    reference="Also compare tokens with MoE layers computed in float32, with --engine.",
    control="Also give each engine wrong experts, which its tokens must show, with --engine.",
    together="Start all engines at once and let them take turns, with --engine. They must fit on the GPU "
    "together.",
    repeats=option("N", "How often each engine is timed in a round, with --engine.", min=1, max=10_000),
    moe_backend=option(
        "NAME[,...]", "Values of vLLM's --moe-backend to compare, with --engine. Default: auto."
    ),
    fixes=option(
        "NAME[,...]", "Fixes of moedoctor to compare with none, with --engine; A+B for two in one engine."
    ),
    arguments=option("JSON", "More arguments of vllm.LLM, with --engine, such as '{\"cpu_offload_gb\": 4}'."),
    rounds=option(
        "N", "How often each engine is started, in turn with the others, with --engine.", min=1, max=20
    ),
)
def bench(
    backend: list[str] | None = None,
    model: list[str] | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    activation: str = "silu",
    quantization: list[str] | None = None,
    tokens: list[str] | None = None,
    routing: str = "balanced",
    device: Device = "auto",
    timeout: float = 900.0,
    plot: Path | None = None,
    tune: Path | None = None,
    cache: bool = False,
    trace: str | None = None,
    capacity: list[str] | None = None,
    policy: list[str] | None = None,
    batch: list[str] | None = None,
    scope: str = "layer",
    engine: bool = False,
    variant: list[str] | None = None,
    reference: bool = False,
    control: bool = False,
    together: bool = False,
    repeats: int = 5,
    moe_backend: list[str] | None = None,
    fixes: list[str] | None = None,
    arguments: str | None = None,
    rounds: int = 1,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Measure MoE backends, engines or an expert cache.

    --backend compares every result with the reference first and times only what is right. A time is marked !
    if p20 and p80 differ by more than 20 % of the median: then a difference of 20 % to another says nothing.
    --backend covers FP8 with one scale for each matrix of an expert (fp8) or for 128 x 128 weights
    (fp8-block), not MXFP4, nor backends for tokens grouped by expert (with BATCHED in the name) or for
    several GPUs (with MOE_EP).
    --engine compares greedy tokens of engines that differ in variables and flags, on prompts that the first
    one decides clearly, then gives tokens per second, the time of the first token, and memory. --moe-backend
    and --fixes are short forms of --variant.
    --cache gives hit rates over capacity, each beside the Belady bound; a Markdown report with -o gets its
    pictures (SVG) beside it.
    """
    chosen = {"--backend": bool(backend), "--engine": engine, "--cache": cache}
    if sum(chosen.values()) > 1:
        given = " and ".join(name for name, is_given in chosen.items() if is_given)
        raise InputError(f"bench: {given} are different benchmarks; expected one of them")
    own = {"--variant": variant, "--moe-backend": moe_backend, "--fixes": fixes, "--arguments": arguments}
    if not engine and (given_names := [name for name, value in own.items() if value]):
        raise InputError(f"bench: {given_names[0]} belongs to --engine; expected it, too")
    batches = parse_numbers("--batch", batch, 1024, "1 to 1024, such as 1,8")
    if engine:
        from moedoctor.commands.bench import engines

        plan = engines.make_plan(
            model or (),
            variant,
            moe_backend,
            fixes,
            arguments,
            batches,
            rounds=rounds,
            repeats=repeats,
            reference=reference,
            control=control,
            together=together,
        )
        measured = engines.measure(plan)
    elif backend:
        from moedoctor.commands.bench import backends

        variants = backends.find_variants(backend, quantization)
        sizes = {"--hidden": hidden, "--intermediate": intermediate, "--experts": experts, "--top-k": top_k}
        layers = backends.find_layers(model or (), sizes, activation)
        load = backends.find_routing(routing, trace, layers)
        measured = backends.measure(
            variants, layers, load, tokens=tokens, device=device, timeout=timeout, named=backend, tune=tune
        )
        if plot is not None:
            backends.draw_pictures(measured, plot)
    elif cache:
        from moedoctor.commands.bench.cache import measure
        from moedoctor.fixes.eviction import POLICIES

        policies = parse_names("--policy", policy, POLICIES) or POLICIES
        if len(batches) > 1:
            raise InputError(f"--batch {','.join(map(str, batches))}: expected one number with --cache")
        sequences = batches[0] if batches else None
        measured = measure(trace, capacity, policies=policies, batch=sequences, scope=scope)
    else:
        raise InputError("bench: say what to measure: --backend NAME, --engine or --cache")
    from moedoctor.processes import interrupts
    from moedoctor.reporters.pages.bench import list_reasons

    reasons = list_reasons(measured)
    code = interrupts.exit_code(otherwise=measured.summary["exit_code"])
    if code != measured.summary["exit_code"]:
        reasons.insert(0, "interrupted before everything was measured")
    return deliver_document(measured, format, output, full=full, code=code, reasons=reasons)
