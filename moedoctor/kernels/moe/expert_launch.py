"""Launches the kernels of `expert_product`: a whole MoE layer with bfloat16 activations.

Nothing here waits for the GPU, so a call can be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from moedoctor.kernels.moe.expert_plan import plan_blocks
from moedoctor.kernels.moe.expert_product import expert_product, sum_slots

_PLAN_FROM = 65
"""Slots from which tokens are grouped by expert; fewer are computed one by one, as planning costs more."""


@dataclass(frozen=True)
class ExpertWeights:
    """One weight of all experts, in the form that the kernel reads."""

    values: torch.Tensor
    """bfloat16 [E, N, K], or for NVFP4 int32 [E, N, 8 * G] of `pack_words`"""
    block_scales: torch.Tensor | None = None
    """int32 [E, N, G] of `pack_words` for NVFP4"""
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
    common = (topk_ids, order, plan)
    blocks = plan.shape[0] if planned else slots
    _product(x, w13, middle, common, blocks, (inner, hidden, top_k), activation, first, planned, False)
    _product(middle, w2, parts, common, blocks, (hidden, inner, top_k), "none", second, planned, True)
    block = min(1024, triton.next_power_of_2(hidden))
    sum_slots[(tokens, triton.cdiv(hidden, block))](
        parts, topk_weights, topk_ids, output, hidden, top_k, block
    )
    return output


def choose_tiles(slots: int, experts: int, nvfp4: bool, *, gated: bool) -> tuple[Tile, Tile]:
    """Tiles of the first and the second product; where it is gated, the first computes two halves at once."""
    each = slots / experts
    if slots <= 16:
        one = Tile(16, 64, 256, 4, 4) if nvfp4 else Tile(16, 64, 128, 4, 3)
        return one, one
    few = slots < _PLAN_FROM or each <= 16
    if nvfp4:
        rows = 16 if few else 32 if each <= 32 else 64
        stages = 4 if few else 3
        return Tile(rows, 64 if gated else 128, 128, 4, stages), Tile(rows, 128, 128, 4, stages)
    if few or each <= 32:
        one = Tile(16, 64, 64, 4, 3) if few else Tile(32, 64, 128, 4, 3)
        return one, one
    rows, warps = (128, 8) if each > 96 else (64, 4)
    return Tile(rows, 64 if gated else 128, 64, warps, 3), Tile(rows, 128, 64, warps, 3)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _product(
    a: torch.Tensor,
    weight: ExpertWeights,
    out: torch.Tensor,
    common: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: int,
    sizes: tuple[int, int, int],
    activation: str,
    tile: Tile,
    planned: bool,
    second: bool,
) -> None:
    ids, order, plan = common
    width, depth, top_k = sizes
    nvfp4 = weight.block_scales is not None
    expert_product[(triton.cdiv(width, tile.block_n), blocks)](
        a,
        weight.values,
        weight.block_scales if nvfp4 else weight.values,
        weight.global_scale if nvfp4 else weight.values,
        out,
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
        hopper=_is_hopper(a.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
