"""A MoE layer in plain torch and float32: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

ACTIVATIONS = ("silu", "relu2")
"""Gated SiLU, and squared ReLU without a gate."""


def moe_forward(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """The sum over each token's experts of weight times expert output, float32 [T, H].

    `x` [T, H], `ids` [T, K] with -1 for none, `topk_weights` [T, K]. `weights`: ``w13`` [E, 2 * I, H], gate
    above up, or [E, I, H] for ``relu2``; ``w2`` [E, H, I]; and where there are any, ``w13_scale`` and
    ``w2_scale`` [E], which multiply a whole expert, and ``w13_bias`` and ``w2_bias`` [E, rows]. Raises
    ValueError for an `activation` that is not in `ACTIVATIONS`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    x = x.float()
    out = torch.zeros_like(x)  # [T, H]
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, lane = (ids == expert).nonzero(as_tuple=True)  # [pairs] each
        hidden = _linear(x[token], weights, "w13", expert)  # [pairs, 2 * I] or [pairs, I]
        if activation == "silu":
            gate, up = hidden.chunk(2, dim=1)  # [pairs, I] each
            hidden = torch.nn.functional.silu(gate) * up  # [pairs, I]
        else:
            hidden = hidden.relu().square()  # [pairs, I]
        product = _linear(hidden, weights, "w2", expert)  # [pairs, H]
        out.index_add_(0, token, product * topk_weights[token, lane].float()[:, None])
    return out


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, expert: int) -> torch.Tensor:
    """x [pairs, columns] times the expert's weight [rows, columns], transposed -> [pairs, rows]."""
    product = x @ weights[name][expert].float().T
    if f"{name}_scale" in weights:
        product = product * weights[f"{name}_scale"][expert].float()
    if f"{name}_bias" in weights:
        product = product + weights[f"{name}_bias"][expert].float()
    return product
