"""What a measurement of the expert cache is of: host weights, the shape, and which part of which trace."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from moedoctor.bench.cache.claims import pinned_bandwidth
from moedoctor.bench.cache.decode import Inputs, Model, host_weights, recorded_ids, zipf_ids
from moedoctor.fixes.eviction import replay
from moedoctor.fixes.expert_cache import ExpertStore
from moedoctor.reference.expert_cache import PrRule

CHECKED_STEPS = 12
"""Steps before the timed ones whose results are compared."""
_TOKENS_A_ROUND = 4
_SEEN_TOKENS = 910
"""Tokens of the trace before the first that is timed: thousands would change the hit rates little. The PR's
cache loses experts at 32 slots, and is timed only where it is right: from there on it is for long enough.
`pr_wrong_steps` says how often it is wrong in a longer part of the trace."""
_COUNTED_TOKENS = 2000


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
    recorded: bool = False
    """The trace is the one that ships with moedoctor."""

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
        return cls(model, inputs, capacity, batch, start, rounds, each, recorded)

    @property
    def last(self) -> int:
        """The last step."""
        return self.start + self.rounds * self.each - 1


def pr_wrong_steps(run: Run) -> tuple[int, int]:
    """(steps in which the PR's rule loses an expert of some layer, steps), by bookkeeping from empty caches.

    Over the first 2000 tokens of the trace, or as many as are timed where these are more. The steps that are
    timed are chosen so that the rule is right there, and say nothing about how often it is.
    """
    steps = max(_COUNTED_TOKENS // run.batch, run.last + 1)
    wrong = [False] * steps
    for calls in _counted_calls(run.model, run.batch, steps, run.recorded):
        rule = PrRule(run.model.experts, run.capacity)
        for step, call in enumerate(calls):
            wrong[step] |= replay((call,), rule).wrong > 0
    return sum(wrong), steps


@functools.lru_cache(maxsize=1)
def _counted_calls(model: Model, batch: int, steps: int, recorded: bool) -> list[list[list[int]]]:
    """The experts of each call, by layer and step."""
    ids = recorded_ids(model, steps) if recorded else zipf_ids(model, batch, steps)
    calls: list[list[list[int]]] = ids.transpose(0, 1).flatten(2).tolist()
    return calls
