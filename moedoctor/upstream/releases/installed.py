"""Python functions of the installed vLLM. Those for weights and for tokens raise UnavailableError."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import UnavailableError
from moedoctor.upstream.releases.wheel import find_package_folders

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
SKIPPING = "#46408"
"""The pull request after which vLLM's gpt-oss Triton kernels skip ids of -1; other kernels followed."""
_FROM_IT = "remap_topk_to_local"
"""A function that it added."""


def import_vllm_module(name: str) -> Any:
    """Import a module of vLLM. Raises UnavailableError."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # an optional dependency can raise anything while vLLM is imported
        short = name.rpartition(".")[2]
        raise UnavailableError(f"vLLM's {short} does not load: {type(error).__name__}: {error}") from error


def describe_installed_release() -> str:
    """Return ``0.21.0, before #46408`` or ``0.30.0, with #46408``.

    Reads the sources and does not import vLLM. Raises UnavailableError if vLLM is not installed.
    """
    folders = [folder / "model_executor/layers/fused_moe" for folder in find_package_folders("vllm")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    if not files:
        raise UnavailableError("vllm is not installed here")
    has_it = any(_FROM_IT in file.read_text(encoding="utf-8", errors="replace") for file in files)
    return f"{importlib.metadata.version('vllm')}, {'with' if has_it else 'before'} {SKIPPING}"


def align_block_size(
    ids: torch.Tensor, block: int, experts: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the pairs of `ids` [T, K] into blocks of one expert each, as vLLM's Triton and Marlin paths do.

    Return the pairs of each block, int32 [B, block], with numbers from T * K on for padding, and its expert,
    int32 [B]. Only the blocks that the kernel counts are returned.
    """
    align = import_vllm_module(f"{FUSED_MOE}.moe_align_block_size").moe_align_block_size
    pairs, owners, count = align(ids, block, experts, expert_map)
    used = int(count[0]) // block
    return pairs[: used * block].reshape(used, block), owners[:used]


def put_up_first(w13: Weight) -> Weight:
    """Return `w13` with the up half first, by vLLM's function for its quantization."""
    if isinstance(w13, Nvfp4):
        reorder = _find_quantization_function("flashinfer_fp4_moe", "reorder_w1w3_to_w3w1")
        packed, scales = reorder(w13.packed.clone(), w13.block_scales.clone())  # 0.33.0 works in place
        return replace(w13, packed=packed, block_scales=scales)
    swap = _find_quantization_function("flashinfer_utils", "swap_w13_to_w31")
    if isinstance(w13, Fp8):
        return replace(w13, values=swap(w13.values.clone()))
    swapped: torch.Tensor = swap(w13.clone())
    return swapped


def tile_scales(block_scales: torch.Tensor) -> torch.Tensor:
    """Return block scales [E, M, S] in tiles of 128x4, by vLLM's `swizzle_blockscale`, which needs a GPU."""
    tiles: torch.Tensor = _find_quantization_function("nvfp4_utils", "swizzle_blockscale")(block_scales)
    return tiles


def _find_quantization_function(module: str, name: str) -> Any:
    import_vllm_module(FUSED_MOE)  # vLLM's own order of imports; the utilities alone run into a cycle
    utilities = import_vllm_module(f"vllm.model_executor.layers.quantization.utils.{module}")
    function = getattr(utilities, name, None)
    if function is None:
        raise UnavailableError(f"this vLLM has no {module}.{name}")
    return function


def find_offloader_version() -> str | None:
    """Return the version of the vLLM whose offloaders can be used here, or None."""
    try:
        import vllm
        from vllm.model_executor.offloader import uva  # noqa: F401
    except (ImportError, OSError):
        return None
    return str(vllm.__version__)


def offload_by_copies(layers: Sequence[torch.nn.Module], names: Sequence[str], nbytes: int) -> Any:
    """Offload by `UVAOffloader` as on WSL: no UVA, no pinned memory, copies in each forward."""
    from vllm.model_executor.offloader.uva import UVAOffloader

    offloader = UVAOffloader(cpu_offload_max_bytes=nbytes, cpu_offload_params=set(names))
    offloader.uva_offloading = offloader.pin_memory = False
    offloader.wrap_modules(iter(layers))
    return offloader
