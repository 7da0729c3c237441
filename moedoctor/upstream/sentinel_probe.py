"""vLLM's alignment of slots to blocks of one expert each, as its Triton and Marlin paths call it."""

from __future__ import annotations

import importlib

import torch

from moedoctor.subjects.base import UnavailableError


def align_block_size(
    ids: torch.Tensor, block: int, experts: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots int32 [B, block] (a number from T * K on is none) and the expert of each block int32 [B].

    Only blocks that the kernel counts are given. Raises UnavailableError where vLLM does not import.
    """
    try:
        module = importlib.import_module("vllm.model_executor.layers.fused_moe.moe_align_block_size")
    except Exception as error:
        raise UnavailableError(f"vllm does not import: {type(error).__name__}: {error}") from error
    slots, owners, count = module.moe_align_block_size(ids, block, experts, expert_map)
    used = int(count[0]) // block
    return slots[: used * block].reshape(used, block), owners[:used]
