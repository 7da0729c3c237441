"""Memory against speed: what fits on a GPU, what is left for the KV cache, and what PCIe then allows."""

from __future__ import annotations

from dataclasses import dataclass

from moedoctor.diagnose.plan.kv_cache import KvCache, PlanError, kv_cache
from moedoctor.diagnose.plan.traffic import Traffic, offload_traffic
from moedoctor.diagnose.plan.workspace import Workspace, workspace
from moedoctor.models.shape import ModelShape

GIB = 1 << 30
SCHEMES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
"""Bytes of a weight with its block scales: E4M3 for 16 weights of NVFP4, E8M0 for 32 of MXFP4."""
KV_TYPES = {"bf16": 2, "fp8": 1}
_LEAST_OTHER = 0.5
"""Bytes of a weight that is no expert's, in the smallest checkpoint that is believed."""
_MOST = 1.5
"""A checkpoint may be this many times what its shape gives: it may hold a vision tower and MTP layers."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for. Sizes in bytes, tokens in numbers."""

    shape: ModelShape
    scheme: str
    """Of the routed experts: a key of `SCHEMES`."""
    scheme_source: str | None = None
    """Where the scheme is said; None where it was given."""
    other_scheme: str = "bf16"
    """Of everything else."""
    checkpoint_bytes: int | None = None
    """Bytes of the checkpoint's weights where they are known; else they are computed from the shape."""
    gpu_bytes: int | None = None
    utilization: float = 0.9
    available_kv_bytes: int | None = None
    """The memory that vLLM's log gives for the KV cache; replaces what is computed from `gpu_bytes`."""
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
    """Slots a layer of an expert cache; all experts are then in host memory."""
    hit_rate: float | None = None
    bandwidth: float = 50e9
    """Bytes a second from host to device."""


@dataclass(frozen=True)
class Plan:
    """What comes of a request. Sizes in bytes; None where an input is not given."""

    expert_bytes: int
    other_bytes: int
    on_device_bytes: int
    on_host_bytes: int
    workspace: Workspace
    budget_bytes: int | None
    """GPU memory times utilisation."""
    available_kv_bytes: int
    kv: KvCache
    traffic: Traffic
    notes: tuple[str, ...]


def plan(request: PlanRequest) -> Plan:
    """Plan `request`. Raises PlanError where it cannot fit, or where an input is missing."""
    shape = request.shape
    expert_bytes = round(shape.expert_parameters() * SCHEMES[request.scheme])
    other_bytes = round(shape.other_parameters() * SCHEMES[request.other_scheme])
    notes = []
    if request.checkpoint_bytes is not None:
        _check_size(request, request.checkpoint_bytes, expert_bytes)
        other_bytes = request.checkpoint_bytes - expert_bytes
        notes.append("weights: the checkpoint's own size")
    else:
        notes.append(f"weights: computed, experts in {request.scheme}, the rest in {request.other_scheme}")
    if request.scheme_source is not None:
        notes.append(f"scheme: {request.scheme}, {request.scheme_source}")
    embeddings = round(_embedding_parameters(shape) * SCHEMES[request.other_scheme])
    traffic = offload_traffic(
        shape,
        expert_bytes=expert_bytes,
        layer_bytes=max(0, other_bytes - embeddings),
        offload_bytes=request.offload_bytes,
        mode=request.offload_mode,
        cache_slots=request.cache_slots,
        hit_rate=request.hit_rate,
        bandwidth=request.bandwidth,
    )
    on_device = expert_bytes + other_bytes - traffic.host_bytes + traffic.device_bytes
    space = workspace(request.backend, request.scheme, shape.experts.layer, request.batched_tokens)
    if request.workspace_bytes is not None:
        space = Workspace(request.workspace_bytes, "given")
    available, budget = _available(request, on_device, space, notes)
    kv = kv_cache(
        shape,
        available_bytes=available,
        context=request.context,
        kv_bytes=KV_TYPES[request.kv_type],
        block_size=request.block_size,
        batched_tokens=request.batched_tokens,
    )
    if not kv.blocks:
        notes.append("not one block of KV cache fits")
    elif kv.concurrency < 1:
        notes.append(f"not one request of {request.context} tokens fits: lower --context")
    return Plan(
        expert_bytes,
        other_bytes,
        on_device,
        traffic.host_bytes,
        space,
        budget,
        available,
        kv,
        traffic,
        tuple(notes),
    )


def _check_size(request: PlanRequest, size: int, expert_bytes: int) -> None:
    """Raises PlanError where a checkpoint of `size` bytes cannot store its experts in the scheme."""
    others = request.shape.other_parameters()
    least = expert_bytes + others * _LEAST_OTHER
    most = _MOST * (expert_bytes + others * SCHEMES["bf16"])
    if not least <= size <= most:
        raise PlanError(
            f"the checkpoint holds {size / GIB:.2f} GiB, and with experts in {request.scheme} it would be "
            f"{least / GIB:.2f} to {most / GIB:.2f} GiB; give the right --scheme, or a config.json alone"
        )


def _embedding_parameters(shape: ModelShape) -> int:
    """Parameters of the embeddings and of lm_head, which is theirs where the two are tied."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)


def _available(
    request: PlanRequest, on_device: int, space: Workspace, notes: list[str]
) -> tuple[int, int | None]:
    budget = round(request.gpu_bytes * request.utilization) if request.gpu_bytes is not None else None
    if request.available_kv_bytes is not None:
        notes.append("KV memory: as given, not computed from the GPU's memory")
        return request.available_kv_bytes, budget
    if budget is None:
        raise PlanError("neither --gpu-memory nor --available-kv is given; expected one of them, in GiB")
    if space.bytes is None:
        notes.append(f"KV memory: an upper bound, the workspace is left out: {space.how}")
    notes.append("KV memory: CUDA's own context, CUDA graphs and other activations are left out (1 to 3 GiB)")
    left = budget - on_device - (space.bytes or 0)
    if left <= 0:
        raise PlanError(
            f"{request.shape.name} in {request.scheme} needs {on_device / GIB:.2f} GiB of weights and "
            f"{(space.bytes or 0) / GIB:.2f} GiB of workspace on the device, and there are "
            f"{budget / GIB:.2f} GiB; offload at least {-left / GIB:.2f} GiB more (--offload) "
            "or use an expert cache (--expert-cache)"
        )
    return left, budget
