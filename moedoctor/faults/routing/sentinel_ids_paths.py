"""MoE paths of this machine with -1 in topk_ids, held against the reference, which skips such slots."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from moedoctor.bench.backends import registry
from moedoctor.bench.moe.parity import poison
from moedoctor.faults.routing.sentinel_ids_claims import IDS
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_layer import Problem, expected_output, make_layer, make_problem
from moedoctor.results import UnavailableError

_SHAPE = LayerShape(512, 256, 16, 4)
_TOKENS = 48
_RELATIVE = 0.15
"""A row is right where its distance from the reference is below this part of the reference's norm. FP8
activations part by up to 0.05, one expert of four too many or too few by 0.3 and more."""
_BLOCK = 16
_COMPILING, _RUNNING = 240.0, 10.0
"""Seconds that a first call and any other may take."""


def path(label: str, ids: str, device: str) -> dict[str, Any]:
    """Rows right and wrong of the path `label`, given this kind of ids: one of `IDS`.

    Raises UnavailableError where there is no such path here.
    """
    variant = next((one for one in registry.ALL if one.label == label), None)
    if variant is None:
        raise UnavailableError(f"there is no path {label}")
    backend = registry.create(variant)
    why = backend.unavailable(_SHAPE, device)
    if why is not None:
        raise UnavailableError(why)
    layer = make_layer(_SHAPE, variant.quantization, device=device)
    prepared = backend.prepare(layer)
    problem = make_problem(layer, _TOKENS, variant.activations, device=device)
    prepared(problem.x, problem.topk_weights, problem.topk_ids)  # compiles, which may take a minute
    _finish(device, _COMPILING)
    one = replace(problem, topk_ids=_ids(problem.topk_ids)[ids])
    poison(prepared, one.x)
    out = prepared(one.x, one.topk_weights, one.topk_ids).float()  # [T, H]
    _finish(device, _RUNNING)
    return _figures(one, out, expected_output(one, variant.activations))


def align(device: str) -> list[dict[str, Any]]:
    """vLLM's alignment kernel, alone and with the map of an expert-parallel rank that has the last expert."""
    from moedoctor.upstream.releases.sentinel_probe import align_block_size

    experts, rows = _SHAPE.experts, []
    draw = torch.Generator().manual_seed(0)
    ids = (
        torch.rand(_TOKENS, experts, generator=draw).argsort(1)[:, : _SHAPE.top_k].int().to(device)
    )  # [T, K]
    expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)  # [E]
    expert_map[experts // 2 :] = torch.arange(experts - experts // 2, device=device)
    for name, given in _ids(ids).items():
        for parallel, mapping in (("", None), (", last rank of two", expert_map)):
            slots, blocks = align_block_size(given, _BLOCK, experts, mapping)  # [B, block], [B]
            real = slots[blocks >= 0].flatten()  # slots that a real expert computes
            real = real[(real >= 0) & (real < given.numel())].long()
            taken = torch.zeros(given.numel(), dtype=torch.bool, device=device)  # [T * K]
            taken[real] = True
            flat = given.flatten()  # [T * K]
            local = (flat >= 0) if mapping is None else (flat >= experts // 2)  # [T * K]
            rows.append(
                {
                    "call": f"{name}{parallel}",
                    "empty_slots": int((flat < 0).sum()),
                    "empty_slots_in_blocks": int((taken & (flat < 0)).sum()),
                    "slots_lost": int((local & ~taken).sum()),
                }
            )
    return rows


def _ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """`ids` [T, K] as they are, with a quarter of the rows -1, and with one slot of each row -1."""
    padding, dropped = ids.clone(), ids.clone()
    padding[-ids.shape[0] // 4 :] = -1
    dropped[:, -1] = -1
    return dict(zip(IDS, (ids, padding, dropped), strict=True))


def _finish(device: str, seconds: float) -> None:
    """Wait for the GPU; raises TimeoutError where its kernels do not end, as one may that follows -1."""
    if torch.device(device).type != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > until:
            raise TimeoutError(f"its kernels had not ended after {seconds:g} s")
        time.sleep(0.001)


def _figures(problem: Problem, out: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
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
        figures["example"] = {
            "row": row,
            "norm": float(out[row].norm()),
            "expected_norm": float(expected[row].norm()),
        }
    return figures
