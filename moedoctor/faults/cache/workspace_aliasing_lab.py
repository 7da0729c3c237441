"""What runs in the child for MD019: groups through one workspace, and through ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache_problem import Problem, compute, differ
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.cache.workspace_aliasing import WorkspaceAliasingParameters

_HIDDEN, _INTERMEDIATE = 128, 64


Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states [T, H], ids [T, K]) -> [T, H], perhaps a view of memory that the next call writes."""


class Summed(NamedTuple):
    """The sum over the groups, and where each group's result lay."""

    output: torch.Tensor
    """float32 [T, H]"""
    addresses: tuple[int, ...]


class GroupRunner(Protocol):
    """What is put to the test."""

    tolerance: float
    """How far a row may part from the reference, relative to its length: the rounding of its type."""

    def run(
        self,
        problem: Problem,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *,
        groups: int,
        alias: str,
    ) -> Summed:
        """The layer for `x` [T, H], its experts in `groups` parts of consecutive ids."""


def groups_of(ids: torch.Tensor, experts: int, groups: int) -> list[torch.Tensor]:
    """`ids` [T, K] once a group, -1 where an id belongs to another one."""
    each = experts // groups
    return [torch.where(ids // each == group, ids, -1) for group in range(groups)]


def add_up(run: Kernel, parts: Sequence[torch.Tensor], x: torch.Tensor, alias: str) -> Summed:
    """Add the results of `run(x, ids)` as a caller would who takes them for tensors of his own."""
    if alias == "results":
        results = [run(x, part) for part in parts]  # [T, H] each
        return Summed(torch.stack(results).sum(0), tuple(one.data_ptr() for one in results))
    total = run(x, parts[0])  # [T, H]
    addresses = [total.data_ptr()]
    for part in parts[1:]:
        result = run(x, part)  # [T, H]
        addresses.append(result.data_ptr())
        total += result
    return Summed(total, tuple(addresses))


class SharedWorkspace:
    """A kernel whose output is a view of a workspace that all its calls share, or of its own input."""

    tolerance = 1e-4

    def run(
        self,
        problem: Problem,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *,
        groups: int,
        alias: str,
    ) -> Summed:
        here = {name: one.to(problem.device) for name, one in problem.weights.items()}
        workspace = torch.empty(x.numel(), device=x.device)
        parts = groups_of(ids, here["w13"].shape[0], groups)

        def kernel(hidden: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            output = hidden if alias == "input" else workspace.view_as(hidden)  # [T, H]
            return output.copy_(compute(here, hidden, weights, part))

        if alias == "input":
            return _through_input(kernel, parts, x)
        return add_up(kernel, parts, x, alias)


def _through_input(kernel: Kernel, parts: Sequence[torch.Tensor], x: torch.Tensor) -> Summed:
    """Each result is copied at once, so the sum is safe; the input of the next group is not."""
    hidden, total = x.clone(), torch.zeros_like(x)  # [T, H] each
    addresses = []
    for part in parts:
        result = kernel(hidden, part)  # [T, H]
        addresses.append(result.data_ptr())
        total += result
    return Summed(total, tuple(addresses))


class OwnSum:
    """Ours: `ExpertCache.groups`, and a layer that adds to a buffer of the caller's and has no workspace."""

    tolerance = 1e-4

    def run(
        self,
        problem: Problem,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *,
        groups: int,
        alias: str,
    ) -> Summed:
        experts = problem.weights["w13"].shape[0]
        cache = ExpertCache(problem.weights, experts // groups, device=problem.device)
        total = torch.zeros_like(x)  # [T, H]
        addresses = []
        for part in cache.groups(ids):
            moe_forward(x, part.weights, part.slot_ids, weights, out=total)
            addresses.append(total.data_ptr())
        return Summed(total, tuple(addresses))


def observe(parameters: WorkspaceAliasingParameters, device: str, implementation: GroupRunner) -> Observation:
    """The sum over groups against one call with all experts."""
    draw = torch.Generator().manual_seed(parameters.seed)
    problem = Problem.make(parameters.experts, _HIDDEN, _INTERMEDIATE, device, parameters.seed)
    logits = torch.randn(parameters.tokens, parameters.experts, generator=draw)  # [T, E]
    weights, ids = (one.to(device) for one in logits.softmax(1).topk(parameters.top_k))  # [T, K] each
    x = problem.tokens(parameters.tokens, seed=parameters.seed)  # [T, H]
    right = problem.right(x, weights, ids.int())  # [T, H]
    summed = implementation.run(
        problem, x.clone(), weights, ids.int(), groups=parameters.groups, alias=parameters.alias
    )
    found = differ(summed.output, right, implementation.tolerance)
    first = summed.addresses[0]
    return Observation(
        {
            "rows": parameters.tokens,
            "wrong_rows": int(found.rows.sum()),
            "worst_error": found.worst,
            "same_memory": sum(one == first for one in summed.addresses),
            "calls": len(summed.addresses),
        }
    )
