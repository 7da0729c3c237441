"""Gives one MoE layer of vLLM an expert cache: slots in place of the experts, and an `apply` that fills them.

Every modular backend computes a layer by ``moe_kernel.apply(hidden_states, w1, w2, topk_weights, topk_ids,
...)``, with scales and biases in a quantisation config that the kernel holds. So what is indexed by expert is
in those two places, and both get the cache's slots, whose addresses never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore

BACKENDS = ("TritonExperts", "MarlinExperts")
"""Classes of experts whose kernels read nothing by expert but what is replaced here."""
_PARTS = ("_a1", "_a2", "_w1", "_w2")
_FIELDS = ("scale", "alpha_or_gscale", "zp", "bias")
EXPERTS: ContextVar[int | None] = ContextVar("experts of the layer that computes", default=None)
"""Set while a cached layer computes: tiles are to be chosen as without the cache."""


def refusal(layer: Any, capacity: int) -> str | None:
    """Why `layer` cannot have a cache of `capacity` slots; None where it can."""
    parallel, kernel = layer.moe_parallel_config, getattr(layer.quant_method, "moe_kernel", None)
    method = type(layer.quant_method).__name__
    if parallel.use_ep or parallel.ep_size > 1 or parallel.dp_size > 1:
        return (
            "experts are spread over several GPUs (expert or data parallel); expected one, or tensor parallel"
        )
    if capacity < layer.top_k:
        return f"{capacity} slots hold fewer experts than one token needs (top_k {layer.top_k})"
    if layer.enable_eplb:
        return "expert load balancing moves experts at run time; expected it off"
    if kernel is None or kernel.is_monolithic:
        return f"{method} routes and computes in one kernel; expected --moe-backend triton or marlin"
    experts = type(kernel.fused_experts).__name__
    if experts not in BACKENDS:
        return f"{method} computes with {experts}; expected --moe-backend triton or marlin"
    if kernel.owns_shared_experts:
        return f"{method} computes shared experts inside of its kernel"
    return None


def per_expert(layer: Any) -> dict[str, torch.Tensor]:
    """Every tensor that the layer's kernel indexes by expert, [E, ...] each, by a name of our own."""
    experts, kernel = layer.local_num_experts, layer.quant_method.moe_kernel
    found = {"w1": layer.w13_weight.data, "w2": layer.w2_weight.data}
    for part, field, tensor in _described(kernel.fused_experts.quant_config):
        # One element is a scale of activations, for all experts.
        if tensor.dim() and tensor.shape[0] == experts and not (experts == 1 and part.startswith("_a")):
            found[f"{part}.{field}"] = tensor.data
    return found


def install(layer: Any, capacity: int, device: torch.device, *, captured: bool) -> ExpertCache:
    """Move the layer's experts to pinned host memory and let `capacity` slots take their place.

    `captured`: the engine captures CUDA graphs. Raises RuntimeError where it does and memory cannot be
    pinned. The caller has asked `refusal` before.
    """
    tensors = per_expert(layer)
    store = ExpertStore({name: one.cpu() for name, one in tensors.items()})
    engine = "device" if store.pinned else "host"
    if captured and engine == "host":
        raise RuntimeError(f"CUDA graphs need pinned host memory: {store.reason}; use --enforce-eager")
    cache = ExpertCache(store, capacity, device=device, engine=engine)
    quant_config = layer.quant_method.moe_kernel.fused_experts.quant_config
    _replace_parameters(layer, tensors, cache)
    for name in cache.weights:
        part, _, field = name.partition(".")
        if field:
            setattr(getattr(quant_config, part), field, cache.weights[name])
    for parameter in layer.parameters():  # what is not by expert was made in host memory too
        parameter.data = parameter.data.to(device)
    _replace_apply(layer, cache)
    return cache


def _described(quant_config: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    for part in _PARTS:
        for field in _FIELDS:
            tensor = getattr(getattr(quant_config, part), field)
            if isinstance(tensor, torch.Tensor):
                yield part, field, tensor


def _replace_parameters(layer: Any, tensors: dict[str, torch.Tensor], cache: ExpertCache) -> None:
    """Parameters that hold one of `tensors` get its slots; so nothing keeps the experts on the device."""
    slots = {one.data_ptr(): cache.weights[name] for name, one in tensors.items()}
    for name, parameter in list(layer.named_parameters(recurse=False)):
        held = slots.get(parameter.data_ptr())
        if held is not None and parameter.shape[1:] == held.shape[1:]:
            setattr(layer, name, torch.nn.Parameter(held, requires_grad=False))


def _replace_apply(layer: Any, cache: ExpertCache) -> None:
    kernel = layer.quant_method.moe_kernel
    compute = kernel.apply
    kernel.impl.inplace = False  # the input of the second group is not the output of the first
    # Ids of other groups are mapped to no expert, as those of other ranks are.
    nowhere = torch.arange(cache.num_experts, dtype=torch.int32, device=cache.device)  # [E]
    nowhere[cache.capacity :] = -1

    def apply(hidden_states: torch.Tensor, w1: Any, w2: Any, **given: Any) -> torch.Tensor:
        ids = given.pop("topk_ids")  # [T, K]
        many = _groups(cache, ids) > 1
        given["w1"], given["w2"] = cache.weights["w1"], cache.weights["w2"]
        given["global_num_experts"] = cache.num_experts
        given["expert_map"] = nowhere if many else None
        total: torch.Tensor | None = None
        with _choosing_tiles_for(cache.num_experts):
            for part in cache.groups(ids):
                slots = part.slot_ids  # [T, K]
                if many:
                    slots = torch.where(slots < 0, cache.capacity, slots)
                result: torch.Tensor = compute(hidden_states, topk_ids=slots, **given)  # [T, H]
                if not many:
                    return result
                # A copy, whatever the type: the kernel's output is a view of its workspace.
                total = result.to(torch.float32, copy=True) if total is None else total.add_(result)
        assert total is not None
        return total.to(hidden_states.dtype)

    kernel.apply = apply


def _groups(cache: ExpertCache, ids: torch.Tensor) -> int:
    """How many groups a call of this shape may have."""
    return -(-min(ids.numel(), cache.num_experts) // cache.capacity)


@contextmanager
def _choosing_tiles_for(experts: int) -> Iterator[None]:
    token = EXPERTS.set(experts)
    try:
        yield
    finally:
        EXPERTS.reset(token)
