"""The forward pass of a Mixture-of-Experts layer in float32, written for reading.

Everything else is compared with it. Nothing here is fast: quantized weights (NVFP4, FP8) are dequantized one
expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.nvfp4 import Nvfp4, dequantize

Weight = torch.Tensor | Nvfp4 | Fp8
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
Quantize = Callable[[torch.Tensor], torch.Tensor]
"""Activations [T, K] -> the float32 values that a backend computes with."""


@dataclass(frozen=True)
class MoeWeights:
    """The weights of one layer: E experts (or cache slots), hidden size H, intermediate size I."""

    w13: Weight
    """[E, 2I, H], the gate half first; [E, I, H] without a gate"""
    w2: Weight
    """[E, H, I]"""
    activation: str = "silu"
    """``silu``, ``gelu``, ``gelu_tanh``: act(gate) * up. ``relu2``: relu(x)**2 of one matrix, no gate."""
    w13_bias: torch.Tensor | None = None
    """[E, 2I] or [E, I]"""
    w2_bias: torch.Tensor | None = None
    """[E, H]"""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], activation: str = "silu") -> MoeWeights:
        """Read ``w13`` and ``w2``, and ``w13_scale`` [E], ``w2_scale``, ``w13_bias``, ``w2_bias`` if any."""
        w13, w2 = (
            Fp8(tensors[name], tensors[f"{name}_scale"]) if f"{name}_scale" in tensors else tensors[name]
            for name in ("w13", "w2")
        )
        return cls(w13, w2, activation, tensors.get("w13_bias"), tensors.get("w2_bias"))


Rounding = tuple[torch.dtype, torch.dtype, torch.dtype, float]
"""Types of the first product, its activation's arithmetic and the activated values; error of the product."""
ROUNDINGS: tuple[Rounding, ...] = tuple(
    (*types, error)
    # Hopper keeps about 14 bits of a sum of FP8 products: arXiv 2412.19437. Fast accumulation adds none.
    for error in (0, 2**-10, -(2**-10))
    for types in (
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),  # vLLM
        (torch.bfloat16, torch.float32, torch.float32),  # FlashInfer 0.7.2's CUTLASS kernel, by its source
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
    )
)


def forward(
    x: torch.Tensor,
    weights: MoeWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    quantize_input: Quantize | None = None,
    quantize_intermediate: Quantize | None = None,
    rounding: Rounding = ROUNDINGS[0],
) -> torch.Tensor:
    """Return float32 [T, H] for `x` [T, H], `topk_weights` [T, K] and `topk_ids` [T, K].

    An id of -1 is skipped; an id that a token has twice is added twice. `quantize_input` and
    `quantize_intermediate` change the input [T, H] and the activated values [n, I], as a backend with
    quantized activations does. Values to be quantized are rounded before by `rounding`: a value near the edge
    between two codes often gets the other code where a backend rounds elsewhere. Raises ValueError for an id
    outside -1..E-1 and for an unknown activation.
    """
    call = x, weights, topk_weights, topk_ids
    return forward_each(*call, quantize_input, quantize_intermediate, (rounding,))[0]


def forward_each(
    x: torch.Tensor,
    weights: MoeWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    quantize_input: Quantize | None,
    quantize_intermediate: Quantize | None,
    roundings: Sequence[Rounding],
) -> torch.Tensor:
    """Return float32 [roundings, T, H] as `forward`; an expert is dequantized once for all of them."""
    if weights.activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected {', '.join(ACTIVATIONS)}, got {weights.activation!r}")
    experts = _count_experts(weights.w13)
    if bool(((topk_ids < -1) | (topk_ids >= experts)).any()):
        raise ValueError(f"topk_ids: expected -1 to {experts - 1}")
    routed_input = x.float() if quantize_input is None else quantize_input(x.float())  # [T, H]
    total = torch.zeros(len(roundings), *x.shape, dtype=torch.float32, device=x.device)  # [R, T, H]
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, lane = (topk_ids == expert).nonzero(as_tuple=True)  # [n] each
        up = _multiply(routed_input[token], weights.w13, weights.w13_bias, expert)  # [n, 2I] or [n, I]
        middle = torch.cat(
            [_activate_rounded(up, weights.activation, each, quantize_intermediate) for each in roundings]
        )  # [R * n, I]
        out = _multiply(middle, weights.w2, weights.w2_bias, expert)  # [R * n, H]
        out = out * topk_weights[token, lane].float().repeat(len(roundings))[:, None]
        total.index_add_(1, token, out.unflatten(0, (len(roundings), -1)))
    return total


def _activate_rounded(
    up: torch.Tensor, activation: str, rounding: Rounding, quantize: Quantize | None
) -> torch.Tensor:
    """Return the activated values [n, I], rounded and quantized if `quantize` is given."""
    if quantize is None:
        return activate(up, activation)
    product, arithmetic, result, error = rounding
    activated = activate((up * (1 + error)).to(product).to(arithmetic), activation)  # [n, I]
    return quantize(activated.to(result).float())


def activate(up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return [n, I] of the first product [n, 2I] (gate half first) or [n, I]."""
    if activation == "relu2":
        return functional.relu(up).square()
    gate, value = up.chunk(2, dim=-1)  # [n, I] each
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * value
    return functional.silu(gate) * value


def dequantize_expert(weight: Weight, expert: int) -> torch.Tensor:
    """Return float32 [N, K]: the weight of one expert, dequantized."""
    if isinstance(weight, Nvfp4):
        packed, scale = weight.packed[expert], weight.global_scale[expert].reshape(-1)  # [1] or [2]
        exact = dequantize(Nvfp4(packed, weight.block_scales[expert], scale.new_ones(())))  # [N, K]
        return exact * scale.repeat_interleave(packed.shape[0] // scale.numel())[:, None]
    if isinstance(weight, Fp8):
        return weight.dequantize(expert)
    return weight[expert].float()


def _multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Return float32 [n, N] of `x` [n, K] and the expert's weight [N, K] and bias [N]."""
    product = x @ dequantize_expert(weight, expert).T  # [n, N]
    return product if bias is None else product + bias[expert].float()


def _count_experts(weight: Weight) -> int:
    if isinstance(weight, Nvfp4):
        return int(weight.packed.shape[0])
    return int((weight.values if isinstance(weight, Fp8) else weight).shape[0])
