"""MD007 in the child: a cache that drops experts, and ours, which refuses the call or makes groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moedoctor.faults.cache.cache_overflow import CacheOverflowParameters
from moedoctor.fixes.expert_cache import CacheOverflow, ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import PrCache, Problem, differ
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.results import Case, Evidence

_HIDDEN, _INTERMEDIATE = 64, 32


class Prefill(NamedTuple):
    output: torch.Tensor
    """float32 [T, H]"""
    refused: str | None
    """The error that a caller gets who did not ask for groups."""
    groups: int = 1
    dropped: int = 0
    """Experts that were left out."""


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Prefill]
"""A layer behind a cache: (x [T, H], topk_weights [T, K], topk_ids [T, K]) -> the result."""


def make_truncating(problem: Problem, capacity: int) -> Layer:
    """Return PR 37190 before its commit 1a8df90: it silently keeps the highest expert ids that fit."""
    cache = PrCache(problem.weights, capacity, device=problem.device)

    def compute_prefill(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Prefill:
        slot_ids = cache.acquire(topk_ids)  # [T, K]
        output = forward(x, MoeWeights.from_tensors(cache.slots), topk_weights, slot_ids)  # [T, H]
        return Prefill(output, None, dropped=len(cache.rule.dropped))

    return compute_prefill


def make_grouped(problem: Problem, capacity: int) -> Layer:
    """Return our cache: `acquire` refuses the call, `groups` computes it in parts that fit."""
    cache = ExpertCache(problem.weights, capacity, device=problem.device)

    def compute_prefill(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Prefill:
        refused = None
        try:
            cache.acquire(topk_ids)
        except CacheOverflow as error:
            refused = str(error)
        total, groups = torch.zeros_like(x), 0  # [T, H]
        for part in cache.groups(topk_ids):
            moe_forward(x, part.weights, part.slot_ids, topk_weights, out=total)
            groups += 1
        return Prefill(total, refused, groups)

    return compute_prefill


def model(case: Case, parameters: CacheOverflowParameters, release: object) -> Evidence:
    """Compute prefills that need more experts than there are slots."""
    return measure(parameters, case.device, make_truncating if case.subject == "faulty" else make_grouped)


def measure(
    parameters: CacheOverflowParameters, device: str, make: Callable[[Problem, int], Layer]
) -> Evidence:
    """Compare the layer that `make` returns with the layer without a cache."""
    draw = torch.Generator().manual_seed(parameters.seed)
    problem = Problem.make(parameters.experts, _HIDDEN, _INTERMEDIATE, device, parameters.seed)
    layer = make(problem, parameters.capacity)
    results, differences, needed = [], [], []
    for index in range(parameters.prefills):
        logits = torch.randn(parameters.tokens, parameters.experts, generator=draw)  # [T, E]
        topk_weights, topk_ids = (part.to(device) for part in logits.softmax(1).topk(parameters.top_k))
        topk_weights = topk_weights / topk_weights.sum(1, keepdim=True)  # [T, K]
        topk_ids = topk_ids.int()  # [T, K]
        needed.append(len(topk_ids.unique()))
        x = problem.draw_tokens(parameters.tokens, seed=index)  # [T, H]
        results.append(layer(x, topk_weights, topk_ids))
        expected = problem.compute_expected(x, topk_weights, topk_ids)  # [T, H]
        differences.append(differ(results[-1].output, expected))
    return {
        "needed": needed[0],
        "rows": parameters.prefills * parameters.tokens,
        "wrong_rows": sum(int(each.rows.sum()) for each in differences),
        "worst_error": max(each.worst for each in differences),
        "dropped_experts": sum(each.dropped for each in results),
        "groups": max(each.groups for each in results),
        "refused": all(each.refused for each in results),
        "message": results[0].refused,
    }
