"""vLLM's Triton experts in bfloat16, for callers that compute one group of experts after another.

Made for vLLM 0.21.0 to 0.33.0. For a child process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.results import UnavailableError
from moedoctor.upstream.moe_backends.backends import VllmBackend, load

Apply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, H], topk_weights [T, K], topk_ids [T, K]) -> [T, H]."""


def build_modular_kernel(
    w13: torch.Tensor, w2: torch.Tensor, *, top_k: int, unfinished: bool = False
) -> Apply:
    """Return vLLM's modular kernel with `w13` [E, 2I, H] and `w2` [E, H, I], bfloat16.

    `unfinished` takes the result before the kernel copies it into its own tensor. Raises UnavailableError.
    """
    experts, rows, hidden_size = w13.shape
    shape = LayerShape(hidden=hidden_size, intermediate=rows // 2, experts=experts, top_k=top_k)
    backend = VllmBackend(Variant("TRITON", "bf16"))
    reason = backend.unavailable(shape, str(w13.device))
    if reason:
        raise UnavailableError(reason)
    prepared: Any = backend.prepare(Layer(shape, "bf16", w13, w2))
    if unfinished:
        prepared.kernel.impl._finalize = lambda output, fused_out, *rest, **options: fused_out
    apply: Apply = prepared
    return apply


def call_fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Call vLLM's `fused_experts`: bfloat16 [T, H] of `x` [T, H] with `w13` [E, 2I, H], `w2` [E, H, I].

    `expert_map` int32 [E] hides the experts that it maps to -1. Raises UnavailableError.
    """
    result: torch.Tensor = load("fused_moe").fused_experts(
        x, w13, w2, topk_weights, topk_ids, global_num_experts=w13.shape[0], expert_map=expert_map
    )
    return result
