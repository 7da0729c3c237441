"""MD019 in the child: groups of experts through one workspace, through vLLM's kernel, and through ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moedoctor.faults.cache.workspace_aliasing import RESULTS, WorkspaceAliasingParameters
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import Problem, differ
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.results import Case, Evidence, UnavailableError

_HIDDEN, _INTERMEDIATE = 128, 64
_FLOAT32, _BFLOAT16 = 1e-4, 0.03
"""Relative errors that rounding explains."""

Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states [T, H], topk_ids [T, K]) -> [T, H], maybe a view of memory that the next call overwrites."""


class Call(NamedTuple):
    problem: Problem
    x: torch.Tensor
    """float32 [T, H]"""
    topk_weights: torch.Tensor
    """float32 [T, K]"""
    topk_ids: torch.Tensor
    """int32 [T, K]"""
    groups: int
    alias: str

    @property
    def parts(self) -> list[torch.Tensor]:
        """`topk_ids` [T, K] once a group of consecutive experts, with -1 for the experts of other groups."""
        size = len(self.problem.weights["w13"]) // self.groups
        return [torch.where(self.topk_ids // size == each, self.topk_ids, -1) for each in range(self.groups)]


Summed = tuple[torch.Tensor, list[int]]
"""The sum over the groups, float32 [T, H], and the address of each group's result."""


def add_up(run: Kernel, parts: Sequence[torch.Tensor], x: torch.Tensor, alias: str) -> Summed:
    """Add the results of `run(x, part)` [T, H] like a caller who takes them for tensors of its own."""
    results: list[torch.Tensor] = []  # [T, H] each
    addresses = []
    for part in parts:
        result = run(x, part)  # [T, H]
        addresses.append(result.data_ptr())
        # A result that shares memory with the input is copied at once: the next input is wrong, not the sum.
        results.append(result.clone() if alias == "input" else result)
        if alias == "sum" and len(results) > 1:
            results[0] += results.pop()
    return torch.stack(results).sum(0), addresses


def share_workspace(call: Call) -> Summed:
    """Run a kernel whose output is a view of a workspace that all its calls share, or of its own input."""
    weights = {name: tensor.to(call.x.device) for name, tensor in call.problem.weights.items()}
    workspace = torch.empty_like(call.x)  # [T, H]

    def kernel(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        output = x if call.alias == "input" else workspace  # [T, H]
        return output.copy_(forward(x, MoeWeights.from_tensors(weights), call.topk_weights, part))

    return add_up(kernel, call.parts, call.x.clone(), call.alias)


def own_sum(call: Call) -> Summed:
    """Run ours: `ExpertCache.groups`, and a layer that adds to the caller's buffer and has no workspace."""
    experts = len(call.problem.weights["w13"])
    cache = ExpertCache(call.problem.weights, experts // call.groups, device=call.problem.device)
    total = torch.zeros_like(call.x)  # [T, H]
    addresses = []
    for part in cache.groups(call.topk_ids):
        moe_forward(call.x, part.weights, part.slot_ids, call.topk_weights, out=total)
        addresses.append(total.data_ptr())
    return total, addresses


def run_vllm_kernel(call: Call, *, unfinished: bool = False) -> Summed:
    """Run vLLM's modular kernel in bfloat16; `unfinished` takes each result before the kernel copies it.

    Raises UnavailableError.
    """
    from moedoctor.upstream.moe_backends.modular_moe import build_modular_kernel

    if call.alias == "input":
        raise UnavailableError("vLLM writes into its input only with torch before 2.9")
    w13, w2 = (call.problem.weights[name].to(call.x.device, torch.bfloat16) for name in ("w13", "w2"))
    apply = build_modular_kernel(w13, w2, top_k=call.topk_ids.shape[1], unfinished=unfinished)

    def kernel(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        topk_weights = torch.where(part >= 0, call.topk_weights, 0.0)  # [T, K]
        return apply(x, topk_weights, call.topk_ids)

    output, addresses = add_up(kernel, call.parts, call.x.to(torch.bfloat16), call.alias)
    return output.float(), addresses


def model(case: Case, parameters: WorkspaceAliasingParameters, release: object) -> Evidence:
    """Compute with the shared workspace, or with ours."""
    return measure(parameters, case.device, share_workspace if case.subject == "faulty" else own_sum)


def kernel(case: Case, parameters: WorkspaceAliasingParameters, release: object) -> Evidence:
    """Compute with the installed vLLM's modular kernel."""
    return measure(parameters, case.device, run_vllm_kernel, _BFLOAT16)


def measure(
    parameters: WorkspaceAliasingParameters,
    device: str,
    run: Callable[[Call], Summed],
    tolerance: float = _FLOAT32,
) -> Evidence:
    """Compare the sum over groups with one call that has all experts."""
    draw = torch.Generator().manual_seed(parameters.seed)
    problem = Problem.make(parameters.experts, _HIDDEN, _INTERMEDIATE, device, parameters.seed)
    logits = torch.randn(parameters.tokens, parameters.experts, generator=draw)  # [T, E]
    topk_weights, topk_ids = (part.to(device) for part in logits.softmax(1).topk(parameters.top_k))
    topk_ids = topk_ids.int()  # [T, K]
    x = problem.draw_tokens(parameters.tokens, seed=parameters.seed)  # [T, H]
    expected = problem.compute_expected(x, topk_weights, topk_ids)  # [T, H]
    call = Call(problem, x.clone(), topk_weights, topk_ids, parameters.groups, parameters.alias)
    output, addresses = run(call)
    difference = differ(output, expected, tolerance)
    return {
        "rows": parameters.tokens,
        "wrong_rows": int(difference.rows.sum()),
        "worst_error": difference.worst,
        "same_memory": addresses.count(addresses[0]),
        "calls": len(addresses),
    }


def measure_modular_kernel(device: str) -> list[dict[str, Any]]:
    """Measure the installed vLLM's kernel once a group: what it returns, and what it copies that from."""
    rows = []
    for result, unfinished in RESULTS.items():
        run = functools.partial(run_vllm_kernel, unfinished=unfinished)
        for groups in (2, 4):
            parameters = WorkspaceAliasingParameters.model_validate({"groups": groups})
            evidence = measure(parameters, device, run, _BFLOAT16)
            counts = {key: evidence[key] for key in ("wrong_rows", "rows", "same_memory")}
            rows.append({"what": result, "groups": groups, **counts})
    return rows
