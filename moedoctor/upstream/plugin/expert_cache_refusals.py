"""What cannot have an expert cache inside vLLM 0.21.0, and why, in one line each."""

from __future__ import annotations

from typing import Any

BACKENDS = ("TritonExperts", "MarlinExperts")
"""Classes of experts whose kernels read nothing by expert but what is replaced."""
_ACT_ORDER = ("w13_g_idx", "w2_g_idx", "w13_g_idx_sort_indices", "w2_g_idx_sort_indices")


def refused_engine(vllm_config: Any) -> str | None:
    """Why an engine of this configuration cannot have caches; None where it can."""
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        return "weights are offloaded by --cpu-offload-gb or --offload-group-size; expected one of the two"
    return None


def refused_setting(layer: Any, capacity: int) -> str | None:
    """Why a layer with these settings cannot have `capacity` slots, known before weights are loaded."""
    parallel = layer.moe_parallel_config
    if parallel.use_ep or parallel.ep_size > 1 or parallel.dp_size > 1 or parallel.pcp_size > 1:
        return (
            "experts are spread over several GPUs (expert, data or prefill context parallel); expected one "
            "GPU, or tensor parallel"
        )
    if capacity < layer.top_k:
        return f"{capacity} slots hold fewer experts than one token needs (top_k {layer.top_k})"
    if layer.enable_eplb:
        return "expert load balancing moves experts at run time; expected it off"
    if layer.moe_config.is_lora_enabled:
        return "LoRA goes by the ids of experts, which are slots here; expected it off"
    return None


def refused_kernel(layer: Any) -> str | None:
    """Why the kernel that a loaded layer computes with cannot have a cache."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    method = type(layer.quant_method).__name__
    if kernel is None or kernel.is_monolithic:
        return f"{method} routes and computes in one kernel; expected --moe-backend triton or marlin"
    experts = kernel.fused_experts
    if type(experts).__name__ not in BACKENDS:
        return f"{method} computes with {type(experts).__name__}; expected --moe-backend triton or marlin"
    if kernel.owns_shared_experts:
        return f"{method} computes shared experts inside of its kernel"
    if any(one is not None and one.numel() for one in (getattr(experts, name, None) for name in _ACT_ORDER)):
        return f"{method} reorders activations by expert (act-order); expected a checkpoint without"
    return None


def refusal(layer: Any, capacity: int) -> str | None:
    """Why a loaded layer cannot have a cache of `capacity` slots; None where it can."""
    return refused_setting(layer, capacity) or refused_kernel(layer)
