"""vLLM's Marlin product for MoE layers, ``moe_wna16_marlin_gemm``, of any release behind one call."""

from __future__ import annotations

import torch

from moedoctor.upstream.releases.moe_kernels import MoeKernels, fill

_UINT4_MINUS_8 = (4 << 8) | (8 << 17) | (1 << 50)
"""`scalar_types.uint4b8.id`: no exponent, 4 bits, unsigned, bias 8 (vllm/scalar_type.py)."""

GROUP = 128
"""Weights that share a scale."""
BLOCK = 16
"""Tokens of one expert that are computed together."""


def marlin_product(
    kernels: MoeKernels, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """[T, N] of bfloat16 x [T, K], the first T / E rows by expert 0, and so on.

    `weight`: int32 [E, K / 16, 2 N], 4 bits each in Marlin's order; `scales`: bfloat16 [E, K / 128, N].
    T / E must be a multiple of 16. RuntimeError is the operator's own.
    """
    tokens, size_k = x.shape
    experts, _, size_n = scales.shape
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count

    def integers(values: torch.Tensor) -> torch.Tensor:
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
        "workspace": integers(torch.zeros(4 * multiprocessors)),
        "sorted_token_ids": integers(torch.arange(tokens)),
        "expert_ids": integers(torch.arange(experts).repeat_interleave(tokens // experts // BLOCK)),
        "num_tokens_past_padded": integers(torch.tensor([tokens])),
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
    result: torch.Tensor = getattr(kernels.ops, name)(**fill(kernels.schema(name), values))
    return result
