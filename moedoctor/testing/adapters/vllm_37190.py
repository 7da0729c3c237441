"""The published expert cache of vllm#37190, restated."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moedoctor.reference.expert_cache import PrCache
from moedoctor.testing.questions import declare


@declare(kind="cache", package="vllm#37190 at 6d0ac79f, restated")
class Provider:
    """Slots under the rule of the pull request."""

    def __init__(self, weights: Mapping[str, torch.Tensor], capacity: int, device: str) -> None:
        self.cache = PrCache(weights, capacity, device=device)

    def prepare(self, ids: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Load the experts of `ids` [T, K], or the highest ids of a call that does not fit."""
        return self.cache.slots, self.cache.acquire(ids)
