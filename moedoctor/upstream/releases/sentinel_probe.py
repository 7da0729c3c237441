"""vLLM's alignment of slots to blocks of one expert each, as its Triton and Marlin paths call it.

And whether the installed vLLM is from before the first change that had its kernels skip ids of -1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from moedoctor.results import UnavailableError

SKIPPING = "#46408"
"""The pull request with which vLLM's gpt-oss Triton kernels came to skip -1; other kernels followed."""
_FROM_IT = "remap_topk_to_local"
"""A function that it brought."""


def installed_release() -> str:
    """``0.21.0, before #46408`` or ``0.30.0, with #46408``, read from the sources and not imported.

    Raises UnavailableError where vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    folders = [Path(one) for one in (spec.submodule_search_locations or [])] if spec else []
    files = [file for one in folders for file in (one / "model_executor/layers/fused_moe").rglob("*.py")]
    if not files:
        raise UnavailableError("vllm is not installed here")
    has_it = any(_FROM_IT in file.read_text(encoding="utf-8", errors="replace") for file in files)
    return f"{importlib.metadata.version('vllm')}, {'with' if has_it else 'before'} {SKIPPING}"


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
