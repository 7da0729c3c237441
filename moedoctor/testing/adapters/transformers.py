"""The experts and the router of transformers' Qwen3-MoE, eager and with `grouped_mm`."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moedoctor.testing.questions import declare

_MODEL = "transformers.models.qwen3_moe.modeling_qwen3_moe"


def _make_experts(w13: Tensor, w2: Tensor, implementation: str) -> Any:
    config = SimpleNamespace(
        num_experts=len(w2),
        hidden_size=w2.shape[1],
        moe_intermediate_size=w2.shape[2],
        hidden_act="silu",
        _experts_implementation=implementation,
    )
    experts = importlib.import_module(_MODEL).Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = (
        torch.nn.Parameter(each, requires_grad=False) for each in (w13, w2)
    )
    return experts


@declare(package="transformers")
def run_eager(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Compute expert by expert."""
    output: Tensor = _make_experts(w13, w2, "eager")(x, topk_ids.long(), topk_weights)
    return output


@declare(package="transformers")
def run_grouped(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Compute with torch's grouped product."""
    output: Tensor = _make_experts(w13, w2, "grouped_mm")(x, topk_ids.long(), topk_weights)
    return output


@declare(package="transformers")
def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Route by Qwen3-MoE's router, without the product that makes the logits."""
    module: Any = importlib.import_module(_MODEL)
    module.F = SimpleNamespace(linear=lambda hidden_states, weight: hidden_states)
    experts = logits.shape[1]
    sizes = {"num_experts_per_tok": top_k, "num_experts": experts, "hidden_size": experts}
    router = module.Qwen3MoeTopKRouter(SimpleNamespace(**sizes, norm_topk_prob=False))
    _, weights, ids = router(logits)
    return weights, ids
