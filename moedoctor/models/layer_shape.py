"""The size of a Mixture-of-Experts layer; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
QUANTIZATIONS = ("nvfp4", "fp8", "bf16")
"""How the expert weights are stored."""
BITS = {"nvfp4": 4.5, "fp8": 8.0, "bf16": 16.0}
"""Bits a weight takes with its block scales; the scale of a whole matrix is not counted."""


@dataclass(frozen=True)
class LayerShape:
    """E routed experts of hidden size H and intermediate size I, K of them a token."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "silu"
    """``silu``, ``gelu_tanh`` (both gated) or ``relu2`` (no gate)"""

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
        """Whether w13 holds gate and up halves (SiLU, GELU); ReLU² has no gate."""
        return self.activation != "relu2"

    @property
    def w13_rows(self) -> int:
        """Rows of the first weight: gate and up, or one matrix without a gate."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return (self.w13_rows + self.intermediate) * self.hidden

    def weight_bytes(self, experts: int, bits: float) -> int:
        """Bytes of the weights and block scales of so many experts, at so many bits a weight."""
        return int(experts * self.expert_parameters * bits / 8)

    def flops(self, slots: int) -> int:
        """Floating-point operations of the products for so many (token, expert) pairs."""
        return 2 * slots * self.expert_parameters

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.experts} experts, "
            f"top {self.top_k}, {self.activation}"
        )
