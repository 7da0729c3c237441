"""Launches the kernels of a MoE layer over expert slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

from moedoctor.kernels.moe_decode import down_kernel, up_kernel
from moedoctor.kernels.moe_rows import sort_kernel, sum_kernel
from moedoctor.kernels.moe_tiles import down_tiles_kernel, up_tiles_kernel

_SORTED_AT_ONCE = 2048


def launch_decode(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: str,
    adds: bool,
) -> None:
    """Two launches; reads the weights of each pair of token and expert. Arguments as `moe_forward`."""
    (tokens, hidden), top_k = x.shape, slot_ids.shape[1]
    inner = weights["w2"].shape[2]
    h = torch.empty((tokens * top_k, inner), dtype=torch.float32, device=x.device)  # [T * K, I]
    columns = _columns(hidden, 512)
    rows = max(4096 // columns, 1)
    with torch.cuda.device_of(x):
        up_kernel[(triton.cdiv(inner, rows), tokens * top_k)](
            x,
            weights["w13"],
            weights.get("w13_scale", x),
            weights.get("w13_bias", x),
            slot_ids,
            h,
            top_k,
            hidden=hidden,
            inner=inner,
            activation=activation,
            has_scale="w13_scale" in weights,
            has_bias="w13_bias" in weights,
            rows=rows,
            columns=columns,
        )
        lanes, columns = triton.next_power_of_2(top_k), _columns(inner, 256)
        rows = max(4096 // (columns * lanes), 1)
        down_kernel[(triton.cdiv(hidden, rows), tokens)](
            h,
            weights["w2"],
            weights.get("w2_scale", x),
            weights.get("w2_bias", x),
            slot_ids,
            shares,
            out,
            top_k=top_k,
            hidden=hidden,
            inner=inner,
            has_scale="w2_scale" in weights,
            has_bias="w2_bias" in weights,
            adds=adds,
            lanes=lanes,
            rows=rows,
            columns=columns,
        )


@dataclass(frozen=True)
class Tiles:
    """How both products are cut up: rows of tokens, columns of the results, depth of a step."""

    rows: int
    up_columns: int
    down_columns: int
    depth: int
    warps: int
    stages: int


def choose_tiles(pairs: int, slots: int, size: int) -> Tiles:
    """By the rows that a slot has on average; `size`: bytes of a weight."""
    each = pairs / slots
    if each <= 16:
        return Tiles(16, 32, 64, 128, 4, 4)
    if each <= 32:
        return Tiles(32, 64, 64, 128, 4, 3)
    rows = 128 if each > 96 else 64
    return Tiles(rows, 64, 128, 64, 8 if rows == 128 else 4, 4 if size == 2 else 3)


def launch_many(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: str,
    adds: bool,
    tiles: Tiles | None = None,
) -> None:
    """Four launches: pairs sorted by slot, both products over tiles of them, the sum. As `launch_decode`.

    What lies between the products has the type of `x`.
    """
    (tokens, hidden), top_k = x.shape, slot_ids.shape[1]
    slots, inner, pairs = weights["w13"].shape[0], weights["w2"].shape[2], slot_ids.numel()
    cut = tiles or choose_tiles(pairs, slots, weights["w13"].element_size())
    order, place = torch.empty((2, pairs), dtype=torch.int32, device=x.device)  # [T * K] each
    offsets = torch.empty(slots, dtype=torch.int32, device=x.device)  # [slots]
    h = x.new_empty((pairs, inner))  # [T * K, I]
    product = x.new_empty((pairs, hidden))  # [T * K, H]
    common = {
        "hidden": hidden,
        "inner": inner,
        "rows": cut.rows,
        "depth": cut.depth,
        "wide": not x.is_cuda or x.dtype is torch.float32,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    with torch.cuda.device_of(x):
        sort_kernel[(slots,)](slot_ids, order, place, offsets, pairs, chunk=_SORTED_AT_ONCE, num_warps=8)
        up_tiles_kernel[(triton.cdiv(inner, cut.up_columns), slots)](
            x,
            weights["w13"],
            weights.get("w13_scale", x),
            weights.get("w13_bias", x),
            order,
            offsets,
            h,
            top_k,
            activation=activation,
            has_scale="w13_scale" in weights,
            has_bias="w13_bias" in weights,
            columns=cut.up_columns,
            **common,
        )
        down_tiles_kernel[(triton.cdiv(hidden, cut.down_columns), slots)](
            h, weights["w2"], offsets, product, columns=cut.down_columns, **common
        )
        columns = _columns(hidden, 1024)
        sum_kernel[(triton.cdiv(hidden, columns), tokens)](
            product,
            weights.get("w2_scale", x),
            weights.get("w2_bias", x),
            slot_ids,
            place,
            shares,
            out,
            top_k=top_k,
            hidden=hidden,
            has_scale="w2_scale" in weights,
            has_bias="w2_bias" in weights,
            adds=adds,
            columns=columns,
        )


def _columns(width: int, most: int) -> int:
    return int(min(max(triton.next_power_of_2(width), 16), most))
