"""Launches the kernels of `moedoctor.kernels.expert_product`: a whole MoE layer with bfloat16 activations.

Nothing here waits for the GPU, so a call can be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moedoctor.kernels.expert_product import expert_product, sum_slots

_PLAN_FROM = 65
"""Slots from which tokens are grouped by expert; fewer are computed one by one, as planning costs more."""


@dataclass(frozen=True)
class ExpertWeights:
    """One weight of all experts, in the form that the kernel reads."""

    values: torch.Tensor
    """bfloat16 [E, N, K], or uint8 [E, N, K/2] of `repack`"""
    block_scales: torch.Tensor | None = None
    """uint8 (E4M3) [E, N, K/16] for NVFP4"""
    global_scale: torch.Tensor | None = None
    """float32 [E] for NVFP4"""


@dataclass(frozen=True)
class Tile:
    """How one product is cut up."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def repack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, K/2] with element j of two neighbouring blocks of 16 in a byte, of a checkpoint's bytes.

    K must be a multiple of 32.
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [E, N, K]
    pairs = codes.unflatten(-1, (-1, 2, 16))  # [E, N, K/32, 2, 16]
    repacked: torch.Tensor = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(-2).contiguous()
    return repacked


def run_experts(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str,
    tiles: tuple[Tile, Tile] | None = None,
) -> torch.Tensor:
    """bfloat16 [T, H] of `x` bfloat16 [T, H], `topk_weights` float32 [T, K], `topk_ids` int32 [T, K].

    An id of -1 is skipped; `activation` is ``silu``, ``gelu_tanh`` (both with the gate in the first half of
    `w13`'s rows) or ``relu2``. Both tiles must have the same block_m.
    """
    tokens, hidden = x.shape
    top_k, experts = topk_ids.shape[1], w13.values.shape[0]
    slots = tokens * top_k
    gated = activation != "relu2"
    inner = w13.values.shape[1] // 2 if gated else w13.values.shape[1]
    first, second = tiles or choose_tiles(slots, experts, w13.block_scales is not None, gated=gated)
    middle = torch.empty((slots, inner), dtype=torch.bfloat16, device=x.device)  # [S, I]
    parts = torch.empty((slots, hidden), dtype=torch.bfloat16, device=x.device)  # [S, H]
    output = torch.empty_like(x)  # [T, H]
    planned = slots >= _PLAN_FROM
    order, plan = plan_blocks(topk_ids, experts, first.block_m) if planned else (topk_ids, topk_ids)
    common = (topk_weights, topk_ids, order, plan)
    blocks = plan.shape[0] if planned else slots
    _product(x, w13, middle, common, blocks, (inner, hidden, top_k), activation, first, planned, False)
    _product(middle, w2, parts, common, blocks, (hidden, inner, top_k), "none", second, planned, True)
    block = min(1024, triton.next_power_of_2(hidden))
    sum_slots[(tokens, triton.cdiv(hidden, block))](parts, topk_ids, output, hidden, top_k, block)
    return output


def plan_blocks(topk_ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order int32 [S], plan int32 [B, 3]): slots by expert; (expert or -1, first row, rows) of each block.

    B depends on the sizes alone, never on the ids, so that nothing has to be read back.
    """
    flat = topk_ids.flatten()  # [S]
    key = torch.where(flat >= 0, flat, experts).long()  # [S]
    order = key.argsort(stable=True).int()  # [S]
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)  # [E + 1]
    counts.scatter_add_(0, key, torch.ones_like(key))
    counts = counts[:experts]
    blocks = (counts + block_m - 1) // block_m  # [E]
    last, rows_before = blocks.cumsum(0), counts.cumsum(0) - counts  # [E] each
    size = min(len(flat), len(flat) // block_m + experts)
    number = torch.arange(size, device=flat.device)  # [B]
    expert = torch.searchsorted(last, number, right=True)  # [B]
    own = expert.clamp(max=experts - 1)  # [B]
    inside = (number - (last - blocks)[own]) * block_m  # [B]
    rows = (counts[own] - inside).clamp(max=block_m)  # [B]
    real = expert < experts  # [B]
    plan = torch.stack(
        (torch.where(real, expert, -1), rows_before[own] + inside, rows), dim=1
    ).int()  # [B, 3]
    return order, plan


def choose_tiles(slots: int, experts: int, nvfp4: bool, *, gated: bool) -> tuple[Tile, Tile]:
    """Tiles of the first and the second product; where it is gated, the first computes two halves at once."""
    each = slots / experts
    if slots <= 16:
        one = Tile(16, 32, 128, 4, 3)
        return one, one
    if slots < _PLAN_FROM or each <= 16:
        one = Tile(16, 64, 128 if nvfp4 else 64, 4, 3)
        return one, one
    if each <= 32:
        one = Tile(32, 64, 128, 4, 3)
        return one, one
    rows = 128 if each > 96 and not nvfp4 else 64
    warps = 8 if rows == 128 else 4
    depth = 128 if nvfp4 else 64
    return Tile(rows, 64 if gated else 128, depth, warps, 3), Tile(rows, 128, depth, warps, 3)


def _product(
    a: torch.Tensor,
    weight: ExpertWeights,
    out: torch.Tensor,
    common: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: int,
    sizes: tuple[int, int, int],
    activation: str,
    tile: Tile,
    planned: bool,
    second: bool,
) -> None:
    router, ids, order, plan = common
    width, depth, top_k = sizes
    nvfp4 = weight.block_scales is not None
    expert_product[(triton.cdiv(width, tile.block_n), blocks)](
        a,
        weight.values,
        weight.block_scales if nvfp4 else weight.values,
        weight.global_scale if nvfp4 else weight.values,
        out,
        router,
        ids,
        order,
        plan,
        width=width,
        depth=depth,
        top_k=top_k,
        activation=activation,
        nvfp4=nvfp4,
        planned=planned,
        second=second,
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=tile.block_k,
        wide=not a.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
