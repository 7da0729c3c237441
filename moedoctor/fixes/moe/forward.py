"""A MoE layer over the slots of an expert cache.

On a GPU two ways, both Triton kernels: a few tokens read the weights of their experts where they are, in
float32 arithmetic; more are sorted by slot and multiplied in tiles, with `x`'s own type between the products.
On a CPU the float32 reference. All of them skip slot -1, add up in float32 into a buffer of the caller's, and
use no shared workspace: groups of experts can be computed one after another into the same sum.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from moedoctor.reference import moe as reference

ACTIVATIONS = ("silu", "relu2")
"""Gated SiLU, and squared ReLU without a gate."""
_FLOAT8 = (torch.float8_e4m3fn,)
MOST_DECODE_PAIRS = 256
"""Pairs of token and expert up to which each reads its weights; beyond, pairs of one expert share them."""


def moe_forward(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the experts' outputs, weighted by `topk_weights`, to `out`, and give it.

    `x` [T, H]; `slot_ids` int32 or int64 [T, K], rows of `weights`, -1 for none; `topk_weights` [T, K]
    floating; `out` float32 [T, H], zeros where None.
    `weights`: ``w13`` [slots, 2 * I, H], gate above up, or for ``relu2`` [slots, I, H]; ``w2`` [slots, H, I];
    bfloat16, float16, float32, or float8_e4m3fn with ``w13_scale`` and ``w2_scale`` float32 [slots];
    ``w13_bias`` [slots, 2 * I] or [slots, I] and ``w2_bias`` [slots, H] where the model has them. Raises
    ValueError that names the argument.
    """
    _check(x, weights, slot_ids, topk_weights, activation, out)
    if x.device.type == "cpu" and not interprets():
        total = reference.moe_forward(x, weights, slot_ids, topk_weights, activation=activation)
        return total if out is None else out.add_(total)
    from moedoctor.kernels.moe.launch import launch_decode, launch_many

    adds = out is not None
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
    if x.shape[0] and slot_ids.shape[1]:
        launch = launch_many if slot_ids.numel() > MOST_DECODE_PAIRS else launch_decode
        launch(
            x.contiguous(),
            weights,
            slot_ids.contiguous(),
            topk_weights.contiguous(),
            out,
            activation=activation,
            adds=adds,
        )
    elif not adds:
        out.zero_()
    return out


def group_bound(top_k: int) -> float:
    """How far groups may part from one call, relative to the sum of the absolute terms of an output element.

    Each term is computed alike; only the order in which `top_k` float32 terms are added changes, and each of
    two orders is within (top_k - 1) * 2**-24 of the exact sum to first order (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2). On one expert a token, or where all experts of a token are in
    one group, the sums are equal bit by bit.
    """
    unit = 2.0**-24
    steps = max(top_k - 1, 0) * unit
    return 2 * steps / (1 - steps)


def interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def check_weights(weights: Mapping[str, torch.Tensor], hidden: int, activation: str) -> None:
    """Raise ValueError that says what is wrong with the `weights` of `moe_forward`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    missing = {"w13", "w2"} - set(weights)
    if missing:
        raise ValueError(
            f"weights lacks {', '.join(sorted(missing))}; it holds {', '.join(weights) or 'none'}"
        )
    slots, rows, inner = weights["w2"].shape
    height = 2 * inner if activation == "silu" else inner
    expected = {
        "w13": (slots, height, rows),
        "w13_scale": (slots,),
        "w2_scale": (slots,),
        "w13_bias": (slots, height),
        "w2_bias": (slots, rows),
    }
    for name, shape in expected.items():
        if name in weights and tuple(weights[name].shape) != shape:
            raise ValueError(f"weights[{name!r}] must be {shape} for w2, got {tuple(weights[name].shape)}")
    for name in ("w13", "w2"):
        if not weights[name].is_contiguous():
            raise ValueError(f"weights[{name!r}] must be contiguous")
        if weights[name].dtype in _FLOAT8 and f"{name}_scale" not in weights:
            raise ValueError(f"weights[{name!r}] is float8 and has no {name}_scale")
    if rows != hidden:
        raise ValueError(f"x must be [T, {rows}] for w2, got width {hidden}")


def _check(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
    out: torch.Tensor | None,
) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be [T, H], got {tuple(x.shape)}")
    check_weights(weights, x.shape[1], activation)
    if slot_ids.shape != topk_weights.shape or slot_ids.dim() != 2 or slot_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"slot_ids and topk_weights must be [{x.shape[0]}, K], got {tuple(slot_ids.shape)} "
            f"and {tuple(topk_weights.shape)}"
        )
    if out is not None and (out.shape != x.shape or out.dtype != torch.float32 or not out.is_contiguous()):
        raise ValueError(
            f"out must be contiguous float32 {tuple(x.shape)}, got {out.dtype} {tuple(out.shape)}"
        )
