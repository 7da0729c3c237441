"""vLLM's matrix products for MoE layers, Marlin and CUTLASS, called without vLLM's layers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from moedoctor.results import UnavailableError
from moedoctor.upstream.releases.moe_kernels import MoeKernels, fill

# E = experts, T = tokens; the first T / E rows are computed by expert 0, and so on.

_UINT4_MINUS_8 = (4 << 8) | (8 << 17) | (1 << 50)
"""`scalar_types.uint4b8.id`: no exponent, 4 bits, unsigned, bias 8 (vllm/scalar_type.py)."""
GROUP = 128
"""Marlin weights that share a scale."""
BLOCK = 16
"""Tokens of one expert that Marlin computes together."""


def multiply_by_marlin(
    kernels: MoeKernels, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Call ``moe_wna16_marlin_gemm`` of any release: bfloat16 [T, N] of bfloat16 `x` [T, K].

    `weight`: int32 [E, K / 16, 2 N], 4 bits each in Marlin's order; `scales`: bfloat16 [E, K / 128, N].
    T / E must be a multiple of 16. Raises RuntimeError if the operator does.
    """
    tokens, size_k = x.shape
    experts, _, size_n = scales.shape
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count

    def copy_integers(values: torch.Tensor) -> torch.Tensor:
        return values.to(device=x.device, dtype=torch.int32)

    values = {
        "a": x,
        "c_or_none": torch.empty(tokens, size_n, dtype=x.dtype, device=x.device),
        "b_q_weight": weight,
        "b_bias_or_none": None,
        "b_scales": scales,
        "a_scales": None,
        "global_scale": None,
        "b_zeros_or_none": None,
        "g_idx_or_none": None,
        "perm_or_none": None,
        "workspace": copy_integers(torch.zeros(4 * multiprocessors)),
        "sorted_token_ids": copy_integers(torch.arange(tokens)),
        "expert_ids": copy_integers(torch.arange(experts).repeat_interleave(tokens // experts // BLOCK)),
        "num_tokens_past_padded": copy_integers(torch.tensor([tokens])),
        "topk_weights": torch.ones(tokens, device=x.device),
        "moe_block_size": BLOCK,
        "top_k": 1,
        "mul_topk_weights": False,
        "b_type_id": _UINT4_MINUS_8,
        "size_m": tokens,
        "size_n": size_n,
        "size_k": size_k,
        "is_full_k": True,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
        "thread_k": -1,
        "thread_n": -1,
        "blocks_per_sm": -1,
    }
    name = "moe_wna16_marlin_gemm"
    result: torch.Tensor = getattr(kernels.ops, name)(**fill(kernels.find_schema(name), values))
    return result


def load_operators() -> Any:
    """Load the installed vLLM's extensions and return their operators. Raises UnavailableError."""
    try:
        import vllm._C
    except (ImportError, OSError) as error:
        raise UnavailableError(f"vLLM's CUTLASS kernels cannot be loaded: {error}") from error
    with contextlib.suppress(ImportError):  # releases from about 0.20.0 have them here
        import vllm._C_stable_libtorch  # noqa: F401
    if not hasattr(torch.ops._C, "cutlass_moe_mm"):
        raise UnavailableError("the installed vLLM has no operator cutlass_moe_mm")
    return torch.ops._C


def multiply_by_cutlass(
    ops: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Call ``cutlass_moe_mm`` of `load_operators()`: bfloat16 [T, N] of `x` [T, K]; T must be above 64.

    `x`, `weight` [E, N, K]: float8_e4m3fn; `scales`: float32 [E, N, 1], one for each output channel.
    """
    experts, size_n, size_k = weight.shape
    tokens = x.shape[0]
    each = tokens // experts

    def fill_longs(value: int) -> torch.Tensor:
        return torch.full((experts,), value, dtype=torch.int64, device=x.device)

    out = torch.empty(tokens, size_n, dtype=torch.bfloat16, device=x.device)  # [T, N]
    offsets = torch.arange(experts, dtype=torch.int64, device=x.device) * each  # [E]
    sizes = torch.tensor([[each, size_n, size_k]] * experts, dtype=torch.int32, device=x.device)  # [E, 3]
    ops.cutlass_moe_mm(
        out,
        x,
        weight,
        torch.ones(1, 1, device=x.device),
        scales,
        offsets,
        sizes,
        fill_longs(size_k),
        fill_longs(size_k),
        fill_longs(size_n),
        False,
        True,
    )
    return out
