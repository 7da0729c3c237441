"""The forward pass of a Mixture-of-Experts layer in float32, written for reading.

Nothing here is fast. Quantised weights (NVFP4, FP8) are dequantised an expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.nvfp4 import Nvfp4, dequantize

Weight = torch.Tensor | Nvfp4 | Fp8
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
Quantise = Callable[[torch.Tensor], torch.Tensor]
"""Activations [T, K] -> the float32 values that a backend computes with."""


@dataclass(frozen=True)
class MoeWeights:
    """The weights of one layer: E experts, hidden size H, intermediate size I."""

    w13: Weight
    """[E, 2I, H], the gate half first; [E, I, H] without a gate"""
    w2: Weight
    """[E, H, I]"""
    activation: str = "silu"
    """``silu``, ``gelu_tanh``: act(gate) * up. ``relu2``: relu(x)**2 of one matrix, no gate."""
    shared_w13: torch.Tensor | None = None
    """[2J, H] or [J, H]: the shared expert, which every token passes with weight 1"""
    shared_w2: torch.Tensor | None = None
    """[H, J]"""
    routed_scaling: float = 1.0
    """What the sum over the routed experts is multiplied by; the shared expert is not."""


def forward(
    x: torch.Tensor,
    weights: MoeWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    quantise_input: Quantise | None = None,
    quantise_intermediate: Quantise | None = None,
) -> torch.Tensor:
    """float32 [T, H] for `x` [T, H], `topk_weights` [T, K] and `topk_ids` [T, K].

    An id of -1 is a slot that is not used; the same id twice in a row counts twice. With `quantise_input`
    and `quantise_intermediate` the routed experts compute with what they return for the input [T, H] and
    for the activated values [n, I], as a backend with quantised activations does; the shared expert is not
    quantised. Such backends activate in bfloat16, so that is done here, too: a value near the edge between
    two codes would else often fall to the other side. Raises ValueError for an id outside -1..E-1, an
    unknown activation and half a shared expert.
    """
    experts = _experts(weights.w13)
    _check(topk_ids, experts, weights.activation)
    if (weights.shared_w13 is None) != (weights.shared_w2 is None):
        missing = "shared_w13" if weights.shared_w13 is None else "shared_w2"
        raise ValueError(f"{missing}: expected both matrices of the shared expert or none, got one")
    routed_input = x.float() if quantise_input is None else quantise_input(x.float())  # [T, H]
    total = torch.zeros_like(x, dtype=torch.float32)  # [T, H]
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)  # [n] each
        up = routed_input[rows] @ expert_weight(weights.w13, expert).T  # [n, 2I] or [n, I]
        if quantise_intermediate is None:
            middle = activate(up, weights.activation)  # [n, I]
        else:
            middle = quantise_intermediate(activate(up.bfloat16(), weights.activation).float())  # [n, I]
        out = middle @ expert_weight(weights.w2, expert).T  # [n, H]
        total.index_add_(0, rows, out * topk_weights[rows, slots].float()[:, None])
    total = total * weights.routed_scaling
    if weights.shared_w13 is not None and weights.shared_w2 is not None:
        shared = activate(x.float() @ weights.shared_w13.float().T, weights.activation)  # [T, J]
        total = total + shared @ weights.shared_w2.float().T
    return total


def activate(up: torch.Tensor, activation: str) -> torch.Tensor:
    """[n, I] of the first product [n, 2I] (gate half first) or [n, I]."""
    if activation == "relu2":
        return functional.relu(up).square()
    gate, value = up.chunk(2, dim=-1)  # [n, I] each
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * value
    return functional.silu(gate) * value


def expert_weight(weight: Weight, expert: int) -> torch.Tensor:
    """float32 [N, K]: the weight of one expert, dequantised."""
    if isinstance(weight, Nvfp4):
        one = Nvfp4(weight.packed[expert], weight.block_scales[expert], weight.global_scale[expert])
        return dequantize(one)
    if isinstance(weight, Fp8):
        return weight.values[expert].float() * weight.scale[expert]
    return weight[expert].float()


def _experts(weight: Weight) -> int:
    if isinstance(weight, Nvfp4):
        return int(weight.packed.shape[0])
    return int((weight.values if isinstance(weight, Fp8) else weight).shape[0])


def _check(topk_ids: torch.Tensor, experts: int, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected {', '.join(ACTIVATIONS)}, got {activation!r}")
    if bool(((topk_ids < -1) | (topk_ids >= experts)).any()):
        raise ValueError(f"topk_ids: expected -1 to {experts - 1}")
