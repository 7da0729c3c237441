"""The MoE backends of the installed vLLM, each called the way vLLM's own layer calls it.

vLLM's own code decides whether a kernel class fits (`is_supported_config`), converts the weights and builds
the kernel; nothing of that is restated here. Releases differ in what these functions take, so each gets the
arguments that it has a parameter for: made for vLLM 0.21.0 to 0.33.0. For a child process only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version

from moedoctor.models.layer_shape import LayerShape
from moedoctor.plugin.register import read_vllm_version
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_backend import Backend, Prepared, Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import UnavailableError
from moedoctor.upstream.moe_backends.moe_config import make_moe_config
from moedoctor.upstream.releases.installed import FUSED_MOE, import_vllm_module
from moedoctor.upstream.releases.wheel import find_package_folders

JIT_VARIABLE = "MOEDOCTOR_FLASHINFER_JIT"
EMPTY_SLOTS = "VLLM_MOE_SKIP_PADDING"
"""The setting that makes vLLM mark padding with ids of -1, since 0.25.0."""
_HUMMING_FP8 = Version("0.33.0")
_FP8_BLOCK = 128
"""Rows and columns that share a scale in ``fp8-block``; vLLM splits or refuses blocks that end a gate."""
_NOT_INSTALLED = "is not available or outdated"
"""vLLM's message while it builds a kernel without DeepGEMM; its selection does not always ask for it."""
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu2": "relu2_no_mul"}


def load(name: str) -> Any:
    """Import a module of vLLM below `FUSED_MOE`. Raises UnavailableError."""
    return import_vllm_module(f"{FUSED_MOE}.{name}")


class VllmKernel(Prepared):
    """A layer in the form of one of vLLM's backends."""

    def __init__(self, kernel: Any, w13: torch.Tensor, w2: torch.Tensor, shape: LayerShape) -> None:
        self.kernel = kernel
        """vLLM's modular kernel."""
        self._w13, self._w2, self._shape = w13, w2, shape
        self._activation = load("activation").MoEActivation(_ACTIVATIONS[shape.activation])

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.kernel.apply(
            hidden_states=x,
            w1=self._w13,
            w2=self._w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=self._activation,
            global_num_experts=self._shape.experts,
            expert_map=None,
            apply_router_weight_on_input=False,
        )
        return output

    def list_workspaces(self) -> Sequence[torch.Tensor]:
        manager = importlib.import_module("vllm.v1.worker.workspace").current_workspace_manager()
        return [workspace for workspace in manager._current_workspaces if workspace is not None]


Build = Callable[[Any, Any, Layer, Any, Any, Any], tuple[Any, torch.Tensor, torch.Tensor]]
"""(oracle module, its backend, layer, holder, vLLM's config, kernel class) -> (kernel, w13, w2).

`holder` takes the place of vLLM's layer module.
"""


def _build_bf16(
    oracle: Any, backend: Any, layer: Layer, holder: Any, config: Any, kernel_class: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    w13, w2 = call(
        oracle.convert_to_unquantized_kernel_format,
        unquantized_backend=backend,
        moe_config=config,
        layer=holder,
        w13_weight=layer.w13,
        w2_weight=layer.w2,
    )
    kernel = call(
        oracle.make_unquantized_moe_kernel,
        quant_config=load("config").FUSED_MOE_UNQUANTIZED_CONFIG,
        moe_config=config,
        backend=backend,
        experts_cls=kernel_class,
    )
    return kernel, w13, w2


def _build_fp8(
    oracle: Any, backend: Any, layer: Layer, holder: Any, config: Any, kernel_class: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Build from weights with static scales per tensor, or with scales of blocks and of groups of tokens."""
    assert isinstance(layer.w13, Fp8)
    assert isinstance(layer.w2, Fp8)
    if backend.name == "HUMMING" and Version(read_vllm_version()) < _HUMMING_FP8:
        raise UnavailableError(
            f"HUMMING takes FP8 experts from the layer in another form before vLLM {_HUMMING_FP8}"
        )
    device, block = layer.w13.values.device, layer.w13.block
    input_scale = None if block else _make_scale(layer.input_scale, device)
    intermediate_scale = None if block else _make_scale(layer.intermediate_scale, device)
    _hold(holder, w13_weight=layer.w13.values, w2_weight=layer.w2.values)
    if block:
        holder.weight_block_size = list(block)
        _hold(holder, w13_weight_scale_inv=layer.w13.scale, w2_weight_scale_inv=layer.w2.scale)
    w13, w2, w13_scale, w2_scale = call(
        oracle.convert_to_fp8_moe_kernel_format,
        fp8_backend=backend,
        layer=holder,
        w13=layer.w13.values.clone(),
        w2=layer.w2.values.clone(),
        w13_scale=layer.w13.scale.clone(),
        w2_scale=layer.w2.scale.clone(),
        w13_input_scale=input_scale,
        w2_input_scale=intermediate_scale,
    )
    quant_config = call(
        oracle.make_fp8_moe_quant_config,
        fp8_backend=backend,
        layer=holder,
        w1_scale=w13_scale,
        w2_scale=w2_scale,
        a1_scale=input_scale,
        a2_scale=intermediate_scale,
        block_shape=list(block) if block else None,
    )
    kernel = call(
        oracle.make_fp8_moe_kernel,
        moe_quant_config=quant_config,
        moe_config=config,
        experts_cls=kernel_class,
        fp8_backend=backend,
    )
    del holder.w13_weight, holder.w2_weight
    return kernel, w13, w2


def _build_nvfp4(
    oracle: Any, backend: Any, layer: Layer, holder: Any, config: Any, kernel_class: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Build from weights as a ModelOpt checkpoint has them."""
    assert isinstance(layer.w13, Nvfp4)
    assert isinstance(layer.w2, Nvfp4)
    experts, device = layer.shape.experts, layer.w13.packed.device
    gates = 2 if config.is_act_and_mul else 1
    # HUMMING converts what it finds in the layer, the others what they are given.
    _hold(
        holder,
        w13_weight=layer.w13.packed.clone(),
        w13_weight_scale=layer.w13.block_scales.clone(),
        # [E, 2], or [E, 1] without a gate
        w13_weight_scale_2=layer.w13.global_scale[:, None].repeat(1, gates),
        w2_weight=layer.w2.packed.clone(),
        w2_weight_scale=layer.w2.block_scales.clone(),
        w2_weight_scale_2=layer.w2.global_scale.clone(),
        w13_input_scale=_make_scale(layer.input_scale, device, experts),
        w2_input_scale=_make_scale(layer.intermediate_scale, device, experts),
    )
    converted = call(
        oracle.convert_to_nvfp4_moe_kernel_format,
        nvfp4_backend=backend,
        layer=holder,
        w13=holder.w13_weight.data,
        w13_scale=holder.w13_weight_scale.data,
        w13_scale_2=layer.w13.global_scale.clone(),
        a13_scale=holder.w13_input_scale.data,
        w2=holder.w2_weight.data,
        w2_scale=holder.w2_weight_scale.data,
        w2_scale_2=holder.w2_weight_scale_2.data,
        a2_scale=holder.w2_input_scale.data,
        is_act_and_mul=config.is_act_and_mul,
    )
    parts = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    names = [f"{matrix}_{part}" for matrix in ("w13", "w2") for part in parts]
    _hold(holder, **dict(zip(names, converted, strict=True)))
    w13, w13_scale, w13_scale_2, a13_scale, w2, w2_scale, w2_scale_2, a2_scale = converted
    quant_config = call(
        oracle.make_nvfp4_moe_quant_config,
        backend=backend,
        layer=holder,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_scale_2=w13_scale_2,
        w2_scale_2=w2_scale_2,
        a13_scale=a13_scale,
        a2_scale=a2_scale,
    )
    kernel = call(
        oracle.make_nvfp4_moe_kernel,
        moe_quant_config=quant_config,
        moe_config=config,
        experts_cls=kernel_class,
        backend=backend,
    )
    kernel.fused_experts.process_weights_after_loading(holder)
    return kernel, w13, w2


@dataclasses.dataclass(frozen=True)
class _Quantization:
    """The way in which vLLM selects and builds the backends for one quantization of the weights."""

    oracle: str
    """The module below `FUSED_MOE` that selects."""
    backends: str
    """The enumeration in it."""
    build: Build
    schemes: tuple[str | None, str | None] = (None, None)
    """vLLM's names for the schemes of weights and activations."""


_QUANTIZATIONS = {
    "bf16": _Quantization("oracle.unquantized", "UnquantizedMoeBackend", _build_bf16),
    "fp8": _Quantization(
        "oracle.fp8", "Fp8MoeBackend", _build_fp8, ("kFp8StaticTensorSym", "kFp8StaticTensorSym")
    ),
    "fp8-block": _Quantization(
        "oracle.fp8", "Fp8MoeBackend", _build_fp8, ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
    ),
    "nvfp4": _Quantization(
        "oracle.nvfp4", "NvFp4MoeBackend", _build_nvfp4, ("kNvfp4Static", "kNvfp4Dynamic")
    ),
}


class VllmBackend(Backend):
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._quantization = _QUANTIZATIONS[variant.quantization]

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return "needs an NVIDIA GPU that torch can use"
        if self.variant.quantization == "fp8-block" and shape.intermediate % _FP8_BLOCK:
            return f"needs an intermediate size that is a multiple of {_FP8_BLOCK}; got {shape.intermediate}"
        reason = self._explain_unsupported(shape, device)
        if reason is None and self.variant.name.startswith("FLASHINFER") and not os.environ.get(JIT_VARIABLE):
            reason = (
                "FlashInfer would first compile its kernels, which can take over half an hour; "
                f"set {JIT_VARIABLE}=1 to let it"
            )
        return reason

    def check_empty_slots(self) -> str | None:
        """vLLM gives ids of -1 since it has `EMPTY_SLOTS`; before, its kernels use them as an index."""
        if hasattr(importlib.import_module("vllm.envs"), EMPTY_SLOTS):
            return None
        return (
            f"this vLLM gives no ids of -1 (it has no {EMPTY_SLOTS}); what its kernels make of them is MD016"
        )

    def prepare(self, layer: Layer) -> Prepared:
        device = _find_device(layer)
        _start(device, fresh=True)
        if isinstance(layer.w13, Fp8):
            self._check_scales(layer.w13)
        config = make_moe_config(layer.shape, _ACTIVATIONS[layer.shape.activation], device=device)
        kernel_class, reason = self._find_kernel_class(config)
        if kernel_class is None:
            raise UnavailableError(f"{self.variant.name}: {reason}")
        holder = _make_layer(layer.shape, config)
        # Some of vLLM's constructors ask for a current configuration.
        engine = importlib.import_module("vllm.config")
        with engine.set_current_vllm_config(engine.VllmConfig()):
            oracle = load(self._quantization.oracle)
            try:
                kernel, w13, w2 = self._quantization.build(
                    oracle, self._find_member(oracle), layer, holder, config, kernel_class
                )
            except RuntimeError as error:
                if _NOT_INSTALLED not in str(error):
                    raise
                raise UnavailableError(f"{self.variant.name}: vLLM says: {error}") from error
        if self.variant.name == "HUMMING":  # it asks for a forward pass, of this child's whole life
            module: Any = importlib.import_module("vllm.forward_context")
            module._forward_context = module.create_forward_context(None, engine.VllmConfig())
        return VllmKernel(kernel, w13, w2, layer.shape)

    def _check_scales(self, weight: Fp8) -> None:
        """Raise UnavailableError for FP8 scales of another kind, such as a capsule may have."""
        expected = (_FP8_BLOCK, _FP8_BLOCK) if self.variant.quantization == "fp8-block" else None
        if weight.block != expected:
            needed, given = (
                "matrix" if block is None else f"{block[0]} x {block[1]} weights"
                for block in (expected, weight.block)
            )
            raise UnavailableError(
                f"{self.variant.label} needs a scale for each {needed}; this layer has one for each {given}"
            )

    def _find_member(self, oracle: Any) -> Any:
        for member in getattr(oracle, self._quantization.backends):
            if member.name == self.variant.name:
                return member
        raise UnavailableError(
            f"this vLLM has no backend {self.variant.name} for {self.variant.quantization}"
        )

    def _explain_unsupported(self, shape: LayerShape, device: str) -> str | None:
        try:
            _start(device)
            config = make_moe_config(shape, _ACTIVATIONS[shape.activation], device=device)
            kernel_class, reason = self._find_kernel_class(config)
        except UnavailableError as error:
            return str(error)
        return None if kernel_class is not None else reason

    def _find_kernel_class(self, config: Any) -> tuple[Any, str | None]:
        """Return vLLM's class for this backend, or None with the reason."""
        oracle = load(self._quantization.oracle)
        member = self._find_member(oracle)
        if not hasattr(oracle, "backend_to_kernel_cls"):
            raise UnavailableError(
                f"this vLLM, older than 0.21.0, asks no kernels for {self.variant.quantization}"
            )
        try:
            classes = oracle.backend_to_kernel_cls(member)
        except (ImportError, ValueError, RuntimeError) as error:
            return None, f"vLLM cannot load it: {error}"
        utilities = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
        schemes = [None if name is None else getattr(utilities, name) for name in self._quantization.schemes]
        standard = load("modular_kernel").FusedMoEActivationFormat.Standard
        reason: str | None = None
        for kernel in classes if isinstance(classes, list) else [classes]:
            supported, reason = kernel.is_supported_config(kernel, config, *schemes, standard)
            if supported and not kernel.is_monolithic():
                return kernel, None
        return None, f"vLLM says: {reason}" if reason else "vLLM has only a kernel that does its own routing"


def _make_scale(value: float, device: str | torch.device, experts: int | None = None) -> torch.Tensor:
    """Return a scale as vLLM holds it: float32, [] or [experts]."""
    return torch.full(() if experts is None else (experts,), value, dtype=torch.float32, device=device)


def call(function: Callable[..., Any], **values: Any) -> Any:
    """Call a function of vLLM's with those of `values` that this release's function has a parameter for.

    Raises UnavailableError if it needs another one.
    """
    parameters = inspect.signature(function).parameters
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in values
    ]
    if missing:
        raise UnavailableError(f"this vLLM's {function.__name__} needs {', '.join(missing)}")
    return function(**{name: values[name] for name in parameters if name in values})


def _hold(holder: Any, **tensors: torch.Tensor | None) -> None:
    """Give the layer these parameters, in place of any of that name. None takes one away."""
    for name, tensor in tensors.items():
        with contextlib.suppress(AttributeError):
            delattr(holder, name)
        parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        setattr(holder, name, parameter)


def _make_layer(shape: LayerShape, config: Any) -> Any:
    """Return the attributes of vLLM's layer that the conversion of weights reads."""
    holder = _make_layer_class()()
    holder.num_experts = holder.local_num_experts = holder.global_num_experts = shape.experts
    holder.hidden_size = shape.hidden
    holder.intermediate_size_per_partition = shape.intermediate
    holder.params_dtype = holder.orig_dtype = torch.bfloat16
    holder.moe_config = config
    holder.activation = config.activation
    holder.layer_name = "experts"
    return holder


def _make_layer_class() -> Any:
    """Return a class of layers without weights; from 0.27 on vLLM asks whether it is a `RoutedExperts`."""
    if importlib.util.find_spec(f"{FUSED_MOE}.routed_experts") is None:
        return torch.nn.Module
    return type("Layer", (load("routed_experts").RoutedExperts,), {"__init__": torch.nn.Module.__init__})


def _find_device(layer: Layer) -> str:
    weight = layer.w13
    if isinstance(weight, Nvfp4):
        return str(weight.packed.device)
    return str((weight.values if isinstance(weight, Fp8) else weight).device)


def _start(device: str, *, fresh: bool = False) -> None:
    """Load vLLM's kernels and give it a workspace; a `fresh` one, because a workspace only grows."""
    if not find_package_folders("vllm"):
        raise UnavailableError("vLLM is not installed")
    try:
        importlib.import_module("vllm._custom_ops")
        workspace = importlib.import_module("vllm.v1.worker.workspace")
    except Exception as error:
        raise UnavailableError(f"vLLM does not load: {type(error).__name__}: {error}") from error
    if fresh:
        workspace.reset_workspace_manager()
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device(device))
