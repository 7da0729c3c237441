"""The lab of MD011: ids with repeats through routing maps and finalize, and which sums are right.

The maps and finalize are FlashInfer's own, compiled, or restated here in torch. The expert outputs are small
whole numbers and the weights eighths, so every sum is exact and a row is either right or not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moedoctor.diagnose.capsule.computation import find_repeats
from moedoctor.faults.routing.duplicate_ids import DuplicateIdsParameters
from moedoctor.fixes.expert_ids import deduplicate
from moedoctor.results import Case, Evidence
from moedoctor.upstream.flashinfer.probe import FlashInferProbe, RoutingMaps, Share

HIDDEN = 64
GARBAGE = 0x7F7F7F7F
_STALE = 64.0
"""The value of expert rows that this call did not write."""
_GUARD = 8
"""Rows before and after the expert rows, so that a read a little out of bounds is noticed and not fatal."""
_OUTSIDE = 2.0**40
"""The value of those rows: with the smallest weight, an eighth, still more than any sum of rows within."""
_MEMORY = {"garbage": GARBAGE, "zeros": 0, "minus_one": -1}


def model(case: Case, parameters: DuplicateIdsParameters, release: None) -> Evidence:
    """Observe the restated sort."""
    return observe(parameters, ThreeStepModel(), guard=case.subject == "fixed")


def kernel(case: Case, parameters: DuplicateIdsParameters, release: FlashInferProbe | None) -> Evidence:
    """Observe a release's own code, or that of the installed FlashInfer."""
    code = release or FlashInferProbe.installed(case.device)
    return observe(parameters, code, guard=case.subject == "fixed")


def observe(parameters: DuplicateIdsParameters, code: Any, *, guard: bool = False) -> Evidence:
    """Build the maps, finalize, and count the rows whose sum is right.

    `code` is a `ThreeStepModel` or a `FlashInferProbe`. With `guard` the ids are made distinct first.
    """
    share = find_share(parameters)
    ids = make_ids(parameters).to(code.device)  # [T, K]
    eighths = torch.arange(1, ids.numel() + 1).reshape(ids.shape) % 4 + 1  # [T, K]
    weights = (eighths / 8).to(code.device)  # [T, K]
    expected = _compute_sums(share, ids, weights)  # [T, H]
    without_repeats = _compute_sums(share, ids, weights.masked_fill(find_repeats(ids), 0.0))  # [T, H]
    if guard:
        ids, weights = deduplicate(ids, weights)
    maps = code.build_maps(ids, share, _prepare_memory(parameters, code))
    evidence = {"path": "fused" if maps.fused else "three-step", **map_figures(share, ids, maps)}
    buffer, rows = _make_expert_rows(ids, maps)
    out = torch.full((parameters.tokens, HIDDEN), float("nan"), dtype=torch.bfloat16, device=code.device)
    try:
        code.finalize(maps, rows, ids, weights.float(), out, share, parameters.finalize == "no_filling")
    except ReadOutOfBoundsError as error:
        return {**evidence, "rows": parameters.tokens, "entries_out_of_bounds": error.entries}
    del buffer  # it had to live until here, because finalize may read beside the rows
    return {**evidence, **_count_rows(parameters, ids, out, expected, without_repeats)}


def find_share(parameters: DuplicateIdsParameters) -> Share:
    return Share(parameters.experts // parameters.ranks, parameters.ranks, parameters.rank)


def make_ids(parameters: DuplicateIdsParameters) -> torch.Tensor:
    """int32 [T, K]: distinct ids, then repeated or emptied as `parameters.ids` says."""
    draw = torch.Generator().manual_seed(parameters.seed)
    tokens, experts, top_k = parameters.tokens, parameters.experts, parameters.top_k
    ids = torch.rand(tokens, experts, generator=draw).argsort(dim=1)[:, :top_k].int()  # [T, K]
    share = find_share(parameters)
    if parameters.ids == "one_expert":
        ids = torch.full_like(ids, share.start)
    elif parameters.ids == "one_repeat":
        ids[:, 0] = share.start + ids[:, 0] % share.experts  # a local expert
        ids[:, 1] = ids[:, 0]
    elif parameters.ids == "sentinel":
        ids[::2, top_k // 2 :] = -1
    return ids.contiguous()


def map_figures(share: Share, ids: torch.Tensor, maps: RoutingMaps) -> dict[str, Any]:
    """Count local pairs, how many of them were sorted, and the entries of the map that were not written."""
    local = _find_local(share, ids).t().reshape(-1)  # [K * T]
    used = int(maps.first_offset[-1])
    written = torch.zeros_like(local)  # [K * T]
    written[maps.row_of_permuted[:used].long()] = True
    return {
        "local_slots": int(local.sum()),
        "sorted_rows": used,
        "repeated_slots": int((find_repeats(ids).t().reshape(-1) & local).sum()),
        "unwritten_entries": int((local & ~written).sum()),
        "tokens": ids.shape[0],
    }


def count_entries_as_before(share: Share, ids: torch.Tensor, maps: RoutingMaps, memory: int) -> int:
    """Count the local pairs whose entry of the map still holds `memory`, which was there before."""
    local = _find_local(share, ids).t().reshape(-1)  # [K * T]
    return int((local & (maps.permuted_of_row == memory)).sum())


def _prepare_memory(parameters: DuplicateIdsParameters, code: Any) -> Any:
    """Return the content of the maps before the call."""
    if parameters.memory != "earlier":
        return _MEMORY[parameters.memory]
    healthy = parameters.model_copy(update={"ids": "distinct", "seed": parameters.seed + 1})
    ids = make_ids(healthy).to(code.device)  # [T, K]
    return code.build_maps(ids, find_share(parameters), 0)


def _find_local(share: Share, ids: torch.Tensor) -> torch.Tensor:
    """Return bool [T, K]: True if this rank has the pair's expert."""
    own = ids - share.start  # [T, K]
    return (own >= 0) & (own < share.experts)


def compute_output(token: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """The output of expert `expert` for token `token`: a whole number from 1 to 13."""
    return ((token * 7 + expert * 3) % 13 + 1).float()


def _compute_sums(share: Share, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """bf16 [T, H]: each token's sum over this rank's experts."""
    token = torch.arange(ids.shape[0], device=ids.device)[:, None]  # [T, 1]
    products = weights.float() * compute_output(token, ids)  # [T, K]
    values = torch.where(_find_local(share, ids), products, 0.0)  # [T, K]
    return values.sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16()


def _make_expert_rows(ids: torch.Tensor, maps: RoutingMaps) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert outputs in sorted order, as the GEMMs would leave them: the buffer, and its rows [R, H]."""
    tokens, size = ids.shape[0], ids.numel()
    buffer = torch.full((size + 2 * _GUARD, HIDDEN), _OUTSIDE, dtype=torch.bfloat16, device=ids.device)
    rows = buffer[_GUARD : _GUARD + size]  # [R, H]
    rows.fill_(_STALE)
    used = int(maps.first_offset[-1])
    source = maps.row_of_permuted[:used].long()  # [used]: k * T + t
    token, place = source % tokens, source // tokens  # [used] each
    rows[:used] = compute_output(token, ids[token, place].long())[:, None].bfloat16()
    return buffer, rows


def _count_rows(
    parameters: DuplicateIdsParameters,
    ids: torch.Tensor,
    out: torch.Tensor,
    expected: torch.Tensor,
    without_repeats: torch.Tensor,
) -> dict[str, Any]:
    counted = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)  # [T]
    if parameters.finalize == "no_filling":
        counted = _find_local(find_share(parameters), ids).any(1)  # the kernel leaves other rows as they were
    right = (out == expected).all(1) & counted  # [T]
    dropped = (out == without_repeats).all(1) & ~right & counted  # [T]
    outside = (out.float().abs() >= _OUTSIDE / 8).all(1) & counted  # [T]
    wrong = counted & ~right & ~dropped & ~outside  # [T]
    figures: dict[str, Any] = {
        "rows": int(counted.sum()),
        "rows_right": int(right.sum()),
        "rows_with_the_repeat_dropped": int(dropped.sum()),
        "rows_wrong": int(wrong.sum()),
        "rows_out_of_bounds": int(outside.sum()),
        "rows_not_finite": int((~out.isfinite().all(1) & counted).sum()),
    }
    if bool((wrong | outside).any()):
        row = int((wrong | outside).nonzero()[0])
        figures["example"] = {"row": row, "sum": float(out[row, 0]), "right": float(expected[row, 0])}
    return figures


# --- The restated code ----------------------------------------------------------------------------------

FUSED_TOP_K = (1, 2, 4, 6, 8)
"""The numbers of experts a token for which there is a fused prologue."""
FUSED_TOKENS = 256
SHARED_MEMORY = 232_448
"""Bytes that a block may have on a GPU of 9.0. The fused prologue ranks all rows in one block."""


class ReadOutOfBoundsError(Exception):
    """An entry of the map leads finalize beside the rows: on a GPU an illegal memory access."""

    def __init__(self, entries: int) -> None:
        super().__init__(f"{entries} entries of the map lead out of bounds")
        self.entries = entries


class ThreeStepModel:
    """FlashInfer's routing maps and finalize restated, with the same methods as `FlashInferProbe`.

    After csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh of 0.7.2.post1. Pair k of token t is
    row ``k * tokens + t`` of the maps. For each expert the three-step sort looks through each token's pairs
    and stops at the first match. A second pair with the same expert is never written, and whoever reads the
    map finds there what the memory held before.
    """

    device = "cpu"

    def build_maps(self, ids: torch.Tensor, share: Share, memory: RoutingMaps | int) -> RoutingMaps:
        """The maps for `ids` int32 [T, K] and the experts of `share`; `memory` is what was there."""
        tokens, top_k = ids.shape
        if isinstance(memory, RoutingMaps):
            before = memory.permuted_of_row.clone(), memory.row_of_permuted.clone()
        else:
            before = torch.full((tokens * top_k,), memory), torch.full((tokens * top_k,), memory)
        fused = takes_fused(tokens, top_k, share.experts)
        build = _sort_fused if fused else _sort_in_three_steps
        first_offset = build(ids.long() - share.start, share.experts, *before)
        return RoutingMaps(fused, *before, first_offset)

    def finalize(
        self,
        maps: RoutingMaps,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        share: Share,
        all_to_all: bool,
    ) -> None:
        """Each token's weighted sum of its sorted rows into `out` bf16 [T, H].

        The kernel for all-to-all does not check that a row is within the map; the other does, since 0.6.10.
        Raises ReadOutOfBoundsError if it reads beside the rows.
        """
        tokens, top_k = ids.shape
        is_local = _find_local(share, ids)  # [T, K]
        at = maps.permuted_of_row.view(top_k, tokens).t()  # [T, K]
        inside = (at >= 0) & (at < tokens * top_k)  # [T, K]
        unchecked = all_to_all and share.ranks > 1
        if unchecked and bool((is_local & ~inside).any()):
            raise ReadOutOfBoundsError(int((is_local & ~inside).sum()))
        used = is_local & inside  # [T, K]
        values = rows.float()[torch.where(used, at, 0)]  # [T, K, H]
        scale = torch.where(used, weights, 0.0)  # [T, K]
        total = (values * scale[:, :, None]).sum(1).to(out.dtype)  # [T, H]
        written = is_local.any(1) if unchecked else torch.ones(tokens, dtype=torch.bool)  # [T]
        out[written] = total[written]


def takes_fused(tokens: int, top_k: int, experts: int) -> bool:
    """Return True if the fused prologue takes so many tokens, experts a token and local experts."""
    bits = int(math.log2(experts + 1)) + 1
    if bits > 9 or top_k not in FUSED_TOP_K or tokens > FUSED_TOKENS:
        return False
    # Shared memory of cub's BlockRadixRank, without its scan: 16-bit counters, two in a word.
    block = next(size for size in (32, 64, 128, 256) if tokens <= size)
    lanes = (1 << max(bits - 1, 0)) + 1
    return lanes * block * 4 < SHARED_MEMORY


def _sort_in_three_steps(
    local: torch.Tensor, experts: int, of_row: torch.Tensor, of_permuted: torch.Tensor
) -> torch.Tensor:
    """Write the maps int64 [K * T] of `local` ids [T, K] in place; return the first offsets [E + 1]."""
    tokens, top_k = local.shape
    place = torch.arange(top_k).expand(tokens, -1)  # [T, K]
    none = torch.full((tokens, experts + 1), top_k)  # [T, E + 1]
    first = none.scatter_reduce(1, _make_keys(local, experts), place, "amin")  # [T, E + 1], the first match
    expert, token = (first[:, :experts] < top_k).t().nonzero().unbind(1)  # [N] each, by expert
    row = first[token, expert] * tokens + token  # [N]
    of_permuted[: len(row)] = row
    of_row[row] = torch.arange(len(row))
    return torch.searchsorted(expert.contiguous(), torch.arange(experts + 1))


def _sort_fused(
    local: torch.Tensor, experts: int, of_row: torch.Tensor, of_permuted: torch.Tensor
) -> torch.Tensor:
    """The same as `_sort_in_three_steps`, by one stable sort of all pairs."""
    tokens, top_k = local.shape
    ordered, order = _make_keys(local, experts).reshape(-1).sort(stable=True)  # [T * K] each
    token, place = order // top_k, order % top_k  # [T * K] each
    of_permuted[:] = place * tokens + token
    of_row[of_permuted] = torch.arange(tokens * top_k)
    return torch.searchsorted(ordered, torch.arange(experts + 1))  # [E + 1]


def _make_keys(local: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [T, K]: the local ids, with `experts` for those of other ranks and for -1."""
    return torch.where((local >= 0) & (local < experts), local, experts)


# --- Measurements of the claims: a release's own code in this process -----------------------------------


def measure_maps(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """The map of each shape and each kind of ids: who made it, and which entries were not written."""
    code, rows = _load(unit, device, sources), []
    kinds = (("one_expert", 0), ("one_repeat", 0), ("distinct", 0), ("one_repeat", 1))
    shapes = product((1, 255, 256, 257, 4096), (128, 510, 511, 512), (8, 10))
    for shape, (kind, rank) in product(shapes, kinds):
        # Rank 1 is the second of two, so that half of the ids are not local.
        tokens, experts, top_k = shape
        given = {"tokens": tokens, "experts": experts * (rank + 1), "top_k": top_k, "ids": kind}
        point = DuplicateIdsParameters.model_validate({**given, "ranks": rank + 1, "rank": rank})
        ids = make_ids(point).to(code.device)  # [T, K]
        share = find_share(point)
        made = code.build_maps(ids, share, GARBAGE)
        rows.append(
            {
                "path": "fused" if made.fused else "three-step",
                "experts": experts,
                "top_k": point.top_k,
                "ids": kind,
                "start_expert": share.start,
                **map_figures(share, ids, made),
                "entries_as_before": count_entries_as_before(share, ids, made, GARBAGE),
            }
        )
    return rows


def measure_boundary(unit: str, device: str, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """By number of tokens: the most local experts for which the fused prologue makes the map, or 0."""
    code, rows = _load(unit, device, sources), []
    for tokens in (1, 32, 64, 128, 129, 256, 257):
        ids = torch.zeros(tokens, 8, dtype=torch.int32, device=code.device)  # [T, K]

        def refuses_fused(experts: int, ids: torch.Tensor = ids) -> bool:
            return not code.build_maps(ids, Share(experts), 0).fused

        # All numbers of experts up to the last one are taken, and none above it.
        rows.append({"tokens": tokens, "most_experts": bisect_left(range(1, 1025), True, key=refuses_fused)})
    return rows


def _load(unit: str, device: str, sources: Mapping[str, str]) -> FlashInferProbe:
    if unit == "installed":
        return FlashInferProbe.installed(device)
    return FlashInferProbe.load_release(unit.partition("@")[2], Path(sources[unit]), device)
