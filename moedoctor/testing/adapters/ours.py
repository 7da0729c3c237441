"""moedoctor's own kernels and cache. On a CPU, the kernels need TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moedoctor.bench.moe.own_backends import Grouped, convert_weights
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_layer import Layer
from moedoctor.testing.adapters.reference import read
from moedoctor.testing.questions import declare

_FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4")
_CURVES = ("silu", "gelu", "gelu_tanh", "relu2")


@declare(kind="moe", formats=_FORMATS, activations=_CURVES)
def run_experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    format: str,
    activation: str,
) -> torch.Tensor:
    """Compute a whole layer by the kernels of `moedoctor.kernels.moe`."""
    from moedoctor.kernels.moe.launch import run_experts

    weights = (
        convert_weights(read(w13, scales, "w13", format)),
        convert_weights(read(w2, scales, "w2", format)),
    )
    return run_experts(hidden_states, *weights, topk_weights, topk_ids, activation=activation)


@declare(kind="moe", formats=("bf16", "fp8"), activations=_CURVES)
def run_slots(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    activation: str,
) -> torch.Tensor:
    """Compute over the slots of an expert cache; an expert is a slot here."""
    named = {f"{name}_scale": scale for name, scale in scales.items()}
    return moe_forward(
        hidden_states, {"w13": w13, "w2": w2, **named}, topk_ids, topk_weights, activation=activation
    )


@declare(kind="moe", package="torch", formats=_FORMATS)
def run_grouped(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
    format: str,
    activation: str,
) -> torch.Tensor:
    """Compute with torch's `grouped_mm` between a sort and a sum of ours."""
    weights = (read(w13, scales, "w13", format), read(w2, scales, "w2", format))
    shape = LayerShape(hidden_states.shape[1], w2.shape[2], len(w2), topk_ids.shape[1], activation)
    layer = Layer(shape, format, *weights)
    return Grouped.dequantize(layer, "none")(hidden_states, topk_weights, topk_ids)


@declare(kind="router")
def route(logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by the kernel of `moedoctor.kernels.routing`, also in Triton's interpreter."""
    from moedoctor.kernels.routing.launch import launch_topk

    weights = torch.full((len(logits), top_k), -7.0, device=logits.device)  # [T, K]
    ids = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
    launch_topk(logits, weights, ids, scoring="softmax", **options)
    return weights, ids


def make_device_cache(weights: Mapping[str, torch.Tensor], capacity: int, device: str) -> ExpertCache:
    """Return an expert cache whose bookkeeping is a kernel."""
    return ExpertCache(weights, capacity, engine="device", device=device)
