"""What the backends of every quantisation share: vLLM's configuration of a layer, and its modular kernel.

vLLM's own code decides whether a kernel class fits (`is_supported_config`), converts the weights and builds
the kernel; nothing of that is restated here. Written against vLLM 0.21.0. For a child process only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_backend import Backend, Prepared, Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import UnavailableError

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
JIT_VARIABLE = "MOEDOCTOR_FLASHINFER_JIT"
EMPTY_SLOTS = "VLLM_MOE_SKIP_PADDING"
"""The setting that makes vLLM mark padding with ids of -1, since 0.25.0."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_tanh", "relu2": "relu2_no_mul"}


def load(name: str) -> Any:
    """A module of vLLM's below `FUSED_MOE`. Raises UnavailableError where it does not load."""
    try:
        return importlib.import_module(f"{FUSED_MOE}.{name}")
    except Exception as error:  # what an optional dependency raises while vLLM is imported is up to it
        raise UnavailableError(f"vLLM's {name} does not load: {type(error).__name__}: {error}") from error


class VllmKernel(Prepared):
    """A layer in the form of one of vLLM's backends."""

    def __init__(self, kernel: Any, w13: torch.Tensor, w2: torch.Tensor, shape: LayerShape) -> None:
        self._kernel, self._w13, self._w2, self._shape = kernel, w13, w2, shape
        self._activation = _activation(shape)

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._kernel.apply(
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

    def workspaces(self) -> Sequence[torch.Tensor]:
        manager = importlib.import_module("vllm.v1.worker.workspace").current_workspace_manager()
        return [one for one in manager._current_workspaces if one is not None]


class VllmBackend(Backend):
    """One backend of vLLM's for one quantisation."""

    oracle: str
    """The module below `FUSED_MOE` that selects among the backends of this quantisation."""
    backends: str
    """The enumeration in it."""
    keys: tuple[str | None, str | None] = (None, None)
    """vLLM's names for the schemes of weights and activations."""

    def __init__(self, name: str, quantization: str, activations: str) -> None:
        self.variant = Variant(name, quantization, activations)

    def unavailable(self, shape: LayerShape, device: str) -> str | None:
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return "needs an NVIDIA GPU that torch can use"
        if self.variant.name.startswith("FLASHINFER") and not os.environ.get(JIT_VARIABLE):
            usual = self._supported(shape, device)
            return usual or (
                f"FlashInfer would first compile its kernels, which can take over half an hour; "
                f"set {JIT_VARIABLE}=1 to let it"
            )
        return self._supported(shape, device)

    def refuses_empty_slots(self) -> str | None:
        """vLLM hands out -1 since it knows `EMPTY_SLOTS`; before, its kernels take an id for an index."""
        if hasattr(importlib.import_module("vllm.envs"), EMPTY_SLOTS):
            return None
        return (
            f"this vLLM gives no ids of -1 (it has no {EMPTY_SLOTS}); what its kernels make of them is MD016"
        )

    def prepare(self, layer: Layer) -> Prepared:
        device = _device(layer)
        _start(device, fresh=True)
        config = moe_config(layer.shape, device)
        kernel_class, reason = self._kernel_class(config)
        if kernel_class is None:
            raise UnavailableError(f"{self.variant.name}: {reason}")
        holder = _layer_module(layer.shape, config)
        with _engine():
            kernel, w13, w2 = self._build(layer, holder, config, kernel_class)
        return VllmKernel(kernel, w13, w2, layer.shape)

    @abstractmethod
    def _build(
        self, layer: Layer, holder: Any, config: Any, kernel_class: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """vLLM's kernel object and the weights in its format. `holder` stands for vLLM's layer module."""

    def _member(self) -> Any:
        module = load(self.oracle)
        names = {one.name: one for one in getattr(module, self.backends)}
        if self.variant.name not in names:
            raise UnavailableError(
                f"this vLLM has no backend {self.variant.name} for {self.variant.quantization}"
            )
        return names[self.variant.name]

    def _supported(self, shape: LayerShape, device: str) -> str | None:
        try:
            _start(device)
            found, reason = self._kernel_class(moe_config(shape, device))
        except UnavailableError as error:
            return str(error)
        return None if found is not None else reason

    def _kernel_class(self, config: Any) -> tuple[Any, str | None]:
        member, module = self._member(), load(self.oracle)
        try:
            found = module.backend_to_kernel_cls(member)
        except (ImportError, ValueError, RuntimeError) as error:
            return None, f"vLLM cannot load it: {error}"
        keys = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
        schemes = [None if name is None else getattr(keys, name) for name in self.keys]
        standard = load("modular_kernel").FusedMoEActivationFormat.Standard
        reason: str | None = None
        for kernel in found if isinstance(found, list) else [found]:
            supported, reason = kernel.is_supported_config(kernel, config, *schemes, standard)
            if supported and not kernel.is_monolithic():
                return kernel, None
        return None, f"vLLM says: {reason}" if reason else "vLLM has only a kernel that does its own routing"


def moe_config(shape: LayerShape, device: str) -> Any:
    """vLLM's `FusedMoEConfig` of a layer on one GPU; fields that a release lacks are left out."""
    module = load("config")
    parallel = _filled(
        module.FusedMoEParallelConfig,
        {
            **dict.fromkeys(("tp_size", "dp_size", "ep_size", "pcp_size", "sp_size"), 1),
            "use_ep": False,
            "enable_eplb": False,
            "all2all_backend": "allgather_reducescatter",
        },
        otherwise=0,
    )
    return _filled(
        module.FusedMoEConfig,
        {
            "num_experts": shape.experts,
            "experts_per_token": shape.top_k,
            "hidden_dim": shape.hidden,
            "intermediate_size": shape.intermediate,
            "intermediate_size_per_partition": shape.intermediate,
            "num_local_experts": shape.experts,
            "num_logical_experts": shape.experts,
            "activation": _activation(shape),
            "device": device,
            "routing_method": module.RoutingMethodType.Renormalize,
            "moe_parallel_config": parallel,
            "in_dtype": torch.bfloat16,
            "is_act_and_mul": shape.activation != "relu2",
        },
    )


def scalar(value: float, device: str | torch.device, size: int | None = None) -> torch.Tensor:
    """A float32 scale as vLLM holds it: a scalar, or one an expert."""
    return torch.full(() if size is None else (size,), value, dtype=torch.float32, device=device)


def _filled(kind: Any, values: Mapping[str, Any], otherwise: Any = None) -> Any:
    given = {}
    for one in dataclasses.fields(kind):
        if not one.init:
            continue
        if one.name in values:
            given[one.name] = values[one.name]
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            given[one.name] = otherwise
    return kind(**given)


def _activation(shape: LayerShape) -> Any:
    return load("activation").MoEActivation(_ACTIVATIONS[shape.activation])


def _layer_module(shape: LayerShape, config: Any) -> Any:
    """The attributes of vLLM's layer that the conversion of weights reads."""
    holder: Any = torch.nn.Module()
    holder.num_experts = holder.local_num_experts = holder.global_num_experts = shape.experts
    holder.hidden_size = shape.hidden
    holder.intermediate_size_per_partition = shape.intermediate
    holder.params_dtype = holder.orig_dtype = torch.bfloat16
    holder.moe_config = config
    holder.activation = config.activation
    return holder


def _device(layer: Layer) -> str:
    weight = layer.w13
    if isinstance(weight, Nvfp4):
        return str(weight.packed.device)
    return str((weight.values if isinstance(weight, Fp8) else weight).device)


def _start(device: str, *, fresh: bool = False) -> None:
    """Load vLLM's kernels and give it a workspace; a `fresh` one, as it only ever grows."""
    if importlib.util.find_spec("vllm") is None:
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


def _engine() -> contextlib.AbstractContextManager[Any]:
    """vLLM's own default configuration as the current one, which some of its constructors ask for."""
    config = importlib.import_module("vllm.config")
    manager: contextlib.AbstractContextManager[Any] = config.set_current_vllm_config(config.VllmConfig())
    return manager
