"""vLLM's own conversions of expert weights and block scales."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import UnavailableError

_UTILS = "vllm.model_executor.layers.quantization.utils"


def up_first(w13: Weight) -> Weight:
    """`w13` with the up half first, by vLLM's function for its quantisation.

    Raises UnavailableError where this vLLM has no such function.
    """
    if isinstance(w13, Nvfp4):
        reorder = _function("flashinfer_fp4_moe", "reorder_w1w3_to_w3w1")
        packed, scales = reorder(w13.packed.clone(), w13.block_scales.clone())  # 0.33.0 works in place
        return replace(w13, packed=packed, block_scales=scales)
    swap = _function("flashinfer_utils", "swap_w13_to_w31")
    if isinstance(w13, Fp8):
        return replace(w13, values=swap(w13.values.clone()))
    swapped: torch.Tensor = swap(w13.clone())
    return swapped


def tiled_scales(block_scales: torch.Tensor) -> torch.Tensor:
    """Block scales [E, M, S] in tiles of 128x4, by vLLM's `swizzle_blockscale`, which needs a GPU."""
    swizzle = _function("nvfp4_utils", "swizzle_blockscale")
    tiles: torch.Tensor = swizzle(block_scales)
    return tiles


def _function(module: str, name: str) -> Any:
    try:
        # vLLM's own order of imports; the utilities alone run into a cycle.
        importlib.import_module("vllm.model_executor.layers.fused_moe")
        found = getattr(importlib.import_module(f"{_UTILS}.{module}"), name, None)
    except Exception as error:  # what an optional dependency raises while vLLM is imported is up to it
        raise UnavailableError(f"vLLM's {module} does not load: {type(error).__name__}: {error}") from error
    if found is None:
        raise UnavailableError(f"this vLLM has no {module}.{name}")
    return found
