"""The experts of one MoE layer of vLLM, computed by moedoctor's kernels instead of a backend's.

`take_over` replaces a method's `process_weights_after_loading`: it gets the weights and scales as they were
loaded, before a backend has repacked them, and gives the method a kernel of vLLM's own kind whose experts are
of our class. Weights are read from the layer at each call, because an offloader may exchange them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.plugin.register import stop_engine
from moedoctor.results import UnavailableError

FUSED = "vllm.model_executor.layers.fused_moe"
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu2_no_mul": "relu2"}
"""vLLM's name of an activation -> ours."""
_CHUNK = 1 << 26
_NAN = 0x7F

Compute = Callable[..., None]
"""``(out, x, topk_weights, topk_ids, activation)``, as `run_experts` takes them."""
Read = Callable[[str], Any]
"""``w13`` or ``w2`` -> the weights as kernels or the reference take them."""
Take = Callable[[Any, Any, bool], Read]
"""(method, layer, True to compute by the reference) -> how its weights are read at each call."""


@dataclass(frozen=True)
class Nvfp4Names:
    """Names of an NVFP4 layer's parameters."""

    weight: str
    global_scale: str
    reciprocal: bool = False
    """True if the global scale quantizes, as compressed-tensors stores it."""


MODELOPT = Nvfp4Names("weight", "weight_scale_2")
COMPRESSED_TENSORS = Nvfp4Names("weight_packed", "weight_global_scale", reciprocal=True)


def take_plain(method: Any, layer: Any, by_reference: bool) -> Read:
    """Take a layer of bfloat16 or float16 weights."""
    from moedoctor.kernels.moe.expert_weights import ExpertWeights

    def read(name: str) -> Any:
        values = getattr(layer, f"{name}_weight")
        return values if by_reference else ExpertWeights(values, bias=_get_bias(layer, name))

    return read


def take_fp8(method: Any, layer: Any, by_reference: bool) -> Read:
    """Take a layer of FP8 weights, with activations as they are: W8A16.

    Raises UnavailableError for NaN weights and for scales of an unknown form.
    """
    from moedoctor.kernels.moe.expert_weights import ExpertWeights, make_fp8_weights
    from moedoctor.reference.fp8 import Fp8

    scale_name, forms = getattr(method, "weight_scale_name", "weight_scale"), {}
    for name in ("w13", "w2"):
        values, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_{scale_name}")
        if _has_nan(values):
            raise UnavailableError(f"{name}_weight holds NaN, which no backend can make right")
        if scale.dtype.itemsize != 4:
            replace(layer, f"{name}_{scale_name}", scale.float())
        halves = 2 if name == "w13" and method.moe.is_act_and_mul else 1
        scale = getattr(layer, f"{name}_{scale_name}")
        forms[name] = _find_fp8_form(method, make_fp8_weights, values, scale, halves)

    def read(name: str) -> Any:
        values, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_{scale_name}")
        form = forms[name]
        if by_reference:
            return Fp8(values, scale, form.block, form.halves)
        return ExpertWeights(values, None, scale, _get_bias(layer, name), form.block, form.halves)

    return read


def _find_fp8_form(method: Any, make: Any, values: Any, scale: Any, halves: int) -> Any:
    """Return the weights with the first block size that fits: newer releases may refine the checkpoint's."""
    names = ("weight_block_size", "moe_block_shape")
    sizes = [getattr(method, name) for name in names if hasattr(method, name)] or [None]
    reason: Exception | None = None
    for size in dict.fromkeys(None if size is None else tuple(size) for size in sizes):
        try:
            return make(values, scale, block=size, halves=1 if size is None else halves)
        except ValueError as error:
            reason = error
    raise UnavailableError(f"FP8 weights or scales of an unknown form: {reason}")


def take_nvfp4(names: Nvfp4Names, method: Any, layer: Any, by_reference: bool) -> Read:
    """Take a layer of NVFP4 weights, with activations as they are: W4A16."""
    from moedoctor.kernels.moe.expert_weights import ExpertWeights
    from moedoctor.kernels.moe.nvfp4_words import pack_words
    from moedoctor.reference.nvfp4 import Nvfp4

    for name in ("w13", "w2"):
        scale = getattr(layer, f"{name}_{names.global_scale}").data.float()  # [E] or [E, 2]
        replace(layer, f"{name}_weight_scale_2", (1 / scale if names.reciprocal else scale).contiguous())
        packed = getattr(layer, f"{name}_{names.weight}").data  # [E, N, K / 2]
        if names.weight != "weight":
            delattr(layer, f"{name}_{names.weight}")
            replace(layer, f"{name}_weight", packed)
        if not by_reference:
            words, scales = pack_words(packed, getattr(layer, f"{name}_weight_scale").data)
            replace(layer, f"{name}_weight", words)
            replace(layer, f"{name}_weight_scale", scales)
    torch.cuda.empty_cache()

    def read(name: str) -> Any:
        parts = ("weight", "weight_scale", "weight_scale_2")
        codes, scales, scale = (getattr(layer, f"{name}_{part}") for part in parts)
        if by_reference:
            return Nvfp4(codes, scales, scale)
        halves = scale.numel() // codes.shape[0]
        return ExpertWeights(codes, scales, scale, _get_bias(layer, name), halves=halves)

    return read


def _make_compute(layer: Any, read: Read, by_reference: bool) -> Compute:
    if by_reference:  # without Triton
        from moedoctor.reference.moe import MoeWeights, forward

        def compute(out: Any, x: Any, topk_weights: Any, topk_ids: Any, activation: str) -> None:
            biases = _get_bias(layer, "w13"), _get_bias(layer, "w2")
            held = MoeWeights(read("w13"), read("w2"), activation, *biases)
            out.copy_(forward(x, held, topk_weights, topk_ids))

        return compute
    from moedoctor.kernels.moe.launch import run_experts

    def launch(out: Any, x: Any, topk_weights: Any, topk_ids: Any, activation: str) -> None:
        run_experts(x, read("w13"), read("w2"), topk_weights, topk_ids, activation=activation, out=out)

    return launch


def _get_bias(layer: Any, name: str) -> Any:
    return getattr(layer, f"{name}_bias", None)


def _has_nan(values: Any) -> bool:
    codes = values.data.view(torch.uint8).flatten()
    return any(bool(((part & _NAN) == _NAN).any()) for part in codes.split(_CHUNK))


def replace(layer: Any, name: str, data: Any) -> None:
    """Make `data` the parameter `name` of `layer`."""
    if hasattr(layer, name):
        delattr(layer, name)
    layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


def take_over(method: Any, layer: Any, take: Take, *, by_reference: bool) -> None:
    """Give `method` a kernel of ours that computes `layer`. Raises UnavailableError with the reason."""
    modules = {name: importlib.import_module(f"{FUSED}.{name}") for name in ("modular_kernel", "config")}
    quantization = modules["config"].FusedMoEQuantConfig.make()
    experts = make_experts_class()(method.moe, quantization)
    experts.compute = _make_compute(layer, take(method, layer, by_reference), by_reference)
    finalize = importlib.import_module(f"{FUSED}.prepare_finalize.no_dp_ep")
    method.moe_quant_config = quantization
    method.moe_kernel = modules["modular_kernel"].FusedMoEKernel(
        finalize.MoEPrepareAndFinalizeNoDPEPModular(), experts
    )


def _apply(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    *arguments: Any,
    apply_router_weight_on_input: bool = False,
    **options: Any,
) -> None:
    if apply_router_weight_on_input:  # vLLM has multiplied the input by them
        topk_weights = topk_weights.new_ones(topk_weights.shape)  # [T, K]
    self.compute(
        output,
        hidden_states.contiguous(),
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        ACTIVATIONS[activation.value],
    )


def _get_workspace_shapes(
    self: Any, tokens: int, rows: int, width: int, *arguments: Any, **options: Any
) -> Any:
    """Return vLLM's shapes of two workspaces, of which we need none, and of the output."""
    return (0,), (0,), (tokens, width)


def _refuse_hook(self: Any, hook: Any) -> None:
    """Raise SystemExit: the hook adds up the experts of a token, which our kernels have done by then."""
    stop_engine(
        "vLLM is stopped: moe is refused: this model adds up a token's experts itself (post_gemm2_hook); "
        "leave moe out"
    )


@functools.cache
def make_experts_class() -> Any:
    """Return our subclass of vLLM's experts. An instance has ``compute``, a `Compute`."""
    kernel = importlib.import_module(f"{FUSED}.modular_kernel")
    reduce = importlib.import_module(f"{FUSED}.topk_weight_and_reduce")
    yes = staticmethod(lambda *arguments: True)
    return type(
        "MoedoctorExperts",
        (kernel.FusedMoEExpertsModular,),
        {
            "activation_format": staticmethod(lambda: kernel.FusedMoEActivationFormat.Standard),
            "post_gemm2_hook": property(lambda self: None, _refuse_hook),
            "expects_unquantized_inputs": property(lambda self: True),
            "_supports_current_device": yes,
            "_supports_no_act_and_mul": yes,
            "_supports_quant_scheme": yes,
            "_supports_activation": staticmethod(lambda activation: activation.value in ACTIVATIONS),
            "_supports_parallel_config": yes,
            "supports_expert_map": lambda self: False,
            "workspace_shapes": _get_workspace_shapes,
            "finalize_weight_and_reduce_impl": lambda self: reduce.TopKWeightAndReduceNoOP(),
            "apply": _apply,
        },
    )
