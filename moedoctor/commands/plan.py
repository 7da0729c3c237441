"""`moedoctor plan`: memory against speed for a model, a GPU and a backend. Computed, not measured."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from moedoctor.commands.options import (
    Full,
    InputError,
    Output,
    PageFormat,
    choose_from,
    convert_errors,
    declare,
    number,
    option,
)
from moedoctor.commands.pages import deliver_document

_SCHEMES = "moedoctor.diagnose.plan.plan:SCHEMES"


@declare(
    model=option("NAME|FOLDER", "The model: a preset such as qwen3-30b-a3b, or a folder with config.json."),
    gpu_memory=option("GIB", "Memory of the GPU in GiB, or of each GPU.", number()),
    tensor_parallel_size=option(
        "GPUS",
        "GPUs that share each layer, as in vLLM's --tensor-parallel-size. All figures are of each GPU.",
        number("a whole number from 1 to 1024", most=1024, whole=True),
    ),
    utilization=option(
        "SHARE",
        "Share of the GPU's memory that vLLM may use, as in its --gpu-memory-utilization.",
        number("0 to 1", zero=True, most=1),
    ),
    available_kv=option("GIB", "Memory of the KV cache from vLLM's log; replaces --gpu-memory.", number()),
    context=option(
        "TOKENS", "Tokens of one request. Default: the longest context of the model.", number(whole=True)
    ),
    kv_dtype=option(
        "TYPE", "Type of the KV cache: bf16 or fp8.", choose_from("moedoctor.diagnose.plan.plan:KV_TYPES")
    ),
    block_size=option("TOKENS", "Tokens of one KV block. Hybrid models raise it.", number(whole=True)),
    batched_tokens=option(
        "TOKENS", "Tokens of one batch, as in vLLM's --max-num-batched-tokens.", number(whole=True)
    ),
    scheme=option(
        "NAME",
        "Quantization of the experts: nvfp4, mxfp4, fp8 or bf16. Default: from config.json; nvfp4 "
        "for a preset.",
        choose_from(_SCHEMES),
    ),
    other_scheme=option(
        "NAME", "Quantization of all other weights: nvfp4, mxfp4, fp8 or bf16.", choose_from(_SCHEMES)
    ),
    backend=option("NAME", "MoE backend whose workspace is counted, by vLLM's name."),
    workspace=option(
        "GIB",
        "Measured workspace of the backend; replaces the computed one.",
        number("GiB, 0 or more", zero=True, most=1e9),
    ),
    offload=option(
        "GIB",
        "Weights that are kept in host memory, in GiB of each GPU.",
        number("GiB, 0 or more", zero=True, most=1e9),
    ),
    offload_mode=option(
        "MODE",
        "How offloaded weights reach the GPU: uva reads what is used, copy moves all in every step.",
        choose_from("moedoctor.diagnose.plan.plan:MODES"),
    ),
    expert_cache=option("SLOTS", "Experts a layer that an expert cache keeps on the GPU."),
    hit_rate=option(
        "SHARE",
        "Hit rate of the expert cache, from bench --cache. Default: the rate of uniform routing.",
        number("0 to 1", zero=True, most=1),
    ),
    pcie=option(
        "GB/S",
        "Measured bandwidth from host memory to the GPU, in GB/s. Default: that of PCIe 5.0 x16 by its "
        "specification.",
        number(),
    ),
    cpu=option(
        "GB/S",
        "Bandwidth at which the CPU reads host memory, in GB/s: with --expert-cache, the bound if the CPU "
        "computes a part of the missing experts.",
        number(),
    ),
    measure="Measure the value for --cpu on this machine. Needs torch and 2 GiB, and takes seconds.",
    ask="Take the size of the weights from the installed vLLM, which builds the model without its weights. "
    "Needs a folder or config.json, and takes seconds.",
)
def plan(
    model: str,
    gpu_memory: float | None = None,
    tensor_parallel_size: int = 1,
    utilization: float = 0.9,
    available_kv: float | None = None,
    context: int | None = None,
    kv_dtype: str = "bf16",
    block_size: int = 16,
    batched_tokens: int = 8192,
    scheme: str | None = None,
    other_scheme: str = "bf16",
    backend: str = "MARLIN",
    workspace: float | None = None,
    offload: float = 0.0,
    offload_mode: str = "uva",
    expert_cache: int | None = None,
    hit_rate: float | None = None,
    pcie: float | None = None,
    cpu: float | None = None,
    measure: bool = False,
    ask: bool = False,
    format: PageFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Compute what fits on a GPU and how fast it can be.

    Weights, workspace, KV tokens, concurrent requests, and the limit that PCIe sets on speed. Nothing is
    measured but with --measure. Exit code 1 if the model, or one request of the context, does not fit.
    """
    from moedoctor.diagnose.plan.kv_cache import PlanError
    from moedoctor.diagnose.plan.plan import GIB, MEASURED, PCIE_5_X16, SPECIFICATION, PlanRequest, plan
    from moedoctor.diagnose.plan.weights import count_checkpoint_bytes
    from moedoctor.diagnose.plan.workspace import check_backend
    from moedoctor.models.config_fields import ConfigError
    from moedoctor.models.presets import find_model
    from moedoctor.reporters.pages.plan import PlanDocument

    def to_bytes(gib: float | None) -> int | None:
        return None if gib is None else round(gib * GIB)

    if measure and cpu is not None:
        raise InputError("--cpu and --measure exclude each other; give one of them")
    cpu_bandwidth = None if cpu is None else cpu * 1e9
    with convert_errors(ConfigError, PlanError):
        shape = find_model(model)
        if measure:
            cpu_bandwidth = _measure_memory()
        built, release = _ask_installed(model, tensor_parallel_size) if ask else (None, "")
        expert_scheme, source = (scheme, None) if scheme is not None else _find_scheme(Path(model))
        request = PlanRequest(
            shape=shape,
            scheme=expert_scheme,
            scheme_source=source,
            other_scheme=other_scheme,
            checkpoint_bytes=count_checkpoint_bytes(Path(model)) if os.path.isdir(model) else None,
            built_bytes=built,
            built_by=release,
            tensor_parallel=tensor_parallel_size,
            gpu_bytes=to_bytes(gpu_memory),
            utilization=utilization,
            available_kv_bytes=to_bytes(available_kv),
            context=context or shape.max_context or 32768,
            kv_type=kv_dtype,
            block_size=block_size,
            batched_tokens=batched_tokens,
            backend=check_backend(backend),
            workspace_bytes=to_bytes(workspace),
            offload_bytes=round(offload * GIB),
            offload_mode=offload_mode,
            cache_slots=expert_cache,
            hit_rate=hit_rate,
            bandwidth=PCIE_5_X16 if pcie is None else pcie * 1e9,
            bandwidth_source=SPECIFICATION if pcie is None else "given with --pcie",
            cpu_bandwidth=cpu_bandwidth,
            cpu_source="" if cpu_bandwidth is None else MEASURED if measure else "given with --cpu",
        )
        result = plan(request)
    reason = result.notes[0] if result.missing_bytes else "not one request of the context fits"
    document, code = PlanDocument(request, result), 0 if result.kv.concurrency >= 1 else 1
    return deliver_document(document, format, output, full=full, code=code, reasons=[reason])


def _measure_memory() -> float:
    """Return the bytes a second that all cores read from memory. Raises InputError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("--measure needs torch, which is not installed; give --cpu GB/S")
    from moedoctor.bench.roofline import measure_host_memory

    return measure_host_memory()


def _ask_installed(model: str, tensor_parallel: int) -> tuple[int, str]:
    """Return (bytes of the parameters of one GPU, release) by the installed vLLM. Raises InputError."""
    from moedoctor.diagnose.preflight.ask import find_installed
    from moedoctor.diagnose.preflight.checkpoint_load import find_capability, measure_weights
    from moedoctor.diagnose.preflight.model import ModelError, open_model
    from moedoctor.processes import interrupts

    if (release := find_installed()) is None:
        raise InputError(
            "--ask: vllm is not installed here; `moedoctor preflight --wheel FILE` shows its sizes"
        )
    with convert_errors(ModelError), open_model(model) as opened, interrupts.hold_signals():
        return measure_weights(opened, tensor_parallel, release, find_capability()), release.name


def _find_scheme(model: Path) -> tuple[str, str | None]:
    """Return (quantization of the experts, the file that declares it)."""
    from moedoctor.diagnose.plan.weights import find_expert_scheme

    file = model / "config.json" if os.path.isdir(model) else model
    return find_expert_scheme(file) if file.name == "config.json" else ("nvfp4", "the default of a preset")
