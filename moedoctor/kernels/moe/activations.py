"""What stands between the two products of an MoE layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate: tl.tensor, up: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """``silu(gate) * up``, ``gelu_tanh(gate) * up``, ``relu2`` of `gate` alone, or `gate` for ``none``."""
    if activation == "silu":
        value = gate * tl.sigmoid(gate) * up
    elif activation == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        value = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)) * up
    elif activation == "relu2":
        positive = tl.maximum(gate, 0.0)
        value = positive * positive
    else:
        value = gate
    return value
