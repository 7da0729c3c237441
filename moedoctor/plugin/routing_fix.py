"""The fix `routing`: top-k that is right for NaN logits, in releases whose kernel is not.

Up to 0.19.1 `topk_softmax` and `topk_sigmoid` give a NaN row the same expert K times (MD001). This fix
answers both calls by `moedoctor.fixes.routing`, with the rule of 0.20.0 (``nan_policy="zero"``).
`grouped_topk` never chooses experts with logits that are not finite, so it is left alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moedoctor.fixes import routing
from moedoctor.plugin.register import Patch, apply_patches

_PARAMETERS = "topk_weights topk_ids token_expert_indices gating_output renormalize e_score_correction_bias"


def apply(version: str) -> str:
    """Apply the fix; see `moedoctor.plugin.register`."""
    patches = []
    for name in ("topk_softmax", "topk_sigmoid"):
        wrap = functools.partial(wrap_topk, ours=getattr(routing, name))
        patches.append(Patch("vllm._custom_ops", name, wrap, _PARAMETERS, (f"torch.ops._moe_C.{name}(",)))
    apply_patches("routing", version, patches)
    return "topk_softmax and topk_sigmoid give distinct experts also for NaN"


def wrap_topk(original: Any, *, ours: Any) -> Any:
    """Return what takes the place of vLLM's top-k: it writes what `ours` returns.

    `ours` takes logits [T, E], K, `renormalize` and `bias` [E], and returns a `TopK`.
    """

    def route(
        topk_weights: Any,
        topk_ids: Any,
        token_expert_indices: Any,
        gating_output: Any,
        renormalize: bool = False,
        e_score_correction_bias: Any = None,
        is_padding: Any = None,  # newer releases route no padding rows; here they are routed
    ) -> None:
        tokens, top_k = topk_ids.shape
        chosen = ours(gating_output, top_k, renormalize=renormalize, bias=e_score_correction_bias)
        topk_weights.copy_(chosen.weights)  # [T, K]
        # Not every device can copy into uint32; the ids have the same bits.
        ids = topk_ids.view(torch.int32) if topk_ids.dtype is torch.uint32 else topk_ids  # [T, K]
        ids.copy_(chosen.ids)
        # Place of each pair when sorted by k, then by token, as upstream's kernel fills it.
        place = torch.arange(
            tokens * top_k, device=topk_ids.device, dtype=token_expert_indices.dtype
        )  # [T * K]
        token_expert_indices.copy_(place.view(top_k, tokens).t())

    return route
