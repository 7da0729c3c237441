"""The lab of MD027: a layer with routed experts and a shared one, on one rank and on several.

All values are whole numbers or halves of them in float64, so sums are exact in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moedoctor.faults.parallel.ranks import Rank, run_ranks
from moedoctor.faults.parallel.shared_expert_parallel import SharedExpertParallelParameters
from moedoctor.results import Case, Evidence

_SECONDS = 60.0
"""The limit of a collective; none of these waits for long."""


class Layer(NamedTuple):
    x: torch.Tensor
    """[T, H]"""
    shared_up: torch.Tensor
    """[H, I]"""
    shared_down: torch.Tensor
    """[I, H]"""
    experts: torch.Tensor
    """[E, H, H]; a linear map is expert enough here"""
    weights: torch.Tensor
    """[T, E]: 1/2 for the experts of a token, else 0"""


def model(case: Case, parameters: SharedExpertParallelParameters, release: None) -> Evidence:
    """Compare what the ranks compute together with what one rank computes."""
    layer = make_layer(parameters)
    shared = compute_shared(layer.x, layer.shared_up, layer.shared_down)  # [T, H]
    routed = compute_routed(layer.x, layer.experts, layer.weights)  # [T, H]
    forward = (FAULTY if case.subject == "faulty" else FIXED)[parameters.mistake]
    ends = run_ranks(parameters.ranks, lambda rank: forward(rank, layer), _SECONDS)
    for end in ends:
        if end.error is not None:
            raise end.error
    wrong = torch.stack([(end.result != routed + shared).any(1) for end in ends]).any(0)  # [T]
    part = ends[0].result - routed  # [T, H]
    return {
        "rows": len(wrong),
        "rows_wrong": int(wrong.sum()),
        "times": float((part * shared).sum() / (shared * shared).sum()),
        "collectives": list(ends[0].calls),
    }


def make_layer(parameters: SharedExpertParallelParameters) -> Layer:
    """Draw a layer of small whole numbers."""
    draw = torch.Generator().manual_seed(parameters.seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=draw).double()

    hidden, inner, experts = parameters.hidden, parameters.intermediate, parameters.experts
    chosen = torch.rand(parameters.tokens, experts, generator=draw).topk(parameters.top_k, dim=1).indices
    weights = torch.zeros(parameters.tokens, experts, dtype=torch.float64).scatter_(1, chosen, 0.5)
    return Layer(
        make(parameters.tokens, hidden), make(hidden, inner), make(inner, hidden),
        make(experts, hidden, hidden), weights,
    )  # fmt: skip


def compute_shared(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return [T, H]; a shard of `up` [H, I/R] and `down` [I/R, H] gives a part of the sum."""
    return (x @ up).relu() @ down


def compute_routed(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [T, H]; some of the `experts` with their columns of `weights` give a part of the sum."""
    return torch.einsum("te,th,ehk->tk", weights, x, experts)


def compute_parts(rank: Rank, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's parts of the routed and the shared sum for all tokens, [T, H] each."""
    routed = compute_routed(layer.x, rank.take_shard(layer.experts, 0), rank.take_shard(layer.weights, 1))
    up, down = rank.take_shard(layer.shared_up, 1), rank.take_shard(layer.shared_down, 0)
    return routed, compute_shared(x, up, down)


# --- The layers: `_maybe_reduce_final_output` and `_maybe_reduce_shared_expert_output` of
# vllm/model_executor/layers/fused_moe/runner/moe_runner.py, lines 429 and 483 of 0.33.0 -------------------


def reduce_twice(rank: Rank, layer: Layer) -> torch.Tensor:
    """Aria, models/aria.py:210 of 0.33.0: its shared MLP reduces, then the runner reduces the sum."""
    routed, shared = compute_parts(rank, layer, layer.x)
    return rank.reduce(routed + rank.reduce(shared))


def reduce_once(rank: Rank, layer: Layer) -> torch.Tensor:
    """The same with `reduce_results=False` in the shared MLP."""
    routed, shared = compute_parts(rank, layer, layer.x)
    return rank.reduce(routed + shared)


def take_one_shard(rank: Rank, layer: Layer) -> torch.Tensor:
    """Qwen3-Next, models/qwen3_next.py:135 of 0.19.1: tokens are split, and so is the shared expert."""
    own = rank.take_shard(layer.x, 0)  # [T/R, H]
    routed, shared = compute_parts(rank, layer, own)
    complete = rank.take_shard(rank.reduce(routed, "reduce_scatter"), 0)  # [T/R, H]
    return rank.gather(complete + shared)


def take_whole(rank: Rank, layer: Layer) -> torch.Tensor:
    """The same from 0.20.0 on: with `disable_tp` each rank has the whole shared expert for its tokens."""
    own = rank.take_shard(layer.x, 0)  # [T/R, H]
    routed, _ = compute_parts(rank, layer, own)
    complete = rank.take_shard(rank.reduce(routed, "reduce_scatter"), 0)  # [T/R, H]
    return rank.gather(complete + compute_shared(own, layer.shared_up, layer.shared_down))


def add_whole(rank: Rank, layer: Layer) -> torch.Tensor:
    """sglang#35535: every rank has the whole shared part, and a sum meant for parts adds them up."""
    routed, _ = compute_parts(rank, layer, layer.x)
    return rank.reduce(routed + compute_shared(layer.x, layer.shared_up, layer.shared_down))


def add_whole_after(rank: Rank, layer: Layer) -> torch.Tensor:
    """The same, with the shared part added after the sum."""
    routed, _ = compute_parts(rank, layer, layer.x)
    return rank.reduce(routed) + compute_shared(layer.x, layer.shared_up, layer.shared_down)


FAULTY = {"reduced_twice": reduce_twice, "one_shard": take_one_shard, "whole_added": add_whole}
FIXED = {"reduced_twice": reduce_once, "one_shard": take_whole, "whole_added": add_whole_after}
