"""The fix `routing`: top-k that stays right with NaN logits, in releases whose kernel does not.

Up to 0.19.1 `topk_softmax` and `topk_sigmoid` give a NaN row the same expert K times (MD001). Here both are
answered by `moedoctor.fixes.routing`, with what 0.20.0 ships (``nan_policy="zero"``). `grouped_topk` takes
logits that are not finite out of the choice by itself and is left alone.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from packaging.version import Version

from moedoctor.upstream.plugin.fix_support import expect, replace_once

NAME = "routing"
FIRST_FIXED = Version("0.20.0")
_PARAMETERS = (
    "topk_weights",
    "topk_ids",
    "token_expert_indices",
    "gating_output",
    "renormalize",
    "e_score_correction_bias",
)
_FUNCTIONS = ("topk_softmax", "topk_sigmoid")


def apply(version: str) -> str:
    """Apply the fix to the vLLM of this process, of release `version`; what is active, in a few words.

    Raises FixError where vLLM is not as expected; nothing has been changed then.
    """
    if Version(version) >= FIRST_FIXED:
        return f"not needed: {FIRST_FIXED} and later route NaN rows to distinct experts"
    operations = importlib.import_module("vllm._custom_ops")
    for name in _FUNCTIONS:
        expect(operations, name, _PARAMETERS, (f"torch.ops._moe_C.{name}(",))
    routing = importlib.import_module("moedoctor.fixes.routing")
    for name in _FUNCTIONS:
        replace_once(operations, name, functools.partial(_routed, ours=getattr(routing, name)), by=NAME)
    return "topk_softmax and topk_sigmoid give distinct experts also for NaN"


def _routed(original: Any, *, ours: Any) -> Any:
    @functools.wraps(original)
    def topk(
        topk_weights: Any,
        topk_ids: Any,
        token_expert_indices: Any,
        gating_output: Any,
        renormalize: bool = False,
        e_score_correction_bias: Any = None,
    ) -> None:
        import torch

        top_k = topk_ids.shape[1]
        found = ours(gating_output, top_k, renormalize=renormalize, bias=e_score_correction_bias)
        topk_weights.copy_(found.weights)  # [T, K]
        # Copies into uint32 are not there for every device; the ids are the same bits.
        ids = topk_ids.view(torch.int32) if topk_ids.dtype is torch.uint32 else topk_ids  # [T, K]
        ids.copy_(found.ids)
        # Place of each pair when sorted by k, then by token, as upstream's kernel fills it.
        tokens = topk_ids.shape[0]
        place = torch.arange(
            tokens * top_k, device=topk_ids.device, dtype=token_expert_indices.dtype
        )  # [T * K]
        token_expert_indices.copy_(place.view(top_k, tokens).t())

    return topk
