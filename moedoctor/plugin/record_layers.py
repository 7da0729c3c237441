"""Reads the record and the weights of a MoE layer of vLLM, for a recording."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moedoctor.plugin.register import FixError, read_vllm_version
from moedoctor.redaction import Redactor, strip_folders
from moedoctor.trace.call_keeper import WatchedLayer
from moedoctor.trace.capsule import CapsuleError, Record
from moedoctor.trace.expert_weights import ExpertFiles

logger = logging.getLogger("vllm.moedoctor")

_QUANTIZATIONS = {
    "UnquantizedFusedMoEMethod": "bf16",
    "Fp8MoEMethod": "fp8",
    "ModelOptFp8MoEMethod": "fp8",
    "CompressedTensorsW8A8Fp8MoEMethod": "fp8",
    "ModelOptNvFp4FusedMoE": "nvfp4",
    "CompressedTensorsW4A4Nvfp4MoEMethod": "nvfp4",
}
"""Class of a MoE method -> quantization of its weights."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_tanh", "relu2_no_mul": "relu2"}
"""vLLM's names -> ours."""


def overwrites(runner: Any) -> bool:
    """Return True if the experts may write their output over their input."""
    kernel = getattr(runner._quant_method, "moe_kernel", None)
    return bool(getattr(kernel, "inplace", False) or getattr(getattr(kernel, "impl", None), "inplace", False))


def is_routed_by_kernel(runner: Any) -> bool:
    """Return True if the backend takes router logits and chooses the experts inside its kernel."""
    return bool(getattr(runner._quant_method, "is_monolithic", False))


def make_watched_layer(runner: Any, layer: Any, find: Callable[[], Path | None]) -> WatchedLayer:
    """Return a MoE layer as it is watched. Raises FixError if it cannot be recorded."""
    method = runner._quant_method
    config, experts = method.moe, getattr(getattr(method, "moe_kernel", None), "fused_experts", method)
    quantization = _QUANTIZATIONS.get(type(method).__name__)
    if quantization is None:
        raise FixError(f"{type(method).__name__} holds weights in a way that capsules do not know")
    activation = _ACTIVATIONS.get(str(config.activation.value))
    if activation is None:
        raise FixError(f"its activation is {config.activation.value}; expected {', '.join(_ACTIVATIONS)}")
    parallel = config.moe_parallel_config
    sizes = {size: int(getattr(parallel, size, 1)) for size in ("tp_size", "dp_size", "ep_size")}
    if max(sizes.values()) > 1:
        raise FixError("its experts are spread over several GPUs; a capsule holds whole experts")
    record = Record.model_validate(
        {
            "layer": str(getattr(layer, "layer_name", "experts")),
            "hidden": _read_unpadded(config, "hidden_dim"),
            "intermediate": _read_unpadded(config, "intermediate_size_per_partition"),
            "experts": int(config.num_experts),
            "top_k": int(config.experts_per_token),
            "activation": activation,
            "quantization": quantization,
            "block": _read_block(method),
            "activations": _name_activations(method),
            "backend": type(experts).__name__,
            "kernel": {"monolithic": str(is_routed_by_kernel(runner))},
            "parallel": sizes,
            "packages": {"vllm": read_vllm_version(), "torch": str(torch.__version__)},
            "environment": _read_environment(),
        }
    )
    weights = getattr(runner, "routed_experts", layer)
    route = functools.partial(_route, runner.router) if is_routed_by_kernel(runner) else None
    return WatchedLayer(
        record,
        functools.partial(_read_checkpoint_tensors, find, record),
        route,
        functools.partial(_read_backend_tensors, weights, record.experts),
    )


def list_addresses(layer: Any) -> dict[str, tuple[int, int]]:
    """Return address and bytes of each parameter of a layer; its name says if it is in the host's memory."""
    return {
        name if parameter.is_cuda else f"{name} (host memory)": (parameter.data_ptr(), parameter.nbytes)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def _route(router: Any, x: Any, logits: Any) -> tuple[Any, Any]:
    """Return weights and ids [T, K], as vLLM's own router chooses them."""
    weights, ids = router.select_experts(hidden_states=x, router_logits=logits)
    return weights, ids


def _read_unpadded(config: Any, name: str) -> int:
    """Return a size as the checkpoint has it; some backends pad it."""
    value = getattr(config, f"{name}_unpadded", None)
    return int(getattr(config, name) if value is None else value)


def _read_block(method: Any) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale of FP8 weights; None if all of a matrix do."""
    size = getattr(method, "weight_block_size", None)
    if size:
        return int(size[0]), int(size[1])
    strategy = str(getattr(getattr(method, "weight_quant", None), "strategy", "")).lower()
    return (1, 0) if "channel" in strategy else None


def _name_activations(method: Any) -> str:
    """Return how the backend quantizes activations, as `Record.activations` says it."""
    kernel = getattr(method, "moe_kernel", None)
    config = getattr(getattr(kernel, "fused_experts", None), "quant_config", None)
    kind = str(getattr(config, "quant_dtype", None))
    if "fp4" in kind:
        return "nvfp4"
    if "float8" not in kind:
        return "none"
    if getattr(config, "block_shape", None):
        return "fp8_block"
    # Without a scale in the checkpoint vLLM takes one of each token, or of all tokens together.
    return "fp8_token" if getattr(config, "a1_scale", None) is None else "fp8"


def _read_environment() -> dict[str, str]:
    """Return vLLM's and our variables, masked and without folders: a capsule is passed on."""
    redactor = Redactor.from_this_process()
    wanted = ("VLLM_", "MOEDOCTOR_", "CUDA_VISIBLE_DEVICES")
    return {
        name: strip_folders(redactor.mask_setting(name, value))
        for name, value in sorted(os.environ.items())
        if name.startswith(wanted)
    }


def check_folder(folder: Path | None) -> Path:
    """Return the folder. Raises CapsuleError if there is none."""
    if folder is None:
        raise CapsuleError("the model is not a local folder with safetensors files")
    return folder


def _read_checkpoint_tensors(
    find: Callable[[], Path | None], record: Record, experts: list[int]
) -> Mapping[str, torch.Tensor]:
    """Return the weights of some experts as the checkpoint has them; none if it cannot be read."""
    try:
        files = ExpertFiles(check_folder(find()))
        return files.read_tensors(record.layer, experts, record.quantization)
    except CapsuleError as error:
        logger.warning("moedoctor: record: the capsule is made without the checkpoint's weights: %s", error)
        return {}


def _read_backend_tensors(layer: Any, total: int, experts: list[int]) -> Mapping[str, Any]:
    """Return the weights of some of `total` experts as the backend has them; none if the device is dead."""
    try:
        return {
            f"backend.{name}": parameter.detach()[experts].cpu()
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.dim() and len(parameter) == total
        }
    except RuntimeError as error:  # an assertion or an illegal access has ended the device
        line = str(error).partition("\n")[0]
        logger.warning("moedoctor: record: the backend's weights cannot be read: %s", line)
        return {}
