"""What runs in the child for MD011: ids with repeats through routing maps and finalize, and what comes out.

The expert outputs are small whole numbers and the weights eighths, so every sum is exact and a row is either
right or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moedoctor.faults.routing.duplicate_ids_lab import ReadOutOfBoundsError
from moedoctor.fixes.expert_ids import deduplicate
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.routing.duplicate_ids import DuplicateIdsParameters

HIDDEN = 64
GARBAGE = 0x7F7F7F7F
_STALE = 64.0
"""What expert rows hold that this call did not write."""
_GUARD = 8
"""Rows before and after the expert rows, so that a read a little out of bounds is seen and not fatal."""
_OUTSIDE = 2.0**40
"""What those rows hold: with the smallest weight, an eighth, still more than any sum of rows within."""
_MEMORY = {"garbage": GARBAGE, "zeros": 0, "minus_one": -1}


@dataclass(frozen=True)
class Implementation:
    """The code under test, and whether ids are made distinct before it is called."""

    code: Any
    """`ThreeStepModel` or the probe of a release."""
    guard: bool = False


def make_ids(parameters: DuplicateIdsParameters) -> torch.Tensor:
    """int32 [T, K]: distinct ids, then repeated or emptied as `parameters.ids` says."""
    draw = torch.Generator().manual_seed(parameters.seed)
    tokens, experts, top_k = parameters.tokens, parameters.experts, parameters.top_k
    ids = torch.rand(tokens, experts, generator=draw).argsort(dim=1)[:, :top_k].int()  # [T, K]
    first = parameters.experts // parameters.ranks * parameters.rank
    if parameters.ids == "one_expert":
        ids = torch.full_like(ids, first)
    elif parameters.ids == "one_repeat":
        ids[:, 0] = first + ids[:, 0] % (parameters.experts // parameters.ranks)  # a local expert
        ids[:, 1] = ids[:, 0]
    elif parameters.ids == "sentinel":
        ids[::2, top_k // 2 :] = -1
    return ids.contiguous()


def observe(parameters: DuplicateIdsParameters, implementation: Implementation) -> Observation:
    """Build the maps, finalize, and say which rows of the sum are right."""
    code, experts = implementation.code, parameters.experts // parameters.ranks
    ids = make_ids(parameters).to(code.device)  # [T, K]
    eighths = torch.arange(1, ids.numel() + 1).reshape(ids.shape) % 4 + 1  # [T, K]
    weights = (eighths / 8).to(code.device)  # [T, K]
    expected = _sums(parameters, ids, weights)  # [T, H]
    without_repeats = _sums(parameters, ids, weights.masked_fill(_repeats(ids), 0.0))  # [T, H]
    if implementation.guard:
        ids, weights = deduplicate(ids, weights)
    maps = code.build_maps(
        ids, experts, start=experts * parameters.rank, memory=_memory(parameters, code, experts)
    )
    evidence = {"path": "fused" if maps.fused else "three-step", **map_figures(parameters, ids, maps)}
    rows, view = _expert_rows(parameters, ids, maps)
    out = torch.full((parameters.tokens, HIDDEN), float("nan"), dtype=torch.bfloat16, device=code.device)
    try:
        code.finalize(
            maps,
            view,
            ids,
            weights.float(),
            out,
            experts,
            ranks=parameters.ranks,
            rank=parameters.rank,
            all_to_all=parameters.finalize == "no_filling",
        )
    except ReadOutOfBoundsError as error:
        return Observation({**evidence, "rows": parameters.tokens, "entries_out_of_bounds": error.entries})
    del rows
    return Observation({**evidence, **_row_figures(parameters, ids, out, expected, without_repeats)})


def _memory(parameters: DuplicateIdsParameters, code: Any, experts: int) -> Any:
    """What the maps hold before the call."""
    if parameters.memory != "earlier":
        return _MEMORY[parameters.memory]
    healthy = parameters.model_copy(update={"ids": "distinct", "seed": parameters.seed + 1})
    ids = make_ids(healthy).to(code.device)  # [T, K]
    return code.build_maps(ids, experts, start=experts * parameters.rank, memory=0)


def _local(parameters: DuplicateIdsParameters, ids: torch.Tensor) -> torch.Tensor:
    """bool [T, K]: whether this rank has the slot's expert."""
    experts = parameters.experts // parameters.ranks
    own = ids - experts * parameters.rank  # [T, K]
    return (own >= 0) & (own < experts)


def _repeats(ids: torch.Tensor) -> torch.Tensor:
    """bool [T, K]: slots whose expert an earlier slot of the token holds."""
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (ids >= 0).unsqueeze(2)  # [T, K, K]
    slot = torch.arange(ids.shape[1], device=ids.device)  # [K]
    return (same & (slot[None, :] < slot[:, None])).any(2)


def _output(token: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """What expert `expert` makes of token `token`: a whole number from 1 to 13."""
    return ((token * 7 + expert * 3) % 13 + 1).float()


def _sums(parameters: DuplicateIdsParameters, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """bf16 [T, H]: each token's sum over this rank's experts."""
    token = torch.arange(ids.shape[0], device=ids.device)[:, None]  # [T, 1]
    values = torch.where(_local(parameters, ids), weights.float() * _output(token, ids), 0.0)  # [T, K]
    return values.sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16()


def _expert_rows(
    parameters: DuplicateIdsParameters, ids: torch.Tensor, maps: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert outputs in sorted order, as the GEMMs would leave them: the buffer, and its rows [R, H]."""
    tokens, size = ids.shape[0], ids.numel()
    buffer = torch.full((size + 2 * _GUARD, HIDDEN), _OUTSIDE, dtype=torch.bfloat16, device=ids.device)
    rows = buffer[_GUARD : _GUARD + size]  # [R, H]
    rows.fill_(_STALE)
    used = int(maps.first_offset[parameters.experts // parameters.ranks])
    source = maps.row_of_permuted[:used].long()  # [used]: k * T + t
    token, slot = source % tokens, source // tokens  # [used] each
    rows[:used] = _output(token, ids[token, slot].long())[:, None].bfloat16()
    return buffer, rows


def map_figures(parameters: DuplicateIdsParameters, ids: torch.Tensor, maps: Any) -> dict[str, Any]:
    """Local slots, how many of them were sorted, and how many entries of the map they do not own."""
    tokens = ids.shape[0]
    local = _local(parameters, ids).t().reshape(-1)  # [K * T]
    used = int(maps.first_offset[parameters.experts // parameters.ranks])
    written = torch.zeros_like(local)  # [K * T]
    written[maps.row_of_permuted[:used].long()] = True
    return {
        "local_slots": int(local.sum()),
        "sorted_rows": used,
        "repeated_slots": int((_repeats(ids).t().reshape(-1) & local).sum()),
        "unwritten_entries": int((local & ~written).sum()),
        "tokens": tokens,
    }


def entries_as_before(parameters: DuplicateIdsParameters, ids: torch.Tensor, maps: Any, memory: int) -> int:
    """How many local slots' entries of the map still hold `memory`, which was there before, by reading it."""
    local = _local(parameters, ids).t().reshape(-1)  # [K * T]
    return int((local & (maps.permuted_of_row == memory)).sum())


def _row_figures(
    parameters: DuplicateIdsParameters,
    ids: torch.Tensor,
    out: torch.Tensor,
    expected: torch.Tensor,
    without_repeats: torch.Tensor,
) -> dict[str, Any]:
    looked_at = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)  # [T]
    if parameters.finalize == "no_filling":
        looked_at = _local(parameters, ids).any(1)  # the kernel leaves other rows as they were
    right = (out == expected).all(1) & looked_at  # [T]
    dropped = (out == without_repeats).all(1) & ~right & looked_at  # [T]
    outside = (out.float().abs() >= _OUTSIDE / 8).all(1) & looked_at  # [T]
    wrong = looked_at & ~right & ~dropped & ~outside  # [T]
    figures: dict[str, Any] = {
        "rows": int(looked_at.sum()),
        "rows_right": int(right.sum()),
        "rows_with_the_repeat_dropped": int(dropped.sum()),
        "rows_wrong": int(wrong.sum()),
        "rows_out_of_bounds": int(outside.sum()),
        "rows_not_finite": int((~out.isfinite().all(1) & looked_at).sum()),
    }
    if bool((wrong | outside).any()):
        row = int((wrong | outside).nonzero()[0])
        figures["example"] = {"row": row, "sum": float(out[row, 0]), "right": float(expected[row, 0])}
    return figures
