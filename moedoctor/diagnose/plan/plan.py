"""Memory against speed: what fits on a GPU, what is left for the KV cache, and what PCIe then allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from moedoctor.diagnose.plan.kv_cache import KvCache, PlanError, fit_kv_cache
from moedoctor.diagnose.plan.repacking import Repacking, compute_host_peak, compute_repacking
from moedoctor.diagnose.plan.workspace import Workspace, compute_workspace
from moedoctor.models.shape import ModelShape

GIB = 1 << 30
SCHEMES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
"""Bytes of a weight with its block scales: E4M3 for 16 weights of NVFP4, E8M0 for 32 of MXFP4."""
KV_TYPES = {"bf16": 2, "fp8": 1}
MODES = ("uva", "copy")
PCIE_5_X16 = 32e9 * 16 * 128 / 130 / 8
"""Bytes a second: 16 lanes of 32 GT/s that send 128 bits as 130. Copies over such a link are slower."""
SPECIFICATION = "PCIe 5.0 x16 by its specification"
MEASURED = "measured with --measure"
_GPUS = (2, 4, 8, 16)
_LEAST_OTHER = 0.5
"""Bytes of a weight outside the experts, in the smallest checkpoint that is believed."""
_MOST = 1.5
"""A checkpoint may be this many times its computed size: it may hold a vision tower and MTP layers."""


@dataclass(frozen=True)
class PlanRequest:
    """The model and machine to plan for. Sizes in bytes, tokens in numbers."""

    shape: ModelShape
    scheme: str
    """The scheme of the routed experts: a key of `SCHEMES`."""
    scheme_source: str | None = None
    """The file that names the scheme; None if it was given."""
    other_scheme: str = "bf16"
    """The scheme of everything else."""
    checkpoint_bytes: int | None = None
    """Bytes of the checkpoint's weights, or None to compute them from the shape."""
    built_bytes: int | None = None
    """Bytes of the parameters that a vLLM built for one GPU; replaces what the checkpoint's size gives."""
    built_by: str = ""
    """The release that built them."""
    tensor_parallel: int = 1
    """GPUs that share each layer; every size of memory is then of each GPU."""
    gpu_bytes: int | None = None
    utilization: float = 0.9
    available_kv_bytes: int | None = None
    """The memory for the KV cache by vLLM's log; replaces what is computed from `gpu_bytes`."""
    context: int = 32768
    kv_type: str = "bf16"
    block_size: int = 16
    batched_tokens: int = 8192
    backend: str = "MARLIN"
    workspace_bytes: int | None = None
    """Measured workspace and activations; replaces what is computed for the backend."""
    offload_bytes: int = 0
    """Bytes of weights kept in host memory."""
    offload_mode: str = "uva"
    cache_slots: int | None = None
    """Slots of the expert cache in each layer; all experts are then in host memory."""
    hit_rate: float | None = None
    bandwidth: float = PCIE_5_X16
    """Bytes a second from host to device."""
    bandwidth_source: str = SPECIFICATION
    cpu_bandwidth: float | None = field(default=None, metadata={"sparse": True})
    """Bytes a second that the CPU reads from its memory, if it computes a part of the cache's misses."""
    cpu_source: str = field(default="", metadata={"sparse": True})


_LEAST_PACKED = 5 / 8
"""Of 16 bits, those that each weight takes in the cache's packed blocks: sign, mantissa, two bits of code."""


@dataclass(frozen=True)
class Traffic:
    """The place of offloaded weights and what a token moves, in bytes."""

    host_bytes: int
    """Weights in host memory."""
    device_bytes: int
    """Device memory for copies of them: the slots of an expert cache."""
    bytes_per_token: float
    tokens_per_second: float | None
    """Of one request that decodes one token a step; None if nothing moves."""
    how: str
    is_bound: bool = True
    """False if another hit rate than the assumed one makes an engine faster."""
    cpu_share: float | None = field(default=None, metadata={"sparse": True})
    """The share of an expert cache's misses that the CPU computes when both sides end at the same time."""
    both_tokens_per_second: float | None = field(default=None, metadata={"sparse": True})
    """`tokens_per_second` if the CPU computes that share, and its memory carries both sides at once."""


@dataclass(frozen=True)
class Plan:
    """The result. Sizes in bytes; None if an input is not given."""

    expert_bytes: int
    other_bytes: int
    on_device_bytes: int
    on_host_bytes: int
    workspace: Workspace
    budget_bytes: int | None
    """GPU memory times utilization."""
    available_kv_bytes: int
    kv: KvCache
    traffic: Traffic
    missing_bytes: int
    """Bytes that the GPU lacks for weights and workspace; 0 if they fit."""
    notes: tuple[str, ...]
    repack_bytes: int | None = field(default=None, metadata={"sparse": True})
    """Bytes beside the weights while the backend repacks a layer (MD026); None if they are not known."""
    repack_how: str | None = field(default=None, metadata={"sparse": True})
    host_peak_bytes: int | None = field(default=None, metadata={"sparse": True})
    """A bound of what loading takes on the host for each GPU, without the pages of mapped files."""
    host_peak_how: str | None = field(default=None, metadata={"sparse": True})


def plan(request: PlanRequest) -> Plan:
    """Plan `request`. Raises PlanError if an input is missing or impossible.

    A model that does not fit has `missing_bytes`, and notes that say what would help.
    """
    planned = _plan(request)
    if not planned.missing_bytes:
        return planned
    return replace(planned, notes=(*_suggest(request, planned), *planned.notes))


def _plan(request: PlanRequest) -> Plan:
    whole = request.shape
    try:
        shape = whole.divide(request.tensor_parallel)
    except ValueError as error:
        raise PlanError(f"--tensor-parallel-size {request.tensor_parallel}: {error}") from None
    expert_bytes = round(shape.count_expert_parameters() * SCHEMES[request.scheme])
    other_bytes = round(shape.count_other_parameters() * SCHEMES[request.other_scheme])
    notes = []
    if request.built_bytes is not None:
        other_bytes = request.built_bytes - expert_bytes
        if other_bytes <= 0:
            raise PlanError(
                f"vLLM {request.built_by} builds {request.built_bytes / GIB:.2f} GiB, and experts in "
                f"{request.scheme} alone are {expert_bytes / GIB:.2f} GiB; give the right --scheme"
            )
        notes.append(f"weights: the parameters that vLLM {request.built_by} builds, before it repacks them")
    elif request.checkpoint_bytes is not None:
        all_experts = round(whole.count_expert_parameters() * SCHEMES[request.scheme])
        _check_size(request, request.checkpoint_bytes, all_experts)
        share = shape.count_other_parameters() / whole.count_other_parameters()
        other_bytes = round((request.checkpoint_bytes - all_experts) * share)
        notes.append("weights: the checkpoint's own size")
    else:
        notes.append(f"weights: computed, experts in {request.scheme}, the rest in {request.other_scheme}")
    if request.scheme_source is not None:
        notes.append(f"scheme: {request.scheme}, {request.scheme_source}")
    embeddings = round(shape.count_embedding_parameters() * SCHEMES[request.other_scheme])
    request = replace(request, shape=shape)
    layer_bytes = max(0, other_bytes - embeddings)
    traffic = _count_traffic(request, expert_bytes, layer_bytes)
    on_device = expert_bytes + other_bytes - traffic.host_bytes + traffic.device_bytes
    space = compute_workspace(
        request.backend, request.scheme, shape.experts.layer, request.batched_tokens, request.built_by
    )
    if request.workspace_bytes is not None:
        space = Workspace(request.workspace_bytes, "given")
    budget = round(request.gpu_bytes * request.utilization) if request.gpu_bytes is not None else None
    left = _count_left(request, budget, on_device, space, notes)
    available = max(0, left)
    repacking = _compute_repacking(request, expert_bytes)
    host = _compute_host_peak(request, expert_bytes, layer_bytes)
    more, free = repacking.bytes or 0, (request.gpu_bytes or 0) - on_device
    if 0 <= free < more:
        notes.append(
            f"loading: {request.backend} needs {more / GIB:.2f} GiB more while it repacks a layer, and "
            f"{free / GIB:.2f} GiB are left beside the weights (MD026)"
        )
    kv = fit_kv_cache(
        shape,
        available_bytes=available,
        context=request.context,
        kv_bytes=KV_TYPES[request.kv_type],
        block_size=request.block_size,
        batched_tokens=request.batched_tokens,
    )
    if not kv.blocks and left >= 0:
        notes.append("not one block of KV cache fits")
    elif left >= 0 and kv.concurrency < 1:
        notes.append(f"not one request of {request.context} tokens fits: lower --context, or raise --offload")
    return Plan(
        expert_bytes=expert_bytes,
        other_bytes=other_bytes,
        on_device_bytes=on_device,
        on_host_bytes=traffic.host_bytes,
        workspace=space,
        budget_bytes=budget,
        available_kv_bytes=available,
        kv=kv,
        traffic=traffic,
        missing_bytes=max(0, -left),
        notes=tuple(notes),
        repack_bytes=repacking.bytes,
        repack_how=repacking.how,
        host_peak_bytes=host.bytes,
        host_peak_how=host.how,
    )


def _compute_repacking(request: PlanRequest, expert_bytes: int) -> Repacking:
    """Return what repacking takes beside the weights on the GPU."""
    repacking = compute_repacking(request.backend, request.scheme, request.shape.experts.layer)
    if not repacking.bytes or not request.offload_bytes or request.offload_mode == "uva":
        return repacking
    # Without UVA the old weights of an offloaded layer come to the GPU, too (`device_loading_context`).
    layer = min(request.offload_bytes, expert_bytes // request.shape.experts.count)
    return Repacking(repacking.bytes + layer, f"the offloaded layer itself, {repacking.how}")


def _compute_host_peak(request: PlanRequest, expert_bytes: int, layer_bytes: int) -> Repacking:
    """Return a bound of what weights take on the host while they are loaded, beside the mapped files.

    `layer_bytes` are the bytes of the decoder layers beside their experts.
    """
    experts, embeddings = request.shape.experts, request.shape.vocab_size * request.shape.hidden_size
    weights = experts.layer.experts * experts.layer.hidden * int(2 * SCHEMES[request.scheme]) // 2
    w13, w2 = weights * experts.layer.w13_rows, weights * experts.layer.intermediate
    if request.cache_slots is not None:
        how = "moedoctor's store of all experts, each tensor locked in its own size, and one layer's copy"
        return Repacking(expert_bytes + expert_bytes // experts.count, how)
    if not request.offload_bytes:
        largest = max(w13, round(embeddings * SCHEMES[request.other_scheme]))
        return Repacking(largest, "one tensor at a time: embeddings, or w13 of a layer; the files are mapped")
    rest = (expert_bytes + layer_bytes) // experts.count - w13 - w2  # may be many small parameters
    layers = math.ceil(request.offload_bytes * experts.count / (expert_bytes + layer_bytes))
    pinned = compute_host_peak([w13, w2] * layers, limit=request.offload_bytes)
    how = "torch rounds each pinned parameter up to a power of two, and its copy lives meanwhile; computed"
    return Repacking(pinned + 2 * max(0, rest) * layers, how)


def _check_size(request: PlanRequest, size: int, expert_bytes: int) -> None:
    """Raise PlanError if a checkpoint of `size` bytes cannot store its experts in the scheme."""
    others = request.shape.count_other_parameters()
    least = expert_bytes + others * _LEAST_OTHER
    most = _MOST * (expert_bytes + others * SCHEMES["bf16"])
    if not least <= size <= most:
        raise PlanError(
            f"the checkpoint holds {size / GIB:.2f} GiB, and with experts in {request.scheme} it would be "
            f"{least / GIB:.2f} to {most / GIB:.2f} GiB; give the right --scheme, or a config.json alone"
        )


def _suggest(request: PlanRequest, planned: Plan) -> Iterator[str]:
    """Say by how much the model does not fit, and which settings make it and one request fit."""
    missing = planned.missing_bytes / GIB
    gpu = "the GPU" if request.tensor_parallel == 1 else "each GPU"
    yield f"does not fit: {gpu} lacks {missing:.2f} GiB for weights and workspace alone"
    kv = planned.kv
    offload = request.offload_bytes + planned.missing_bytes + kv.blocks_per_request * kv.block_bytes
    tries: dict[str, dict[str, Any]] = {
        f"--offload {_round_up(offload):g}": {"offload_bytes": round(_round_up(offload) * GIB)},
        f"--expert-cache {request.shape.experts.layer.top_k}": {
            "cache_slots": request.shape.experts.layer.top_k,
            "offload_bytes": 0,
        },
    }
    for gpus in _GPUS:
        if gpus > request.tensor_parallel:
            tries[f"--tensor-parallel-size {gpus}"] = {"tensor_parallel": gpus}
    helpful = [option for option, change in tries.items() if _fits(replace(request, **change))]
    more = [option for option in helpful if "tensor" in option][1:]  # fewer GPUs are enough
    options = " or ".join(option for option in helpful if option not in more)
    yield (
        f"it fits, with one request, with {options}"
        if options
        else "no offload, expert cache or number of GPUs up to 16 helps"
    )


def _round_up(size: int) -> float:
    return math.ceil(size / GIB * 100) / 100


def _fits(request: PlanRequest) -> bool:
    try:
        return _plan(request).kv.concurrency >= 1
    except PlanError:
        return False


def _count_left(
    request: PlanRequest, budget: int | None, on_device: int, space: Workspace, notes: list[str]
) -> int:
    """Return the bytes that are left for the KV cache, below 0 if weights and workspace do not fit."""
    if request.available_kv_bytes is not None:
        notes.append("KV memory: as given, not computed from the GPU's memory")
        return request.available_kv_bytes
    if budget is None:
        raise PlanError("neither --gpu-memory nor --available-kv is given; expected one of them, in GiB")
    if space.bytes is None:
        notes.append(f"KV memory: an upper bound, the workspace is left out: {space.how}")
    notes.append("KV memory: CUDA's own context, CUDA graphs and other activations are left out (1 to 3 GiB)")
    return budget - on_device - (space.bytes or 0)


def _count_traffic(request: PlanRequest, expert_bytes: int, layer_bytes: int) -> Traffic:
    """Return the traffic of the request's offload or expert cache. Raises PlanError for impossible values.

    The bound is for one request that decodes one token a step, with perfectly hidden copies and free compute.
    Nothing with that traffic and bandwidth is faster, but the hit rate of an expert cache depends on the
    routing, so uniform routing gives an estimate and no bound. A batch moves more experts a step, shared by
    its tokens. `layer_bytes` are the bytes of the decoder layers beside their experts. Only decoder layers
    can be offloaded: vLLM gives its offloader the modules that `make_layers` builds
    (vllm/model_executor/models/utils.py).
    """
    experts, offloaded = request.shape.experts, request.offload_bytes
    expert = expert_bytes / (experts.count * experts.layer.experts)
    active = experts.count * experts.layer.top_k * expert

    def move(host_bytes: int, device_bytes: int, moved: float, how: str) -> Traffic:
        speed = request.bandwidth / moved if moved else None
        assumed = request.cache_slots is not None and request.hit_rate is None
        traffic = Traffic(host_bytes, device_bytes, moved, speed, how, is_bound=not assumed)
        if request.cpu_bandwidth is None or not moved:
            return traffic
        total = request.bandwidth + request.cpu_bandwidth
        share = request.cpu_bandwidth / total
        return replace(traffic, cpu_share=share, both_tokens_per_second=total / moved)

    if request.cache_slots is not None:
        rate, how = _find_hit_rate(request, request.cache_slots)
        cached = round(experts.count * request.cache_slots * expert)
        least = _LEAST_PACKED if request.scheme == "bf16" else 1
        how += f"; packed, at least {least:.1%} of BF16" if least < 1 else ""
        return move(expert_bytes, cached, active * (1 - rate) * least, how)
    if request.cpu_bandwidth is not None:
        raise PlanError("--cpu and --measure are of an expert cache; give --expert-cache SLOTS as well")
    if request.hit_rate is not None:
        raise PlanError(
            f"--hit-rate {request.hit_rate:g}: is of an expert cache; give --expert-cache SLOTS as well"
        )
    if offloaded < 0 or offloaded > expert_bytes + layer_bytes:
        raise PlanError(
            f"--offload {offloaded / GIB:g}: expected 0 to "
            f"{(expert_bytes + layer_bytes) / GIB:.2f} GiB, the size of the decoder layers; embeddings "
            "and lm_head are not offloaded"
        )
    if not offloaded:
        return move(0, 0, 0.0, "nothing is offloaded")
    if request.offload_mode == "copy":
        how = "every offloaded byte is copied in every step (no UVA, or --offload-backend prefetch)"
        return move(offloaded, 0, float(offloaded), how)
    # Offloaded layer by layer, so experts and the rest are offloaded in the proportion that they have.
    share = offloaded / (expert_bytes + layer_bytes)
    how = "UVA: kernels read what a token needs, the active experts and all the rest of an offloaded layer"
    return move(offloaded, 0, share * (active + layer_bytes), how)


def _find_hit_rate(request: PlanRequest, slots: int) -> tuple[float, str]:
    layer = request.shape.experts.layer
    if request.offload_bytes:
        raise PlanError("--offload and --expert-cache exclude each other; give one of them")
    if not layer.top_k <= slots <= layer.experts:
        raise PlanError(
            f"--expert-cache {slots}: expected {layer.top_k} (top_k) to {layer.experts} slots a layer"
        )
    if request.hit_rate is not None:
        return request.hit_rate, f"hit rate {request.hit_rate:.3f}, given with --hit-rate"
    rate = slots / layer.experts
    return rate, f"hit rate {rate:.3f}, computed for uniform routing; measure yours with bench --cache"
