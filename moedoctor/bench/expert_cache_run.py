"""What a measurement of the expert cache is of: host weights, the shape, and which part of which trace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moedoctor.bench.cache_claims import pinned_bandwidth
from moedoctor.bench.expert_cache_decode import Inputs, Model, host_weights
from moedoctor.fixes.expert_cache import ExpertStore

CHECKED_STEPS = 12
"""Steps before the timed ones whose results are compared."""
_TOKENS_A_ROUND = 4
_SEEN_TOKENS = 910
"""Tokens of the trace before the first that is timed: thousands would change the hit rates little. The PR's
cache, which is wrong every few hundred steps at 32 slots, is right for some fifty from there on."""


@dataclass(frozen=True)
class Host:
    """What several measurements share: host weights, their stores as they are and packed, the bus."""

    weights: list[dict[str, torch.Tensor]]
    plain: list[ExpertStore]
    packed: list[ExpertStore]
    pinned_gb_s: float | None
    """Of a plain pinned copy; None without a GPU."""

    @classmethod
    def make(cls, model: Model, device: str) -> Host:
        weights = host_weights(model, device)
        return cls(
            weights,
            [ExpertStore(one) for one in weights],
            [ExpertStore(one, packed=True) for one in weights],
            pinned_bandwidth(device) / 1e9 if torch.device(device).type == "cuda" else None,
        )


@dataclass(frozen=True)
class Run:
    """What is measured: the shape, the trace, and which part of it."""

    model: Model
    inputs: Inputs
    capacity: int
    batch: int
    start: int
    """Steps that shape the caches before those that are timed."""
    rounds: int
    each: int
    """Steps a round."""

    @classmethod
    def make(
        cls,
        model: Model,
        device: str,
        *,
        batch: int,
        capacity: int,
        rounds: int,
        seen: int | None,
        recorded: bool,
    ) -> Run:
        start = max((_SEEN_TOKENS if seen is None else seen) // batch, CHECKED_STEPS)
        each = max(_TOKENS_A_ROUND // batch, 1)
        steps = start + rounds * each
        inputs = (
            Inputs.recorded(model, steps, device) if recorded else Inputs.make(model, batch, steps, device)
        )
        return cls(model, inputs, capacity, batch, start, rounds, each)

    @property
    def last(self) -> int:
        """The last step."""
        return self.start + self.rounds * self.each - 1
