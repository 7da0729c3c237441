"""The fix `expert_cache`: vLLM runs MoE models with experts in host memory and hot experts cached on the GPU.

``MOEDOCTOR_EXPERT_CACHE=N`` gives each layer N slots, ``N:policy=lfru,packed=0`` also sets options. It is
what vllm-project/vllm#37190 offers, without its fault and with CUDA graphs. Experts are loaded into host
memory, taken to the GPU layer by layer to be repacked, and pinned; slots take their place before vLLM
profiles memory, so the KV cache gets what is left. Backends: TRITON (BF16, FP8), MARLIN (FP8, NVFP4) and
HUMMING (NVFP4). A model that cannot have a cache is refused with the reason: if it started without one, it
would run out of memory later, or seem to save memory when it does not.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.kernels.cache import EVERY_ROW
from moedoctor.plugin import weight_reload
from moedoctor.plugin.expert_cache_layer import (
    EXPERTS,
    HostExperts,
    find_host_experts,
    install,
    stream_prompts,
    to_device,
)
from moedoctor.plugin.expert_cache_options import VARIABLE, CacheOptions, read_options
from moedoctor.plugin.register import FixError, Patch, apply_patches, refuse
from moedoctor.plugin.steps import Steps
from moedoctor.results import UnavailableError

logger = logging.getLogger("vllm.moedoctor")

NAME = "expert_cache"
BACKENDS = ("TritonExperts", "MarlinExperts", "HummingIndexedExperts")
"""Classes of experts whose kernels index by expert only what is replaced."""
_FUSED = "vllm.model_executor.layers.fused_moe"
_METHODS = (
    f"{_FUSED}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod",
    "vllm.model_executor.layers.quantization.modelopt:ModelOptNvFp4FusedMoE",
)
"""Methods whose experts are made in host memory."""
_CREATES = ('layer.register_parameter("w13_weight", w13_weight)',)
_LOADER = "vllm.model_executor.model_loader.base_loader:BaseModelLoader"
_LOADS = ("process_weights_after_loading(model, model_config, target_device)", "return model.eval()")
_APPLIES = ("self.impl.apply(", "global_num_experts=global_num_experts")
_ACT_ORDER = ("w13_g_idx", "w2_g_idx", "w13_g_idx_sort_indices", "w2_g_idx_sort_indices")


def apply(version: str) -> str:
    """Apply the fix; see `moedoctor.plugin.register`.

    Raises FixError also if the variable is not set, and OptionError if its value is wrong.
    """
    options = read_wish(os.environ)
    if options is None:
        raise FixError(f"{VARIABLE} is not set; expected the number of expert slots of a layer")
    caching = functools.partial(_wrap_load_model, wish=options, layer_type=_find_layer_type(), rows=real_rows)
    creating, load = functools.partial(_create_on_host, slots=options.slots), "self vllm_config model_config"
    kernel = f"{_FUSED}.modular_kernel:FusedMoEKernel"
    call = "hidden_states w1 w2 topk_weights topk_ids expert_map"
    tiles, shapes = f"{_FUSED}.experts.triton_moe", ("E, _, N = w2_shape",)
    few = ("num_tokens * top_k_num * 4 <= global_num_experts",)
    patches = [
        Patch(_LOADER, "load_model", caching, load, _LOADS),
        *(Patch(loader, "load_model", caching, load) for loader in _list_loaders()),
        Patch(kernel, "apply", None, call, _APPLIES),
        *(Patch(method, "create_weights", creating, "layer num_experts", _CREATES) for method in _METHODS),
        Patch(tiles, "try_get_optimal_moe_config", _keep_tiles, "w1_shape w2_shape", shapes),
        Patch(tiles, "_prepare_expert_assignment", _keep_assignment, _ASSIGNMENT, few),
        Patch(f"{tiles}:TritonExperts", "moe_sum", None, "input output", ("ops.moe_sum(",)),
        *Steps(real_rows.begin, real_rows.end).list_patches(),
    ]
    weight_reload.apply(version)
    apply_patches(NAME, version, patches)
    return f"{options.slots} expert slots a MoE layer, policy {options.policy}"


def _find_layer_type() -> type:
    """Return the module that holds a layer's experts: from 0.22.0 on it is not the layer itself."""
    try:
        experts = importlib.import_module(f"{_FUSED}.routed_experts")
    except ImportError:
        return importlib.import_module(f"{_FUSED}.layer").FusedMoE  # type: ignore[no-any-return]
    return experts.RoutedExperts  # type: ignore[no-any-return]


def _list_loaders() -> Sequence[str]:
    """Return vLLM's other loaders with a `load_model` of their own."""
    known = importlib.import_module("vllm.model_executor.model_loader")._LOAD_FORMAT_TO_MODEL_LOADER
    own = (loader for loader in known.values() if "load_model" in vars(loader))
    names = dict.fromkeys(f"{loader.__module__}:{loader.__qualname__}" for loader in own)
    return tuple(name for name in names if name != _LOADER)


def read_wish(environ: Mapping[str, str]) -> CacheOptions | None:
    """Return what the variable asks for, or None if it is not set. Raises OptionError."""
    text = environ.get(VARIABLE, "").strip()
    return read_options(text) if text else None


class RealRows:
    """The number of rows of a step that are no padding, in memory that the caches of this process read.

    A CUDA graph computes as many rows as it was captured for. What the router chooses for padding would be
    loaded like anything else.
    """

    def __init__(self) -> None:
        self._rows: dict[Any, Any] = {}
        """Device -> int32 [1]."""
        self._padded = False

    def get_rows(self, device: Any) -> Any:
        """Return int32 [1] on `device`, always the same."""
        import torch

        device = torch.device(device)
        if device not in self._rows:
            self._rows[device] = torch.full((1,), EVERY_ROW, dtype=torch.int32, device=device)
        return self._rows[device]

    def begin(self, real: int, rows: int) -> None:
        """Begin a step of `rows` rows, of which the first `real` are no padding."""
        if real < rows:
            self._write(real)
            self._padded = True

    def end(self, hidden: Any) -> None:
        """End the step: what runs between steps, such as a draft model, has other rows."""
        if self._padded:
            self._write(EVERY_ROW)
            self._padded = False

    def _write(self, rows: int) -> None:
        for tensor in self._rows.values():
            tensor.fill_(rows)


real_rows = RealRows()
"""Of this process."""


def _wrap_load_model(original: Any, *, wish: CacheOptions, layer_type: type, rows: RealRows) -> Any:
    """Wrap `load_model`: after it every MoE layer has its cache."""

    def load_model(self: Any, vllm_config: Any, model_config: Any, *arguments: Any, **options: Any) -> Any:
        reason = check_engine(vllm_config)
        if reason is not None:
            _leave_out(wish.slots, reason)
        model = original(self, vllm_config, model_config, *arguments, **options)
        is_draft = model_config is not vllm_config.model_config
        if is_draft and not any(isinstance(module, layer_type) for module in model.modules()):
            return model
        device = vllm_config.device_config.device
        _give_caches(model, wish, layer_type, device, _is_captured(vllm_config, model_config))
        for experts in find_host_experts(model):
            experts.skip_padding(rows.get_rows(experts.cache.device))
            weight_reload.hold(NAME, experts)
        return model

    return load_model


def _is_captured(vllm_config: Any, model_config: Any) -> bool:
    """Return True if the engine captures CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return not model_config.enforce_eager and getattr(mode, "name", "") != "NONE"


def _give_caches(model: Any, options: CacheOptions, layer_type: type, device: Any, captured: bool) -> None:
    import torch

    slots = options.slots
    if find_host_experts(model):
        return  # a loader that calls another loader has done it
    layers: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, layer_type)
    ]
    if not layers:
        _leave_out(slots, "the model has no MoE layer; expected one, or unset the variable")
    for name, layer in layers:
        reason = check_layer(layer, slots)
        if reason is not None:
            _leave_out(slots, f"{name} cannot have an expert cache: {reason}")
    device, caches = torch.device(device), []
    for _, layer in layers:
        if slots < layer.local_num_experts and not _left_out:
            try:
                caches.append(install(layer, options, device, captured=captured))
                continue
            except UnavailableError as error:  # of the machine, so of the first layer
                _leave_out(slots, str(error))
        to_device(layer, device)  # every expert fits, or vLLM computes without a cache
    if _left_out:
        return
    torch.cuda.empty_cache()
    stream = stream_prompts(find_host_experts(model), options)
    buffers = 0 if stream is None else stream.nbytes
    # vLLM kept the experts in pinned memory of torch's own, which torch would keep for later.
    if torch.cuda.is_available():
        torch._C._host_emptyCache()
    if options.cpu != 0:
        _start_cpu(find_host_experts(model), options, device, captured)
    memory = [cache.memory for cache in caches]
    order = {"hits first" if layer.hits_first else "copies first" for layer in find_host_experts(model)}
    logger.info(
        "moedoctor: expert_cache: %d of %d MoE layers with %d slots, engine %s, policy %s%s: "
        "%.2f GiB pinned%s, %.2f GiB on the GPU and %.2f GiB of layer buffers for prompts, "
        "%.2f GiB left to the KV cache",
        len(caches),
        len(layers),
        slots,
        caches[0].engine if caches else "none",
        options.policy,
        "".join(f", {words}" for words in sorted(order)),
        sum(layer.pinned for layer in memory) / 2**30,
        ", packed" if any(cache.packed for cache in caches) else "",
        sum(layer.device for layer in memory) / 2**30,
        buffers / 2**30,
        (sum(layer.saved for layer in memory) - buffers) / 2**30,
    )


def _start_cpu(layers: Sequence[HostExperts], options: CacheOptions, device: Any, captured: bool) -> None:
    """Let the CPU compute a part of the missing experts, or raise SystemExit; ``auto`` goes without it."""
    from moedoctor.plugin import cpu_experts

    wish = "auto" if options.cpu is None else f"{options.cpu:g}"
    try:
        line = cpu_experts.start(layers, options, device, captured)
        logger.info("moedoctor: expert_cache: cpu=%s: %s", wish, line)
    except UnavailableError as error:
        if options.cpu is not None:
            refuse(NAME, f"{VARIABLE}={options.slots}:cpu={wish}: {error}")
        logger.warning("moedoctor: expert_cache: cpu=%s computes nothing: %s", wish, error)


def _create_on_host(original: Any, *, slots: int) -> Any:
    """Wrap `create_weights` of a MoE method: in host memory, because experts need not fit on the GPU.

    vLLM takes each layer's parameters to the GPU and back to repack them. Weights that are made up rather
    than loaded stay on the GPU, which is faster. A setting that rules a cache out is refused here, before
    anything is loaded.
    """

    def create_weights(self: Any, layer: Any, *arguments: Any, **options: Any) -> Any:
        import torch

        reason = check_setting(layer, slots)
        if reason is not None:
            _leave_out(slots, f"{layer.layer_name} cannot have an expert cache: {reason}")
        config = importlib.import_module("vllm.config").get_current_vllm_config()
        if _left_out or config.load_config.load_format == "dummy":
            return original(self, layer, *arguments, **options)
        with torch.device("cpu"):
            return original(self, layer, *arguments, **options)

    return create_weights


def _keep_tiles(original: Any) -> Any:
    """Choose tiles as for all experts: other tiles would round differently, and tokens could change."""

    def try_get_optimal_moe_config(w1_shape: Any, w2_shape: Any, *arguments: Any, **options: Any) -> Any:
        experts = EXPERTS.get()
        if experts is not None:
            w1_shape, w2_shape = (experts, *w1_shape[1:]), (experts, *w2_shape[1:])
        return original(w1_shape, w2_shape, *arguments, **options)

    return try_get_optimal_moe_config


_ASSIGNMENT = "topk_ids num_tokens top_k_num global_num_experts expert_map"


def _keep_assignment(original: Any) -> Any:
    """Choose how ids are sorted as for all experts: newer releases go by the number of slots.

    With few slots they would sort the ids of a single token in a kernel of its own, which takes time.
    """

    def _prepare_expert_assignment(
        topk_ids: Any,
        config: Any,
        num_tokens: int,
        top_k_num: int,
        global_num_experts: int,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        experts = EXPERTS.get() or global_num_experts
        return original(topk_ids, config, num_tokens, top_k_num, experts, *arguments, **options)

    return _prepare_expert_assignment


# --- What cannot have an expert cache: each function returns the reason in one line, or None. -------------


_left_out: list[str] = []
"""Reasons why no layer of this process gets a cache, if the fix is optional."""


def _leave_out(slots: int, reason: str) -> None:
    """Raise SystemExit with the reason, or note it if the fix is optional."""
    refuse(NAME, f"{VARIABLE}={slots}: {reason}")
    _left_out.append(reason)


def check_engine(vllm_config: Any) -> str | None:
    """Return why an engine of this configuration cannot have caches."""
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        return "weights are offloaded by --cpu-offload-gb or --offload-group-size; expected one of the two"
    return None


def check_setting(layer: Any, capacity: int) -> str | None:
    """Return why a layer with these settings cannot have `capacity` slots, before weights are loaded."""
    parallel = layer.moe_config.moe_parallel_config
    if parallel.use_ep or parallel.ep_size > 1 or parallel.dp_size > 1 or parallel.pcp_size > 1:
        return (
            "experts are spread over several GPUs (expert, data or prefill context parallel); expected one "
            "GPU, or tensor parallel"
        )
    if capacity < layer.top_k:
        return f"{capacity} slots hold fewer experts than one token needs (top_k {layer.top_k})"
    if parallel.enable_eplb:
        return "expert load balancing moves experts at run time; expected it off"
    if layer.moe_config.is_lora_enabled:
        return "LoRA goes by the ids of experts, which are slots here; expected it off"
    return None


_EXPECTED = "expected --moe-backend triton, marlin or humming"


def check_kernel(layer: Any) -> str | None:
    """Return why the kernel of a loaded layer cannot have a cache."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    method = type(layer.quant_method).__name__
    if kernel is None or kernel.is_monolithic:
        return f"{method} routes and computes in one kernel; {_EXPECTED}"
    experts = kernel.fused_experts
    if type(experts).__name__ not in BACKENDS:
        return f"{method} computes with {type(experts).__name__}; {_EXPECTED}"
    if "Humming" in type(experts).__name__ and not hasattr(experts, "humming_configs"):
        return "HUMMING describes layers in another way before vLLM 0.30.0; expected --moe-backend marlin"
    # The method has another name from 0.22.0 on.
    if getattr(kernel, "owns_shared_experts", False) or getattr(kernel, "can_overlap_shared_experts", False):
        return f"{method} computes shared experts inside of its kernel"
    indices = (getattr(experts, name, None) for name in _ACT_ORDER)
    if any(tensor is not None and tensor.numel() for tensor in indices):
        return f"{method} reorders activations by expert (act-order); expected a checkpoint without"
    if _has_input_scales_by_expert(layer, experts):
        return f"{method} scales the inputs of HUMMING by expert; expected one scale, or --moe-backend marlin"
    return None


def _has_input_scales_by_expert(layer: Any, experts: Any) -> bool:
    """Return True if HUMMING quantizes inputs with scales that it indexes by expert."""
    for part in ("w1", "w2"):
        scale = getattr(experts.quant_config, f"{part}_input_scale", None)
        if scale is not None and scale.numel() > 1 and scale.shape[0] == layer.local_num_experts:
            return True
    return False


def check_layer(layer: Any, capacity: int) -> str | None:
    """Return why a loaded layer cannot have a cache of `capacity` slots."""
    return check_setting(layer, capacity) or check_kernel(layer)
