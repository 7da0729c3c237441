"""Launches the kernels of a MoE layer over expert slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

from moedoctor.kernels.moe.cuts import Cut, choose_tiles
from moedoctor.kernels.moe.decode import down_kernel, up_kernel
from moedoctor.kernels.moe.rows import sort_kernel, sum_kernel
from moedoctor.kernels.moe.tiles import down_tiles_kernel, up_tiles_kernel

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
class Rows:
    """Pairs of token and expert sorted by expert, and room for what is computed of each."""

    x: torch.Tensor
    """[T, H]"""
    ids: torch.Tensor
    """[T, K], experts"""
    experts: int
    inner: int
    order: torch.Tensor
    """int32 [T * K]: the pair that each row is of"""
    place: torch.Tensor
    """int32 [T * K]: the row of each pair"""
    offsets: torch.Tensor
    """int32 [E]: where each expert's rows end"""
    h: torch.Tensor
    """[T * K, I], of the type of `x`"""
    product: torch.Tensor
    """[T * K, H], of the type of `x`"""

    @classmethod
    def sort(cls, x: torch.Tensor, ids: torch.Tensor, experts: int, inner: int) -> Rows:
        """One launch. `x` [T, H] and `ids` [T, K] are contiguous."""
        pairs = ids.numel()
        order, place = torch.empty((2, pairs), dtype=torch.int32, device=x.device)  # [T * K] each
        offsets = torch.empty(experts, dtype=torch.int32, device=x.device)  # [E]
        with torch.cuda.device_of(x):
            sort_kernel[(experts,)](ids, order, place, offsets, pairs, chunk=_SORTED_AT_ONCE, num_warps=8)
        h, product = x.new_empty((pairs, inner)), x.new_empty((pairs, x.shape[1]))
        return cls(x, ids, experts, inner, order, place, offsets, h, product)


def launch_products(
    rows: Rows,
    weights: Mapping[str, torch.Tensor],
    experts: torch.Tensor | None,
    *,
    activation: str,
) -> None:
    """Two launches: both products of the rows whose experts are in the slots of `weights`.

    `experts` int32 [slots], -1 for a slot to leave out; None where slots are experts.
    """
    tiles = choose_tiles(rows.ids.numel(), rows.experts, rows.x.element_size())
    launch_up(rows, weights, experts, tiles.up, activation=activation)
    launch_down(rows, weights, experts, tiles.down)


def launch_up(
    rows: Rows,
    weights: Mapping[str, torch.Tensor],
    experts: torch.Tensor | None,
    cut: Cut,
    *,
    activation: str,
) -> None:
    """The first product and its activation, into `rows.h`. As `launch_products`."""
    with torch.cuda.device_of(rows.x):
        up_tiles_kernel[(triton.cdiv(rows.inner, cut.columns) * cut.splits, weights["w13"].shape[0])](
            rows.x,
            weights["w13"],
            weights.get("w13_scale", rows.x),
            weights.get("w13_bias", rows.x),
            rows.offsets if experts is None else experts,
            rows.order,
            rows.offsets,
            rows.h,
            rows.ids.shape[1],
            activation=activation,
            **_options(rows, weights, experts, "w13", cut),
        )


def launch_down(
    rows: Rows, weights: Mapping[str, torch.Tensor], experts: torch.Tensor | None, cut: Cut
) -> None:
    """The second product, of `rows.h` into `rows.product`. As `launch_products`."""
    with torch.cuda.device_of(rows.x):
        down_tiles_kernel[(triton.cdiv(rows.x.shape[1], cut.columns) * cut.splits, weights["w2"].shape[0])](
            rows.h,
            weights["w2"],
            weights.get("w2_scale", rows.x),
            weights.get("w2_bias", rows.x),
            rows.offsets if experts is None else experts,
            rows.offsets,
            rows.product,
            **_options(rows, weights, experts, "w2", cut),
        )


def _options(
    rows: Rows, weights: Mapping[str, torch.Tensor], experts: torch.Tensor | None, product: str, cut: Cut
) -> dict[str, int | bool]:
    return {
        "hidden": rows.x.shape[1],
        "inner": rows.inner,
        "has_scale": f"{product}_scale" in weights,
        "has_bias": f"{product}_bias" in weights,
        "mapped": experts is not None,
        "rows": cut.rows,
        "tall": cut.tall,
        "columns": cut.columns,
        "depth": cut.depth,
        "splits": cut.splits,
        "wide": not rows.x.is_cuda or rows.x.dtype is torch.float32,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


def launch_sum(rows: Rows, shares: torch.Tensor, out: torch.Tensor, *, adds: bool) -> None:
    """One launch: every token's products, weighted by `shares` [T, K], into `out` float32 [T, H]."""
    tokens, hidden = rows.x.shape
    columns = _columns(hidden, 1024)
    with torch.cuda.device_of(out):
        sum_kernel[(triton.cdiv(hidden, columns), tokens)](
            rows.product,
            rows.ids,
            rows.place,
            shares,
            out,
            rows.experts,
            top_k=rows.ids.shape[1],
            hidden=hidden,
            adds=adds,
            columns=columns,
        )


def launch_many(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: str,
    adds: bool,
) -> None:
    """Four launches: pairs sorted by slot, both products over tiles of them, the sum. As `launch_decode`.

    What lies between the products has the type of `x`.
    """
    rows = Rows.sort(x, slot_ids, weights["w13"].shape[0], weights["w2"].shape[2])
    launch_products(rows, weights, None, activation=activation)
    launch_sum(rows, shares, out, adds=adds)


def _columns(width: int, most: int) -> int:
    return int(min(max(triton.next_power_of_2(width), 16), most))
