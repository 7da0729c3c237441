"""moedoctor's own kernels and cache. On a CPU, the kernels need TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moedoctor.bench.moe.own_backends import Grouped, convert_weights
from moedoctor.fixes.cache.host_workers import MOST_EXPERTS, MOST_TOKENS, HostWorkers
from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.kernels.cache import WHOLE_SHARE
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe_layer import Layer
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.testing import marlin
from moedoctor.testing.adapters.reference import make_moe
from moedoctor.testing.questions import declare

_FORMATS = ("bf16", "fp8", "fp8-block", "nvfp4")
_CURVES = ("silu", "gelu", "gelu_tanh", "relu2")


def _run_experts(layer: Layer, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    from moedoctor.kernels.moe.launch import run_experts

    weights = convert_weights(layer.w13), convert_weights(layer.w2)
    return run_experts(x, *weights, topk_weights, topk_ids, activation=layer.shape.activation)


def _run_slots(layer: Layer, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    weights: dict[str, Any] = {"w13": layer.w13, "w2": layer.w2}
    for name, weight in list(weights.items()):
        if isinstance(weight, Fp8):
            weights |= {name: weight.values, f"{name}_scale": weight.scale}
    return moe_forward(x, weights, topk_ids, topk_weights, activation=layer.shape.activation)


run_experts = make_moe(_run_experts, formats=_FORMATS, activations=_CURVES)
"""Computes a whole layer by the kernels of `moedoctor.kernels.moe`."""
run_slots = make_moe(_run_slots, formats=("bf16", "fp8"), activations=_CURVES)
"""Computes over the slots of an expert cache; an expert is a slot here."""
run_grouped = make_moe(
    lambda layer, *call: Grouped.dequantize(layer, "none")(*call), formats=_FORMATS, package="torch"
)
"""Computes with torch's `grouped_mm` between a sort and a sum of ours."""


@declare(kind="moe", formats=_FORMATS)
def run_host_workers(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, scales: Mapping[str, Tensor]
) -> Tensor:
    """Compute all experts by the workers of an expert cache that has none on the device."""
    from moedoctor.kernels.cache.handover import launch_add, launch_ask

    weights = {"w1": w13, "w2": w2, "_w1.scale": scales.get("w13"), "_w2.scale": scales.get("w2")}
    if "w13_global" in scales:
        for name, key, packed in (("w1", "w13", w13), ("w2", "w2", w2)):
            weights |= marlin.repack(name, Nvfp4(packed, scales[key], scales[f"{key}_global"]))
    store = ExpertStore({name: weight.cpu() for name, weight in weights.items() if weight is not None})
    state = ExpertCache(store, 1, engine="device", device=x.device).state
    workers = HostWorkers([store], [-1, -1], x.device)
    box, stamps = workers.device_box, torch.zeros(2, dtype=torch.int64, device=x.device)
    fields = box.request, box.head, box.ids, box.weights, box.hidden
    result, step = torch.zeros_like(x), max(min(MOST_TOKENS, MOST_EXPERTS // max(topk_ids.shape[1], 1)), 1)
    for rows in zip(*(each.split(step) for each in (topk_ids, topk_weights, x, result)), strict=True):
        ids, shares, hidden = (each.contiguous() for each in rows[:3])
        launch_ask(state, ids, shares, hidden, stamps, fields, WHOLE_SHARE, 0)
        launch_add(rows[3], box.sums, box.answers, stamps)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    workers.stop()
    return result


@declare(kind="router")
def route(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Route by the kernel of `moedoctor.kernels.routing`, also in Triton's interpreter."""
    from moedoctor.kernels.routing.launch import launch_topk

    weights = torch.full((len(logits), top_k), -7.0, device=logits.device)  # [T, K]
    ids = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
    launch_topk(logits, weights, ids, scoring="softmax", **options)
    return weights, ids


def make_device_cache(weights: Mapping[str, Tensor], capacity: int, device: str) -> ExpertCache:
    """Return an expert cache whose bookkeeping is a kernel."""
    return ExpertCache(weights, capacity, engine="device", device=device)
