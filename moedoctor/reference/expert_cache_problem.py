"""What the faults of an expert cache share in the child: a layer, the cache of PR 37190, the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moedoctor.reference.moe import moe_forward
from moedoctor.reference.pr37190 import PrRule

# E = experts, C = slots, T = tokens, K = top_k, H = hidden size, I = intermediate size


@dataclass(frozen=True)
class Problem:
    """One layer with all its experts in host memory, and what it is right to compute."""

    weights: Mapping[str, torch.Tensor]
    """``w13`` [E, 2I, H] and ``w2`` [E, H, I], float32, on the host."""
    device: str

    @classmethod
    def make(cls, experts: int, hidden: int, intermediate: int, device: str, seed: int) -> Problem:
        """Random weights that keep the size of what passes through them."""
        draw = torch.Generator().manual_seed(seed)
        w13 = torch.randn(experts, 2 * intermediate, hidden, generator=draw) / hidden**0.5  # [E, 2I, H]
        w2 = torch.randn(experts, hidden, intermediate, generator=draw) / intermediate**0.5  # [E, H, I]
        return cls({"w13": w13, "w2": w2}, device)

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        """float32 [count, H] on the device."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.weights["w13"].shape[2], generator=draw).to(self.device)  # [T, H]

    def right(self, x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, H]: with every expert at hand."""
        here = {name: one.to(self.device) for name, one in self.weights.items()}
        return compute(here, x, topk_weights, ids)


class Difference(NamedTuple):
    """How two outputs [T, H] part."""

    rows: torch.Tensor
    """bool [T]"""
    worst: float
    """The greatest distance of a row over the length of the right one."""


def compute(
    weights: Mapping[str, torch.Tensor], x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float32 [T, H] with the experts `ids` [T, K] of `weights`, be they experts or slots."""
    return moe_forward(x, weights, ids, topk_weights)


def differ(output: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-4) -> Difference:
    """Rows that part by more than rounding in float32 can make."""
    distance = (output - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)  # [T]
    distance = torch.where(output.isfinite().all(1), distance, float("inf"))
    return Difference(distance > tolerance, float(distance.max()) if len(distance) else 0.0)


def even_weights(ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, K]: every expert of a token counts the same."""
    return torch.full(ids.shape, 1.0 / ids.shape[1], device=ids.device)


class PrCache:
    """The PR's provider restated: `PrRule`, and one blocking copy a tensor and load."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        capacity: int,
        *,
        device: str,
        policy: str = "lfru",
        clock: str = "access",
    ) -> None:
        experts = next(iter(weights.values())).shape[0]
        self.rule = PrRule(experts, capacity, policy=policy, clock=clock)
        self._host = weights
        self.slots = {
            name: torch.zeros(capacity, *one.shape[1:], dtype=one.dtype, device=device)
            for name, one in weights.items()
        }
        self._mapping = torch.zeros(experts, dtype=torch.int32, device=device)  # [E]

    def acquire(self, ids: torch.Tensor, needed: torch.Tensor | None = None) -> torch.Tensor:
        """The slots [T, K] that the kernel gets for `ids` [T, K], after loading `needed`, or all of them."""
        self.rule.step((ids if needed is None else needed).unique().tolist())
        for expert, slot in self.rule.loads:
            for name, buffer in self.slots.items():
                buffer[slot].copy_(self._host[name][expert])
            self._mapping[expert] = slot
        return self._mapping[ids.long()].to(ids.dtype)  # [T, K]
