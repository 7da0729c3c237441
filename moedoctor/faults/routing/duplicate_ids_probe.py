"""Measurements of MD011 that need no process for each call: they run a release's own code in the child."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moedoctor.faults.routing.duplicate_ids import DuplicateIdsParameters
from moedoctor.faults.routing.duplicate_ids_rows import (
    GARBAGE,
    Implementation,
    entries_as_before,
    make_ids,
    map_figures,
    observe,
)
from moedoctor.upstream.flashinfer.probe import FlashInferProbe

_TOKENS = (1, 255, 256, 257, 4096)
_EXPERTS = (128, 510, 511, 512)
_TOP_K = (8, 10)
_BOUNDARY_TOKENS = (1, 32, 64, 128, 129, 256, 257)
_MOST_EXPERTS = 1024


def maps(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """The map of each shape and each kind of ids: who made it, and which entries were not written."""
    code, rows = _load(unit, device, sources), []
    for tokens, experts, top_k in product(_TOKENS, _EXPERTS, _TOP_K):
        for kind, start in (("one_expert", 0), ("one_repeat", 0), ("distinct", 0), ("one_repeat", 1)):
            # A start other than 0: the second of two ranks, so that half of the ids are not local.
            ranks = 2 if start else 1
            shape = {"tokens": tokens, "experts": experts * ranks, "top_k": top_k}
            point = DuplicateIdsParameters.model_validate(
                {**shape, "ids": kind, "ranks": ranks, "rank": start}
            )
            ids = make_ids(point).to(code.device)  # [T, K]
            made = code.build_maps(ids, experts, start=experts * start, memory=GARBAGE)
            figures = {
                **map_figures(point, ids, made),
                "entries_as_before": entries_as_before(point, ids, made, GARBAGE),
            }
            rows.append(
                {
                    "path": "fused" if made.fused else "three-step",
                    "experts": experts,
                    "top_k": top_k,
                    "ids": kind,
                    "start_expert": experts * start,
                    **figures,
                }
            )
    return rows


def boundary(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """By number of tokens: the most local experts for which the fused prologue makes the map; 0 for none."""
    code = _load(unit, device, sources)
    return [{"tokens": tokens, "most_experts": _most_experts(code, tokens)} for tokens in _BOUNDARY_TOKENS]


def fused_sums(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sums of repeated ids where the fused prologue makes the map."""
    shapes = ((1, 128, 8), (128, 128, 8), (256, 128, 8), (64, 64, 6))
    return [
        _figures(_load(unit, device, sources), point, guard=False)
        for point in _points(shapes, ids=("one_expert", "one_repeat"))
    ]


def distinct(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sums of ids of which none is repeated."""
    shapes = ((300, 128, 8), (1, 512, 10), (128, 128, 8))
    return [
        _figures(_load(unit, device, sources), point, guard=False)
        for point in _points(shapes, ids=("distinct",), finalizes=("normal", "no_filling"), ranks=(0, 1))
    ]


def sentinels(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sums where half of the slots of every other token hold -1."""
    shapes = ((300, 128, 8), (300, 512, 10), (128, 128, 8))
    return [
        _figures(_load(unit, device, sources), point, guard=False)
        for point in _points(shapes, ids=("sentinel",), finalizes=("normal", "no_filling"))
    ]


def deduplicated(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sums of repeated ids that `moedoctor.fixes.routing.deduplicate` has made distinct before."""
    shapes = ((300, 128, 8), (1, 512, 10), (256, 512, 8))
    return [
        _figures(_load(unit, device, sources), point, guard=True)
        for point in _points(
            shapes, ids=("one_expert", "one_repeat"), finalizes=("normal", "no_filling"), ranks=(0, 1)
        )
    ]


def guard_cost(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """Microseconds of `validate_expert_ids` and `deduplicate` in a CUDA graph, at 128 tokens of 8 experts."""
    from moedoctor.bench.timing import graph_time
    from moedoctor.fixes.expert_ids import ExpertIdFlags, deduplicate, validate_expert_ids

    ids = torch.rand(128, 128, device=device).argsort(1)[:, :8].int()  # [T, K]
    weights = torch.rand(128, 8, device=device)  # [T, K]
    flags = ExpertIdFlags(device)
    looked = graph_time(lambda: validate_expert_ids(ids, 128, flags=flags))
    made = graph_time(lambda: deduplicate(ids, weights))
    flags.raise_if_found()
    return [
        {
            "shape": "128 x 8",
            "validate_us": looked.median,
            "validate_us_p20": looked.p20,
            "validate_us_p80": looked.p80,
            "deduplicate_us": made.median,
            "deduplicate_us_p20": made.p20,
            "deduplicate_us_p80": made.p80,
        }
    ]


def _points(
    shapes: tuple[tuple[int, int, int], ...],
    *,
    ids: tuple[str, ...],
    finalizes: tuple[str, ...] = ("normal",),
    ranks: tuple[int, ...] = (0,),
) -> Iterator[DuplicateIdsParameters]:
    memories = ("garbage", "earlier", "zeros", "minus_one")
    for (tokens, experts, top_k), kind, memory, finalize, rank in product(
        shapes, ids, memories, finalizes, ranks
    ):
        parallel = 2 if rank or finalize == "no_filling" else 1
        yield DuplicateIdsParameters.model_validate(
            {
                "tokens": tokens,
                "experts": experts * parallel,
                "top_k": top_k,
                "ids": kind,
                "memory": memory,
                "finalize": finalize,
                "ranks": parallel,
                "rank": rank,
            }
        )


def _figures(code: FlashInferProbe, point: DuplicateIdsParameters, *, guard: bool) -> dict[str, Any]:
    seen = observe(point, Implementation(code, guard)).evidence
    wanted = (
        "path",
        "rows",
        "rows_right",
        "rows_with_the_repeat_dropped",
        "rows_wrong",
        "rows_out_of_bounds",
    )
    shape = point.model_dump(exclude={"seed"})
    return {**shape, **{key: seen[key] for key in wanted}}


def _most_experts(code: FlashInferProbe, tokens: int) -> int:
    """The last number of experts that is still taken, by halving: taken below, declined above."""
    low, high = 0, _MOST_EXPERTS + 1
    while high - low > 1:
        middle = (low + high) // 2
        ids = torch.zeros(tokens, 8, dtype=torch.int32, device=code.device)  # [T, K]
        if code.build_maps(ids, middle, memory=0).fused:
            low = middle
        else:
            high = middle
    return low


def _load(unit: str, device: str, sources: Mapping[str, str]) -> FlashInferProbe:
    if unit == "installed":
        return FlashInferProbe.installed(device)
    return FlashInferProbe.named(unit.partition("@")[2], Path(sources[unit]), device)
