"""Which experts the tokens of a benchmark choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moedoctor.models.layer_shape import LayerShape


@dataclass(frozen=True)
class Routing:
    """How routes are made."""

    kind: str = "balanced"
    """``balanced``: every expert as often; ``zipf``: by popularity; ``trace``: as a model's router chose"""
    skew: float = 1.0
    """Zipf: the n-th expert is chosen in proportion to ``n ** -skew``."""
    rows: Sequence[Sequence[int]] = ()
    """Trace: the ids of one token each."""


def make_routes(
    shape: LayerShape, tokens: int, routing: Routing, *, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [T, K] that add up to 1, ids int32 [T, K], distinct in a row).

    A trace is repeated from its start where it has fewer tokens. Raises ValueError for a trace of another
    number of experts a token, or with ids out of range.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = {"balanced": _balanced, "zipf": _zipf, "trace": _trace}[routing.kind](shape, tokens, routing, draw)
    weights = torch.softmax(torch.rand(tokens, shape.top_k, generator=draw), dim=1)  # [T, K]
    return weights.to(device), ids.int().to(device)


def _balanced(shape: LayerShape, tokens: int, routing: Routing, draw: torch.Generator) -> torch.Tensor:
    """Slots take the experts of a random order in turn: no expert is chosen twice more than another."""
    order = torch.randperm(shape.experts, generator=draw)  # [E]
    slot = torch.arange(tokens * shape.top_k).view(tokens, shape.top_k)  # [T, K]
    return order[slot % shape.experts]


def _zipf(shape: LayerShape, tokens: int, routing: Routing, draw: torch.Generator) -> torch.Tensor:
    rank = torch.randperm(shape.experts, generator=draw).double() + 1  # [E]
    noise = torch.rand(tokens, shape.experts, generator=draw, dtype=torch.float64).clamp(min=1e-12)  # [T, E]
    # The K largest of log-weight plus Gumbel noise are a draw without replacement.
    scores = -routing.skew * rank.log() - (-noise.log()).log()  # [T, E]
    return scores.topk(shape.top_k, dim=1).indices


def _trace(shape: LayerShape, tokens: int, routing: Routing, draw: torch.Generator) -> torch.Tensor:
    if not routing.rows:
        raise ValueError("routing: the trace holds no tokens")
    ids = torch.tensor(routing.rows)  # [R, K]
    if ids.ndim != 2 or ids.shape[1] != shape.top_k:
        raise ValueError(f"routing: the trace has {len(routing.rows[0])} experts a token, not {shape.top_k}")
    if int(ids.min()) < 0 or int(ids.max()) >= shape.experts:
        raise ValueError(f"routing: the trace has experts outside 0 to {shape.experts - 1}")
    return ids[torch.arange(tokens) % len(ids)]
