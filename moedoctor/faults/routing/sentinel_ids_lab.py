"""The lab of MD016: three ways to index with an id of -1, restated, the same without, and real MoE paths.

In the restated ones the expert outputs are small whole numbers and the weights eighths, so a row is either
right or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from moedoctor.bench.moe import backends as registry
from moedoctor.bench.moe.parity import poison
from moedoctor.faults.routing.duplicate_ids_lab import compute_output
from moedoctor.faults.routing.sentinel_ids import IDS, SentinelIdsParameters
from moedoctor.fixes.expert_ids import find_local_ids, replace_sentinels
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_layer import Problem, compute_expected, make_layer, make_problem
from moedoctor.results import Case, Evidence, UnavailableError
from moedoctor.upstream.releases.installed import align_block_size, describe_installed_release

_STALE = 64.0
"""The value in a buffer that an earlier call left."""


class Batch(NamedTuple):
    ids: torch.Tensor
    """int32 [T, K], -1 for empty pairs"""
    weights: torch.Tensor
    """float32 [T, K]; those of empty pairs are not 0"""
    expert_map: torch.Tensor
    """int64 [E]: the local id of each expert, or -1"""


class Used(NamedTuple):
    experts: torch.Tensor
    """int64 [T, K]: the local expert that each pair was given to, -1 for none"""
    sums: torch.Tensor
    """float32 [T]"""


def model(case: Case, parameters: SentinelIdsParameters, release: None) -> Evidence:
    """Count the rows whose sum is not that over their real pairs, and the empty pairs given to an expert."""
    batch = make_batch(parameters)
    used = (FAULTY if case.subject == "faulty" else FIXED)[parameters.use](batch)
    is_empty = batch.ids < 0  # [T, K]
    local = torch.where(is_empty, -1, batch.expert_map[batch.ids.clamp_min(0).long()])  # [T, K]
    given = is_empty & (used.experts >= 0)  # [T, K]
    return {
        "rows": parameters.tokens,
        "rows_wrong": int((used.sums != _sum_weighted(batch, local)).sum()),
        "empty_slots": int(is_empty.sum()),
        "empty_slots_given_to_an_expert": int(given.sum()),
        "expert": int(used.experts[given][0]) if bool(given.any()) else None,
    }


def make_batch(parameters: SentinelIdsParameters) -> Batch:
    """Distinct ids, then -1 as `parameters.slots` says. Drawn on the CPU."""
    draw = torch.Generator().manual_seed(parameters.seed)
    tokens, experts, top_k = parameters.tokens, parameters.experts, parameters.top_k
    ids = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :top_k].int()  # [T, K]
    if parameters.slots == "padding":
        ids[-max(tokens // 4, 1) :] = -1
    else:
        ids[:, top_k - 1] = -1
    weights = (torch.arange(ids.numel()).reshape(ids.shape) % 4 + 1) / 8  # [T, K]
    local = experts // parameters.ranks
    first = local * parameters.rank
    expert_map = torch.full((experts,), -1)  # [E]
    expert_map[first : first + local] = torch.arange(local)
    return Batch(ids, weights, expert_map)


# --- Faulty: the id is an index as it is, and Python and torch take -1 for the last entry ----------------
# --- Fixed: empty pairs are recognized before anything is indexed ----------------------------------------


def _sum_by_local_id(batch: Batch, local: torch.Tensor) -> Used:
    return Used(local, _sum_weighted(batch, local))


def _gather_real(batch: Batch) -> Used:
    ids, weights = replace_sentinels(batch.ids, batch.weights)  # [T, K] each
    sums = _sum_weighted(batch._replace(ids=ids, weights=weights), ids.long())  # [T]
    return Used(torch.where(weights > 0, ids.long(), -1), sums)


def _sum_by_row(batch: Batch, *, unwritten: int) -> Used:
    """Read the map from pairs to sorted rows, in which empty pairs keep `unwritten`; -1 is not read."""
    rows, row_of_pair = _sort_rows(batch, fill=unwritten)
    values = torch.where(row_of_pair >= 0, rows[row_of_pair], 0.0)  # [T, K]
    return Used(batch.ids.long(), (values * batch.weights).sum(1))


FAULTY: dict[str, Callable[[Batch], Used]] = {
    "expert_map": lambda batch: _sum_by_local_id(batch, batch.expert_map[batch.ids.long()]),
    "gather": lambda batch: _sum_by_local_id(batch, batch.ids.long() % len(batch.expert_map)),
    "row_map": partial(_sum_by_row, unwritten=0),
}
FIXED: dict[str, Callable[[Batch], Used]] = {
    "expert_map": lambda batch: _sum_by_local_id(batch, find_local_ids(batch.ids, batch.expert_map).long()),
    "gather": _gather_real,
    "row_map": partial(_sum_by_row, unwritten=-1),
}


def _sum_weighted(batch: Batch, local: torch.Tensor) -> torch.Tensor:
    """float32 [T]: the sum over pairs whose `local` id [T, K] is not negative."""
    token = torch.arange(local.shape[0])[:, None]  # [T, 1]
    return torch.where(local >= 0, compute_output(token, local) * batch.weights, 0.0).sum(1)


def _sort_rows(batch: Batch, *, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert outputs in sorted order, float32 [T * K], and each pair's row, int64 [T, K], `fill` before."""
    used = (batch.ids >= 0).nonzero()  # [N, 2]
    order = used[batch.ids[used[:, 0], used[:, 1]].argsort(stable=True)]  # [N, 2], by expert
    token, place = order.unbind(1)  # [N] each
    rows = torch.full((batch.ids.numel(),), _STALE)  # [T * K]
    rows[: len(order)] = compute_output(token, batch.ids[token, place])
    row_of_pair = torch.full(batch.ids.shape, fill)  # [T, K]
    row_of_pair[token, place] = torch.arange(len(order))
    return rows, row_of_pair


# --- Measurements of the claims: real MoE paths, compared with the reference, which skips -1 ------------

_SHAPE = LayerShape(512, 256, 16, 4)
_TOKENS = 48
_RELATIVE = 0.15
"""A row is right if its relative error is below this. FP8 activations cause up to 0.05, one expert of four
too many or too few 0.3 and more."""
_BLOCK = 16
_COMPILING, _RUNNING = 240.0, 10.0
"""Seconds that a first call and any other may take."""


def measure_path(unit: str, device: str) -> dict[str, Any]:
    """Count the wrong rows of a unit of `units_of`. Raises UnavailableError if the path is not here."""
    path, _, ids = unit.partition(", ")
    variant = next((variant for variant in registry.ALL if variant.label == path), None)
    if variant is None:
        raise UnavailableError(f"there is no path {path}")
    backend = registry.create(variant)
    reason = backend.unavailable(_SHAPE, device)
    if reason is not None:
        raise UnavailableError(reason)
    layer = make_layer(_SHAPE, variant.quantization, device=device)
    prepared = backend.prepare(layer)
    problem = make_problem(layer, _TOKENS, variant.activations, device=device)
    prepared(problem.x, problem.topk_weights, problem.topk_ids)  # compiles, which may take a minute
    _finish(device, _COMPILING)
    problem = replace(problem, topk_ids=_insert_sentinels(problem.topk_ids)[ids])
    poison(prepared, problem.x)
    out = prepared(problem.x, problem.topk_weights, problem.topk_ids).float()  # [T, H]
    _finish(device, _RUNNING)
    row = _count_rows(problem, out, compute_expected(problem, variant.activations, out))
    return {"row": row, "vllm": describe_installed_release()}


def measure_alignment(device: str) -> dict[str, Any]:
    """vLLM's alignment kernel, alone and with the map of an expert-parallel rank that has the last expert."""
    experts, half = _SHAPE.experts, _SHAPE.experts // 2
    draw = torch.Generator().manual_seed(0)
    order = torch.rand(_TOKENS, experts, generator=draw).argsort(1)  # [T, E]
    topk_ids = order[:, : _SHAPE.top_k].int().to(device)  # [T, K]
    last_rank = torch.full((experts,), -1, dtype=torch.int32, device=device)  # [E]
    last_rank[half:] = torch.arange(experts - half, device=device)
    rows = []
    for name, ids in _insert_sentinels(topk_ids).items():
        for parallel, expert_map, first in (("", None, 0), (", last rank of two", last_rank, half)):
            pairs, owners = align_block_size(ids, _BLOCK, experts, expert_map)  # [B, block], [B]
            real = pairs[owners >= 0].flatten()  # pairs that a real expert computes
            taken = torch.zeros(ids.numel(), dtype=torch.bool, device=device)  # [T * K]
            taken[real[(real >= 0) & (real < ids.numel())].long()] = True
            flat = ids.flatten()  # [T * K]
            rows.append(
                {
                    "call": f"{name}{parallel}",
                    "empty_slots": int((flat < 0).sum()),
                    "empty_slots_in_blocks": int((taken & (flat < 0)).sum()),
                    "slots_lost": int(((flat >= first) & ~taken).sum()),
                }
            )
    return {"rows": rows, "vllm": describe_installed_release()}


def _insert_sentinels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """`ids` [T, K] as they are, with a quarter of the rows -1, and with -1 once in each row."""
    padding, dropped = ids.clone(), ids.clone()
    padding[-ids.shape[0] // 4 :] = -1
    dropped[:, -1] = -1
    return dict(zip(IDS, (ids, padding, dropped), strict=True))


def _finish(device: str, seconds: float) -> None:
    """Wait for the GPU. Raises TimeoutError if its kernels do not end, as one may that follows -1."""
    if torch.device(device).type != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > until:
            raise TimeoutError(f"its kernels had not ended after {seconds:g} s")
        time.sleep(0.001)


def _count_rows(problem: Problem, out: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    distance = (out - expected).norm(dim=1)  # [T]
    wrong = ~(distance <= _RELATIVE * expected.norm(dim=1) + 1e-6)  # [T]; NaN is wrong
    with_empty = (problem.topk_ids < 0).any(1)  # [T]
    figures: dict[str, Any] = {
        "rows": out.shape[0],
        "rows_wrong": int(wrong.sum()),
        "rows_without_empty_slots_wrong": int((wrong & ~with_empty).sum()),
        "rows_not_finite": int((~out.isfinite().all(1)).sum()),
    }
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        norms = {"norm": float(out[row].norm()), "expected_norm": float(expected[row].norm())}
        figures["example"] = {"row": row, **norms}
    return figures
