"""Launches the kernels of a MoE layer: over the slots of an expert cache, or a whole layer at once.

Nothing here waits for the GPU, so a call can be captured into a CUDA graph. Arguments are not checked;
`moedoctor.fixes.moe.forward` checks those of the launches over slots. Ids that are no expert or slot, below 0
or too large, are skipped in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton

from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.moe.decode import down_kernel, up_kernel
from moedoctor.kernels.moe.decode_rows import down_rows_kernel, up_rows_kernel
from moedoctor.kernels.moe.expert_weights import ExpertWeights
from moedoctor.kernels.moe.products import block_product, slot_product
from moedoctor.kernels.moe.rows import plan_kernel, sort_kernel, sum_kernel
from moedoctor.kernels.moe.tiles import (
    RowTile,
    Tile,
    choose_block_tiles,
    choose_row_tiles,
    choose_slot_tiles,
    find_measured_tiles,
)

_SORTED_AT_ONCE = 2048
_MOST_PAIRS = 2**31 - 2**16
"""Rows and pairs are counted in int32, some thousand at once."""
_MOST_ROWS = 65_535
"""The end of the second dimension of CUDA's grids."""


def launch_decode(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: str,
    adds: bool,
) -> None:
    """Compute each pair by itself, in two launches. Arguments as `moe_forward`."""
    (tokens, hidden_size), top_k, slots = x.shape, slot_ids.shape[1], weights["w2"].shape[0]
    intermediate_size = weights["w2"].shape[2]
    lanes = triton.next_power_of_2(top_k)
    up_k, down_k = _choose_block(hidden_size, 512), _choose_block(intermediate_size, 256)
    up_n, down_n = max(4096 // up_k, 1), max(4096 // (down_k * lanes), 1)
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    h = torch.empty((tokens * top_k, intermediate_size), dtype=torch.float32, device=x.device)  # [T * K, I]
    with make_current(x):
        up_kernel[(triton.cdiv(intermediate_size, up_n) * tokens * top_k,)](
            x,
            _make_readable(weights["w13"]),
            weights.get("w13_scale", x),
            weights.get("w13_bias", x),
            slot_ids,
            h,
            slots,
            top_k,
            activation=activation,
            has_scale="w13_scale" in weights,
            has_bias="w13_bias" in weights,
            BLOCK_N=up_n,
            BLOCK_K=up_k,
            **sizes,
        )
        down_kernel[(triton.cdiv(hidden_size, down_n) * tokens,)](
            h,
            _make_readable(weights["w2"]),
            weights.get("w2_scale", h),
            weights.get("w2_bias", h),
            slot_ids,
            topk_weights,
            out,
            slots,
            top_k=top_k,
            has_scale="w2_scale" in weights,
            has_bias="w2_bias" in weights,
            adds=adds,
            LANES=lanes,
            BLOCK_N=down_n,
            BLOCK_K=down_k,
            **sizes,
        )


def launch_many(
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    slot_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    *,
    activation: str,
    adds: bool,
) -> None:
    """Sort the pairs by slot, compute both products in tiles, add up: four launches. As `launch_decode`.

    The values between the products have the type of `x`.
    """
    rows = Rows.sort(x, slot_ids, weights["w13"].shape[0], weights["w2"].shape[2])
    launch_products(rows, weights, None, activation=activation)
    launch_sum(rows, topk_weights, out, adds=adds)


@dataclass(frozen=True)
class Rows:
    """Pairs sorted by expert, and room for their results."""

    x: torch.Tensor
    """[T, H]"""
    ids: torch.Tensor
    """[T, K], experts"""
    order: torch.Tensor
    """int32 [T * K]: the pair of each row"""
    row: torch.Tensor
    """int32 [T * K]: the row of each pair"""
    ends: torch.Tensor
    """int32 [E]: the end of each expert's rows"""
    h: torch.Tensor
    """[T * K, I], of the type of `x`"""
    product: torch.Tensor
    """[T * K, H], of the type of `x`"""

    @classmethod
    def sort(cls, x: torch.Tensor, ids: torch.Tensor, num_experts: int, intermediate_size: int) -> Rows:
        """Sort in one launch. `x` [T, H] and `ids` [T, K] are contiguous."""
        pairs = _count_pairs(ids)
        order, row = torch.empty((2, pairs), dtype=torch.int32, device=x.device)  # [T * K] each
        ends = torch.empty(num_experts, dtype=torch.int32, device=x.device)  # [E]
        with make_current(x):
            sort_kernel[(num_experts,)](ids, order, row, ends, pairs, CHUNK=_SORTED_AT_ONCE, num_warps=8)
        h, product = x.new_empty((pairs, intermediate_size)), x.new_empty((pairs, x.shape[1]))
        return cls(x, ids, order, row, ends, h, product)


def launch_products(
    rows: Rows,
    weights: Mapping[str, torch.Tensor],
    experts: torch.Tensor | None,
    *,
    activation: str,
) -> None:
    """Compute both products of the rows whose experts are in the slots of `weights`, in two launches.

    `experts` int32 [slots] holds the expert in each slot, -1 for a slot to leave out; None if slots are
    experts. The first product is written to `rows.h`, the second to `rows.product`.
    """
    tiles = choose_slot_tiles(rows.ids.numel(), len(rows.ends), rows.x.element_size())
    for name, tile in zip(("w13", "w2"), tiles, strict=True):
        a, out = (rows.x, rows.h) if name == "w13" else (rows.h, rows.product)
        width, weight = out.shape[1], _make_readable(weights[name])
        with make_current(a):
            slot_product[(triton.cdiv(width, tile.block_n) * tile.splits * weight.shape[0],)](
                a,
                weight,
                weights.get(f"{name}_scale", rows.x),
                weights.get(f"{name}_bias", rows.x),
                rows.ends if experts is None else experts,
                rows.order,
                rows.ends,
                out,
                len(rows.ends),
                rows.ids.shape[1],
                width=width,
                depth=a.shape[1],
                activation=activation if name == "w13" else "none",
                second=name == "w2",
                has_scale=f"{name}_scale" in weights,
                has_bias=f"{name}_bias" in weights,
                mapped=experts is not None,
                BLOCK_M=tile.block_m,
                TALL_M=tile.tall_m or tile.block_m,
                BLOCK_N=tile.block_n,
                BLOCK_K=tile.block_k,
                splits=tile.splits,
                wide=not a.is_cuda or a.dtype is torch.float32,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )


def launch_sum(rows: Rows, topk_weights: torch.Tensor, out: torch.Tensor, *, adds: bool) -> None:
    """Write the sum of each token's products by `topk_weights` [T, K] to `out` float32 [T, H]: one launch."""
    _sum(rows.product, rows.ids, rows.row, topk_weights, out, len(rows.ends), adds=adds)


def run_experts(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str,
    tiles: tuple[Tile, Tile] | tuple[RowTile, RowTile] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T, H] of `x` [T, H], `topk_weights` float32 [T, K], `topk_ids` int32 or int64 [T, K].

    `x` is bfloat16 or float16, and so is the result, which is written to `out` if given. An id below 0 or
    from E on is skipped. `activation` is ``silu``, ``gelu``, ``gelu_tanh`` (these with the gate in the first
    half of `w13`'s rows) or ``relu2``. Two `Tile` must have the same block_m; `RowTile` are for NVFP4 and
    FP8. Weights are multiplied as `x`'s type, with `RowTile` as float32; sums are float32, and values between
    the products have `x`'s type.
    """
    # The kernels read rows that are packed, and a caller may give part of a wider buffer.
    x, topk_weights, topk_ids = x.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()
    hidden_size = x.shape[1]
    num_experts, pairs = w13.values.shape[0], topk_ids.numel()
    gated = activation != "relu2"
    intermediate_size = w13.values.shape[1] // 2 if gated else w13.values.shape[1]
    tiles = tiles or _choose_tiles(
        x, topk_ids.shape[1], num_experts, w13.quantization, intermediate_size, gated
    )
    h = x.new_empty((pairs, intermediate_size))  # [T * K, I]
    output = torch.empty_like(x) if out is None else out  # [T, H]
    first, second = tiles
    if isinstance(first, RowTile) or isinstance(second, RowTile):
        assert isinstance(first, RowTile)
        assert isinstance(second, RowTile)
        _launch_rows(x, w13, w2, topk_weights, topk_ids, h, output, (first, second), activation=activation)
        return output
    # Partial sums stay float32.
    products = x.new_empty(  # [splits, T * K, H]
        (second.depth_splits, pairs, hidden_size),
        dtype=x.dtype if second.depth_splits == 1 else torch.float32,
    )
    early = second.early and _has_dependent_launches(x.device)
    plan = plan_blocks(topk_ids, num_experts, first.block_m, early=early) if len(x) > 1 else None
    for a, weight, to, tile in ((x, w13, h, first), (h, w2, products, second)):
        is_second = weight is w2
        launch_block_product(
            a,
            weight,
            to,
            topk_ids,
            plan,
            replace(tile, early=early),
            activation="none" if is_second else activation,
            second=is_second,
        )
    _sum(products, topk_ids, None, topk_weights, output, num_experts, adds=False, early=early)
    return output


def _launch_rows(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    h: torch.Tensor,
    out: torch.Tensor,
    tiles: tuple[RowTile, RowTile],
    *,
    activation: str,
) -> None:
    """Compute an NVFP4 or FP8 layer in two launches. `h` [T * K, I], `out` [T, H], others as `run_experts`.

    `h` gets values between the products that are larger than they are, see `decode_rows`.
    """
    (tokens, hidden_size), top_k, intermediate_size = x.shape, topk_ids.shape[1], h.shape[1]
    first, second = tiles
    early, splits = _has_dependent_launches(x.device), second.expert_splits
    parts = triton.cdiv(hidden_size, second.block_n)
    partial, ended = out, topk_ids
    if splits > 1:
        partial = torch.empty((tokens, splits, hidden_size), dtype=torch.float32, device=x.device)
        ended = torch.empty((tokens, parts), dtype=torch.int32, device=x.device)  # zeroed by the first launch
    common = {
        "top_k": top_k,
        "num_experts": w13.values.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "quantization": w13.quantization,
        "larger": 2.0**64 if h.dtype is torch.bfloat16 and w13.quantization == "nvfp4" else 1.0,
        "early": early,
    }
    with make_current(x):
        up_rows_kernel[(triton.cdiv(intermediate_size, first.block_n) * tokens * top_k,)](
            x,
            *_list_pointers(w13),
            topk_ids,
            h,
            ended,
            activation=activation,
            columns_ended=parts if splits > 1 else 0,
            scales=w13.scale_layout(hidden_size),
            has_bias=w13.bias is not None,
            LANES=first.rows_at_once,
            BLOCK_N=first.block_n,
            GROUPS=first.groups,
            num_warps=first.warps,
            **common,
        )
        down_rows_kernel[(parts * splits * tokens,)](
            h,
            *_list_pointers(w2),
            topk_ids,
            topk_weights,
            out,
            partial,
            ended,
            scales=w2.scale_layout(intermediate_size),
            has_bias=w2.bias is not None,
            expert_splits=splits,
            LANES=min(second.lanes, triton.next_power_of_2(top_k)),
            ahead=second.ahead,
            BLOCK_N=second.block_n,
            GROUPS=second.groups,
            num_warps=second.warps,
            **common,
            **_allow_early(early),
        )


def _list_pointers(weight: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """Return values (of FP8 four in an int32), block scales, scale and bias; the values for what it lacks."""
    values = weight.values if weight.quantization == "none" else weight.values.view(torch.int32)
    parts = (weight.block_scales, weight.scale, weight.bias)
    return values, *(values if part is None else part for part in parts)


def _make_readable(weight: torch.Tensor) -> torch.Tensor:
    """Return FP8 weights as bytes if Triton has no FP8 for their device; kernels over slots decode them."""
    if weight.dtype is torch.float8_e4m3fn and _read_capability(weight.device) < (8, 9):
        return weight.view(torch.uint8)
    return weight


def _choose_tiles(
    x: torch.Tensor, top_k: int, num_experts: int, quantization: str, intermediate_size: int, gated: bool
) -> tuple[Tile, Tile] | tuple[RowTile, RowTile]:
    """Return measured tiles on the kind of GPU where they were measured, else those of a rule."""
    tokens, hidden_size = x.shape
    pairs, measured = tokens * top_k, None
    if pairs and _is_hopper(x.device):
        measured = find_measured_tiles(
            pairs,
            num_experts,
            quantization,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            gated=gated,
        )
    return (
        measured
        or choose_row_tiles(tokens, top_k, num_experts, quantization, gated=gated)
        or choose_block_tiles(pairs, num_experts, quantization, gated=gated)
    )


def plan_blocks(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, *, early: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (order int32 [P], plan int32 [B, 3]), as `plan_kernel` writes them.

    B depends on the sizes alone, never on the ids, so that nothing has to be read back. Pairs without an
    expert are in no block; entries of `order` that belong to no block are not written.
    """
    pairs = _count_pairs(topk_ids)
    blocks = pairs // block_m + num_experts
    by_row = pairs < blocks
    blocks = min(pairs, blocks)
    order = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)  # [P]
    plan = torch.empty((blocks, 3), dtype=torch.int32, device=topk_ids.device)  # [B, 3]
    with make_current(topk_ids):
        plan_kernel[(num_experts,)](
            topk_ids.contiguous(),
            order,
            plan,
            pairs,
            blocks,
            num_experts=num_experts,
            by_row=by_row,
            BLOCK_M=block_m,
            CHUNK=1024 if pairs <= 4096 else 4096,
            early=early,
            num_warps=4 if pairs <= 4096 else 8,
        )
    return order, plan


def launch_block_product(
    a: torch.Tensor,
    weight: ExpertWeights,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile,
    *,
    activation: str,
    second: bool,
) -> None:
    """Write one product of `a` to `out` [pairs, N], of a second product [depth_splits, pairs, N].

    `plan` is that of `plan_blocks`, or None for a block a pair.
    """
    order, blocks = plan or (topk_ids, topk_ids)
    width, depth = out.shape[-1], a.shape[1]
    count = len(blocks) if plan else topk_ids.numel()  # without a plan the pairs of one token
    scales = weight.scale_layout(depth)
    block_k = _step(tile, weight, depth)
    with make_current(a):
        for start in range(0, count, _MOST_ROWS):
            block_product[
                triton.cdiv(width, tile.block_n), min(count - start, _MOST_ROWS), tile.depth_splits
            ](
                a,
                *_list_pointers(weight),
                out,
                topk_ids,
                order,
                blocks[start:],
                topk_ids.numel(),
                width=width,
                depth=depth,
                num_experts=weight.values.shape[0],
                top_k=topk_ids.shape[1],
                activation=activation,
                quantization=weight.quantization,
                scales=scales,
                has_bias=weight.bias is not None,
                planned=plan is not None,
                second=second,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                BLOCK_K=block_k,
                depth_splits=tile.depth_splits,
                wide=not a.is_cuda,
                hopper=_is_hopper(a.device),
                early=tile.early,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **_allow_early(tile.early and (second or plan is not None)),
            )


def _step(tile: Tile, weight: ExpertWeights, depth: int) -> int:
    """Return the columns of a step: those of the tile, or fewer if a step would have several FP8 scales."""
    columns = weight.scale_layout(depth)[2]
    if weight.quantization != "fp8" or columns >= depth:
        return tile.block_k
    return min(tile.block_k, columns & -columns)


def _sum(
    product: torch.Tensor,
    ids: torch.Tensor,
    row: torch.Tensor | None,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    num_experts: int,
    *,
    adds: bool,
    early: bool = False,
) -> None:
    tokens, width = out.shape
    block_n = _choose_block(width, 1024)
    with make_current(out):
        sum_kernel[(triton.cdiv(width, block_n) * tokens,)](
            product,
            ids,
            ids if row is None else row,
            topk_weights,
            out,
            num_experts,
            top_k=ids.shape[1],
            width=width,
            parts=1 if product.dim() == 2 else product.shape[0],
            has_row=row is not None,
            adds=adds,
            BLOCK_N=block_n,
            early=early,
            **_allow_early(early),
        )


def _allow_early(early: bool) -> dict[str, bool]:
    """Return Triton's option for a launch that may begin before the one before it has ended."""
    return {"launch_pdl": True} if early else {}


def _count_pairs(ids: torch.Tensor) -> int:
    """Return how many pairs of a token and an expert `ids` [T, K] holds. Raises ValueError for too many."""
    pairs = ids.numel()
    if pairs > _MOST_PAIRS:
        raise ValueError(
            f"ids: at most {_MOST_PAIRS} pairs a call, got {pairs}: compute fewer tokens at a time"
        )
    return pairs


def _choose_block(width: int, most: int) -> int:
    return int(min(max(triton.next_power_of_2(width), 16), most))


def _has_dependent_launches(device: torch.device) -> bool:
    return _read_capability(device) >= (9, 0)


def _is_hopper(device: torch.device) -> bool:
    return _read_capability(device)[0] == 9


@cache
def _read_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
