"""The size of a Mixture-of-Experts layer; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
QUANTIZATIONS = ("nvfp4", "fp8", "fp8-block", "bf16")
"""Formats of the expert weights: fp8 has a scale for each matrix, fp8-block one for 128 x 128 weights."""
BITS = {"nvfp4": 4.5, "fp8": 8.0, "fp8-block": 8.0 + 32 / 128**2, "bf16": 16.0}
"""Bits of a weight with its block scales, without the scale of the whole matrix."""


@dataclass(frozen=True)
class LayerShape:
    """A layer of routed experts; each token uses `top_k` of them."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "silu"
    """``silu``, ``gelu``, ``gelu_tanh`` (these are gated) or ``relu2`` (no gate)"""

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} is more than experts {self.experts}")

    @property
    def gated(self) -> bool:
        """True if w13 holds gate and up halves (SiLU, GELU); ReLU² has no gate."""
        return self.activation != "relu2"

    @property
    def w13_rows(self) -> int:
        """Rows of w13: gate and up, or one matrix without a gate."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def expert_parameters(self) -> int:
        return (self.w13_rows + self.intermediate) * self.hidden

    def count_weight_bytes(self, experts: int, bits: float) -> int:
        """Return the bytes of the weights and block scales of `experts` experts at `bits` bits a weight."""
        return int(experts * self.expert_parameters * bits / 8)

    def count_flops(self, pairs: int) -> int:
        """Return the floating-point operations of the products for so many (token, expert) pairs."""
        return 2 * pairs * self.expert_parameters

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.experts} experts, "
            f"top {self.top_k}, {self.activation}"
        )
