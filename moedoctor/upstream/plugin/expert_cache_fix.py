"""The fix `expert_cache`: vLLM runs MoE models whose experts lie in host memory, hot ones cached on the GPU.

What vllm-project/vllm#37190 offers, by ``MOEDOCTOR_EXPERT_CACHE=N`` slots a layer: without its fault, and
with CUDA graphs. Experts are loaded into host memory, taken to the GPU layer by layer to be repacked, and
pinned; N slots take their place before vLLM profiles memory, so the KV cache gets what is left. Backends
TRITON (BF16, FP8) and MARLIN (FP8, NVFP4). A model that cannot have a cache is refused with the reason:
silently going on without one would run out of memory later, or hide that nothing is saved.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from moedoctor.upstream.plugin.expert_cache_layer import EXPERTS, host_experts, install, to_device
from moedoctor.upstream.plugin.expert_cache_refusals import refusal, refused_engine, refused_setting
from moedoctor.upstream.plugin.fix_support import FixError, expect, replace_once

logger = logging.getLogger("vllm.moedoctor")

NAME = "expert_cache"
VARIABLE = "MOEDOCTOR_EXPERT_CACHE"
RELEASES = ("0.21.0",)
"""Whose layers this was made for."""
_FUSED = "vllm.model_executor.layers.fused_moe."
_LOADS = ("process_weights_after_loading(model, model_config, target_device)", "return model.eval()")
_APPLIES = ("self.impl.apply(", "global_num_experts=global_num_experts")
_METHODS = (
    (f"{_FUSED}unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    ("vllm.model_executor.layers.quantization.fp8", "Fp8MoEMethod"),
    ("vllm.model_executor.layers.quantization.modelopt", "ModelOptNvFp4FusedMoE"),
)
"""Methods whose experts are made in host memory."""
_CREATES = ('layer.register_parameter("w13_weight", w13_weight)',)
_TILES = ("E, _, N = w2_shape",)


def apply(version: str) -> str:
    """Apply the fix to the vLLM of this process, of release `version`; what is active, in a few words.

    Raises FixError where vLLM is not as expected or the variable is no number of slots; nothing has been
    changed then.
    """
    slots = wanted_slots(os.environ)
    if slots is None:
        return f"{VARIABLE} is not set: no cache"
    if version not in RELEASES:
        raise FixError(f"the expert cache was made for vLLM {', '.join(RELEASES)}")
    kernel = importlib.import_module(f"{_FUSED}modular_kernel").FusedMoEKernel
    layer = importlib.import_module(f"{_FUSED}layer").FusedMoE
    tiles = importlib.import_module(f"{_FUSED}experts.triton_moe")
    loaders = _loaders()
    expect(loaders[0], "load_model", ("self", "vllm_config", "model_config"), _LOADS)
    for loader in loaders[1:]:
        expect(loader, "load_model", ("self", "vllm_config", "model_config"), ())
    expect(kernel, "apply", ("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "expert_map"), _APPLIES)
    methods = [getattr(importlib.import_module(module), name) for module, name in _METHODS]
    for method in methods:
        expect(method, "create_weights", ("layer", "num_experts"), _CREATES)
    expect(tiles, "try_get_optimal_moe_config", ("w1_shape", "w2_shape"), _TILES)
    for loader in loaders:
        replace_once(
            loader, "load_model", functools.partial(_caching, slots=slots, layer_type=layer), by=NAME
        )
    for method in methods:
        replace_once(method, "create_weights", functools.partial(_on_the_host, slots=slots), by=NAME)
    replace_once(tiles, "try_get_optimal_moe_config", _unchanged_tiles, by=NAME)
    return f"{slots} expert slots a MoE layer"


def _loaders() -> Sequence[type]:
    """vLLM's loader, and those that load in a way of their own."""
    base = importlib.import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    known = importlib.import_module("vllm.model_executor.model_loader")._LOAD_FORMAT_TO_MODEL_LOADER
    own = (one for one in known.values() if one is not base and "load_model" in vars(one))
    return (base, *dict.fromkeys(own))


def wanted_slots(environ: Any) -> int | None:
    """The slots that the variable asks for; None where it is not set. Raises FixError for no number."""
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise FixError(f"{VARIABLE} is {text[:40]!r}; expected a number of slots, at least 1")
    return int(text)


def _caching(original: Any, *, slots: int, layer_type: type) -> Any:
    """`load_model`, after which every MoE layer has its cache."""

    @functools.wraps(original)
    def load_model(self: Any, vllm_config: Any, model_config: Any, *arguments: Any, **options: Any) -> Any:
        reason = refused_engine(vllm_config)
        if reason is not None:
            raise _refused(slots, reason)
        model = original(self, vllm_config, model_config, *arguments, **options)
        is_draft = model_config is not vllm_config.model_config
        if is_draft and not any(isinstance(one, layer_type) for one in model.modules()):
            return model
        device = vllm_config.device_config.device
        _give_caches(model, slots, layer_type, device, _captures(vllm_config, model_config))
        return model

    return load_model


def _captures(vllm_config: Any, model_config: Any) -> bool:
    """Whether the engine captures CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return not model_config.enforce_eager and getattr(mode, "name", "") != "NONE"


def _give_caches(model: Any, slots: int, layer_type: type, device: Any, captured: bool) -> None:
    import torch

    layers: list[tuple[str, Any]] = [
        (name, one) for name, one in model.named_modules() if isinstance(one, layer_type)
    ]
    if host_experts(model):
        return  # by a loader that calls another one
    if not layers:
        raise _refused(slots, "the model has no MoE layer; expected one, or unset the variable")
    for name, layer in layers:
        reason = refusal(layer, slots)
        if reason is not None:
            raise _refused(slots, f"{name} cannot have an expert cache: {reason}")
    device, made = torch.device(device), []
    for _, layer in layers:
        if slots < layer.local_num_experts:
            made.append(install(layer, slots, device, captured=captured))
        else:
            to_device(layer, device)  # every expert fits
    torch.cuda.empty_cache()
    memory = [cache.memory for cache in made]
    logger.info(
        "moedoctor: expert_cache: %d of %d MoE layers with %d slots, engine %s: %.2f GiB pinned, %.2f GiB on "
        "the GPU, %.2f GiB left to the KV cache",
        len(made),
        len(layers),
        slots,
        made[0].engine if made else "none",
        sum(one.pinned for one in memory) / 2**30,
        sum(one.device for one in memory) / 2**30,
        sum(one.saved for one in memory) / 2**30,
    )


def _refused(slots: int, reason: str) -> RuntimeError:
    """The error, which is logged, too: where workers are processes, vLLM's own error does not tell it."""
    said = f"{VARIABLE}={slots}: {reason}"
    logger.error("moedoctor: expert_cache is refused: %s", said)
    return RuntimeError(said)


def _on_the_host(original: Any, *, slots: int) -> Any:
    """`create_weights` of a MoE method, in host memory: the experts need not fit on the GPU.

    vLLM takes each layer's parameters to the GPU and back to repack them. Weights that are made up rather
    than loaded stay on the GPU, where that is faster. What the settings alone rule out is refused here,
    before anything is loaded.
    """

    @functools.wraps(original)
    def create_weights(self: Any, layer: Any, *arguments: Any, **options: Any) -> Any:
        import torch

        reason = refused_setting(layer, slots)
        if reason is not None:
            raise _refused(slots, f"{layer.layer_name} cannot have an expert cache: {reason}")
        config = importlib.import_module("vllm.config").get_current_vllm_config()
        if config.load_config.load_format == "dummy":
            return original(self, layer, *arguments, **options)
        with torch.device("cpu"):
            return original(self, layer, *arguments, **options)

    return create_weights


def _unchanged_tiles(original: Any) -> Any:
    """Tiles as for all experts: others would round differently, and tokens could part."""

    @functools.wraps(original)
    def try_get_optimal_moe_config(w1_shape: Any, w2_shape: Any, *arguments: Any, **options: Any) -> Any:
        experts = EXPERTS.get()
        if experts is not None:
            w1_shape, w2_shape = (experts, *w1_shape[1:]), (experts, *w2_shape[1:])
        return original(w1_shape, w2_shape, *arguments, **options)

    return try_get_optimal_moe_config
