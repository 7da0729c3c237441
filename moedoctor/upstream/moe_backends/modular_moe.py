"""vLLM's MoE kernels, called once a group of experts. Written against 0.21.0; for a child process only."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from moedoctor.faults.cache.workspace_aliasing_lab import Summed, add_up, groups_of
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.expert_cache_problem import Problem
from moedoctor.reference.moe_layer import Layer
from moedoctor.results import UnavailableError
from moedoctor.upstream.moe_backends.bf16 import VllmBf16
from moedoctor.upstream.moe_backends.common import FUSED_MOE


class ModularMoe:
    """vLLM's modular kernel with its Triton experts in bfloat16."""

    tolerance = 0.03
    """Of bfloat16 weights, activations and sum."""

    def __init__(self, device: str, *, unfinished: bool = False) -> None:
        """`unfinished` takes the result before the kernel copies it into a tensor of its own."""
        self._device, self._unfinished = device, unfinished

    @classmethod
    def installed(cls, device: str, *, unfinished: bool = False) -> ModularMoe:
        """Of the installed vLLM. Raises UnavailableError."""
        shape = LayerShape(hidden=128, intermediate=64, experts=32, top_k=8)
        reason = VllmBf16("TRITON").unavailable(shape, device)
        if reason:
            raise UnavailableError(reason)
        return cls(device, unfinished=unfinished)

    def run(
        self,
        problem: Problem,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *,
        groups: int,
        alias: str,
    ) -> Summed:
        """As `GroupRunner.run`. vLLM writes into its input only with torch before 2.9."""
        if alias == "input":
            raise UnavailableError("vLLM writes into its input only with torch before 2.9")
        w13, w2 = (problem.weights[name].to(self._device, torch.bfloat16) for name in ("w13", "w2"))
        experts, rows, hidden = w13.shape
        shape = LayerShape(hidden=hidden, intermediate=rows // 2, experts=experts, top_k=ids.shape[1])
        prepared: Any = VllmBf16("TRITON").prepare(Layer(shape, "bf16", w13, w2))
        if self._unfinished:
            prepared._kernel.impl._finalize = lambda output, fused_out, *rest, **options: fused_out

        def kernel(hidden_states: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            shares = torch.where(part >= 0, weights, 0.0)  # [T, K]
            result: torch.Tensor = prepared(hidden_states, shares, ids)  # [T, H]
            return result

        summed = add_up(kernel, groups_of(ids, experts, groups), x.to(torch.bfloat16), alias)
        return Summed(summed.output.float(), summed.addresses)


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """vLLM's `fused_experts`: bfloat16 [T, H] of `x` [T, H] with `w13` [E, 2I, H], `w2` [E, H, I].

    `expert_map` int32 [E] hides the experts that it maps to -1. Raises UnavailableError.
    """
    try:
        module = importlib.import_module(f"{FUSED_MOE}.fused_moe")
    except Exception as error:  # what an optional dependency raises while vLLM is imported is up to it
        raise UnavailableError(f"vLLM's fused_moe does not load: {type(error).__name__}: {error}") from error
    result: torch.Tensor = module.fused_experts(
        x, w13, w2, weights, ids, global_num_experts=w13.shape[0], expert_map=expert_map
    )
    return result
