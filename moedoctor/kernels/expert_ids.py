"""Checks the expert ids of a batch, or makes them distinct, in one launch each and without the host.

Shapes: T tokens, K top_k, R rows (tokens of a program), L lanes (K padded to a power of two).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moedoctor.kernels.device_guard import make_current

_COMPARISONS = 2048
"""Comparisons of two lanes a program; each lane is compared with every other of its row."""


@triton.jit
def as_int32(ids: tl.tensor) -> tl.tensor:
    """Return int32 `ids`, with -1 for an id that int32 cannot hold: cut off, it would be another expert's."""
    if ids.dtype == tl.int64:
        ids = tl.where((ids >= -2147483648) & (ids <= 2147483647), ids, -1)
    return ids.to(tl.int32)


@triton.jit
def _add(counter: tl.tensor, count: tl.tensor, step: tl.tensor, has_step: tl.constexpr) -> None:
    """Add to a counter, and the first time note the step six places on."""
    if count > 0:
        tl.atomic_add(counter, count)
        if has_step:
            tl.atomic_cas(counter + 6, 0, step)


@triton.jit
def check_ids_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    real_rows_ptr: tl.tensor,
    step_ptr: tl.tensor,
    tokens: tl.tensor,
    stride_token: tl.tensor,
    stride_lane: tl.tensor,
    num_experts: tl.tensor,
    top_k: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    has_real_rows: tl.constexpr,
    has_step: tl.constexpr,
) -> None:
    """Add to `counts` int32 [2, 3], real rows first; rows from `real_rows` on are padding.

    With `step` int32 [2], the number of the step and whether it counts, `counts` is [2, 2, 3]: after the
    rows come the first steps.
    """
    counted = 1
    step = 0
    if has_step:
        step = tl.load(step_ptr)
        counted = tl.load(step_ptr + 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [R]
    lane = tl.arange(0, LANES)  # [L]
    inside = (row < tokens)[:, None] & (lane < top_k)[None, :]  # [R, L]
    at = row.to(tl.int64)[:, None] * stride_token + lane.to(tl.int64)[None, :] * stride_lane  # [R, L]
    ids = tl.load(ids_ptr + at, mask=inside, other=-1)  # [R, L]
    known = inside & (ids >= 0) & (ids < num_experts)  # [R, L]
    # Lanes without a known expert take numbers of their own, so that no two of them are equal.
    own = tl.where(known, ids, -1 - lane[None, :]).to(tl.int32)  # [R, L]
    same = (own[:, :, None] == own[:, None, :]) & (lane[:, None] < lane[None, :])[None, :, :]
    repeated = tl.max(tl.max(same.to(tl.int32), axis=2), axis=1)  # [R]
    empty = inside & (ids == -1)  # [R, L]
    outside = tl.max((inside & (ids != -1) & ~known).to(tl.int32), axis=1)  # [R]
    sentinel = tl.max(empty.to(tl.int32), axis=1)  # [R]
    if (tl.max(repeated + outside + sentinel, axis=0) > 0) & (counted != 0):  # clean batches touch nothing
        padding = tl.zeros([ROWS], tl.int32)  # [R]
        if has_real_rows:
            padding = (row >= tl.load(real_rows_ptr)).to(tl.int32)  # [R]
        for kind in tl.static_range(2):
            mine = padding if kind == 1 else 1 - padding  # [R]
            counters = counts_ptr + kind * 3
            _add(counters, tl.sum(repeated * mine, axis=0), step, has_step)
            _add(counters + 1, tl.sum(outside * mine, axis=0), step, has_step)
            _add(counters + 2, tl.sum(sentinel * mine, axis=0), step, has_step)


@triton.jit
def deduplicate_kernel(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ids_ptr: tl.tensor,
    out_weights_ptr: tl.tensor,
    tokens: tl.tensor,
    stride_id_token: tl.tensor,
    stride_id_lane: tl.tensor,
    stride_weight_token: tl.tensor,
    stride_weight_lane: tl.tensor,
    top_k: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    use_spare: tl.constexpr,
) -> None:
    """Give the first lane of an expert the weights of all, the others an id of -1 or of a spare expert."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [R]
    lane = tl.arange(0, LANES)  # [L]
    inside = (row < tokens)[:, None] & (lane < top_k)[None, :]  # [R, L]
    long_row, long_lane = row.to(tl.int64)[:, None], lane.to(tl.int64)[None, :]
    ids_at = ids_ptr + long_row * stride_id_token + long_lane * stride_id_lane  # [R, L]
    ids = as_int32(tl.load(ids_at, mask=inside, other=-1))  # [R, L]
    weights = tl.load(
        weights_ptr + long_row * stride_weight_token + long_lane * stride_weight_lane,
        mask=inside,
        other=0.0,
    ).to(tl.float32)  # [R, L]; before they are added, or the sum is as coarse as the weights
    own = tl.where(ids >= 0, ids, -1 - lane[None, :])  # [R, L]
    same = own[:, :, None] == own[:, None, :]  # [R, L, L]
    earlier = (lane[None, :] < lane[:, None])[None, :, :]  # [1, L, L]
    again = tl.max((same & earlier).to(tl.int32), axis=2) > 0  # [R, L]
    total = tl.sum(tl.where(same, weights[:, None, :], 0.0), axis=2)  # [R, L]
    spare = tl.full([ROWS, LANES], -1, tl.int32)  # [R, L]
    if use_spare:
        # With d repeated ids a row holds K - d experts at most, so the lowest K hold d others.
        free = tl.max((own[:, None, :] == lane[None, :, None]).to(tl.int32), axis=2) == 0  # [R, experts]
        free = free & (lane < top_k)[None, :]
        place = tl.cumsum(free.to(tl.int32), axis=1)  # [R, experts], from 1
        number = tl.cumsum(again.to(tl.int32), axis=1)  # [R, L], from 1
        taken = free[:, None, :] & (place[:, None, :] == number[:, :, None])  # [R, L, experts]
        spare = tl.max(tl.where(taken, lane[None, None, :], -1), axis=2)  # [R, L]
    out = long_row * top_k + lane[None, :]
    tl.store(out_ids_ptr + out, tl.where(again, spare, ids), mask=inside)
    tl.store(out_weights_ptr + out, tl.where(again, 0.0, total), mask=inside)


def launch_check(
    ids: torch.Tensor,
    num_experts: int,
    counts: torch.Tensor,
    real_rows: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
) -> None:
    """Add the unusual rows of `ids` [T, K] to `counts` int32 [2, 3], which stays on the device.

    The columns are rows with a repeated id, with an id out of range, with an id of -1. `real_rows` int32 [1]
    on the device: how many rows are not padding; without it all are real. With `step` int32 [2], its number
    and whether it counts, `counts` is [2, 2, 3], the second half for first steps.
    """
    tokens, top_k = ids.shape
    if tokens == 0:
        return
    lanes, rows, warps = _shape(tokens, top_k)
    with make_current(ids):
        check_ids_kernel[(triton.cdiv(tokens, rows),)](
            ids,
            counts,
            counts if real_rows is None else real_rows,
            counts if step is None else step,
            tokens,
            ids.stride(0),
            ids.stride(1),
            num_experts,
            top_k=top_k,
            LANES=lanes,
            ROWS=rows,
            has_real_rows=real_rows is not None,
            has_step=step is not None,
            num_warps=warps,
        )


def launch_deduplicate(
    ids: torch.Tensor,
    weights: torch.Tensor,
    out_ids: torch.Tensor,
    out_weights: torch.Tensor,
    *,
    use_spare: bool,
) -> None:
    """Write distinct ids int32 [T, K] and their weights float32 [T, K]; the outputs are contiguous."""
    tokens, top_k = ids.shape
    if tokens == 0:
        return
    lanes, rows, warps = _shape(tokens, top_k)
    with make_current(ids):
        deduplicate_kernel[(triton.cdiv(tokens, rows),)](
            ids,
            weights,
            out_ids,
            out_weights,
            tokens,
            ids.stride(0),
            ids.stride(1),
            weights.stride(0),
            weights.stride(1),
            top_k=top_k,
            LANES=lanes,
            ROWS=rows,
            use_spare=use_spare,
            num_warps=warps,
        )


def _shape(tokens: int, top_k: int) -> tuple[int, int, int]:
    """Return lanes (top_k padded to a power of two), rows a program, warps."""
    lanes = triton.next_power_of_2(top_k)
    rows = max(_COMPARISONS // (lanes * lanes), 1)
    rows = min(rows, 8 if tokens <= 1024 else 32, triton.next_power_of_2(tokens))
    return lanes, rows, 1 if rows * lanes * lanes <= 1024 else 4
