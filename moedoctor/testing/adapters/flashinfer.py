"""FlashInfer's router of DeepSeek-V3 (capability 8.9 and newer) and its CUTLASS MoE kernel, as 9.0 has it.

nvcc compiles them at first use, the MoE kernel for hours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moedoctor.testing.questions import declare

_ACTIVATIONS = {"silu": "Swiglu", "gelu": "Geglu", "gelu_tanh": "GegluTanh", "relu2": "Relu2"}
_INPUTS = {"bf16": "none", "fp8": "fp8", "fp8-block": "fp8_block", "mxfp4": "none"}


@declare(kind="router", package="flashinfer-python", scoring="sigmoid", renormalize=True)
def route(
    logits: Tensor, top_k: int, bias: Tensor, num_groups: int = 1, topk_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Route by `fused_topk_deepseek`. Its outputs hold -7 before, so that what it leaves is seen.

    It refuses a top_k above the square of the number of groups, so one group becomes several, all taken.
    """
    experts = logits.shape[1]
    if num_groups == 1 and top_k > 1:
        fitting = (size for size in range(2, experts // 2 + 1) if experts % size == 0 and size**2 >= top_k)
        num_groups = topk_groups = next(fitting, 1)
    fused = importlib.import_module("flashinfer.fused_moe").fused_topk_deepseek
    weights = torch.full((len(logits), top_k), -7.0, dtype=logits.dtype, device=logits.device)  # [T, K]
    ids = torch.full((len(logits), top_k), -7, dtype=torch.int32, device=logits.device)  # [T, K]
    fused(logits, bias.to(logits.dtype), num_groups, topk_groups, top_k, 1.0, weights, ids)
    return weights, ids


@declare(
    kind="moe",
    package="flashinfer-python",
    formats=tuple(_INPUTS),
    inputs=_INPUTS,
    activations=tuple(_ACTIVATIONS),
    gate="last",
)
def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    scales: Mapping[str, Tensor],
    format: str,
    activation: str = "silu",
) -> Tensor:
    """Compute a layer by `cutlass_fused_moe`, called as vLLM 0.33.0 does. Its output holds NaN before."""
    library = importlib.import_module("flashinfer.fused_moe")
    output = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)  # [T, H]
    options: dict[str, Any] = {"quant_scales": []}
    if format == "fp8":
        first, second = scales["w13_input"], scales["w2_input"]
        options["quant_scales"] = [scales["w13"] * first, 1 / second, scales["w2"] * second, first]
        x = (x.float() / first).clamp(-448, 448).to(torch.float8_e4m3fn)  # [T, H]
    elif format == "fp8-block":
        options = {"quant_scales": [scales["w13"], scales["w2"]], "use_deepseek_fp8_block_scale": True}
    elif format == "mxfp4":
        fold = library.interleave_moe_scales_for_sm90_mixed_gemm
        options = {"quant_scales": [fold(scales["w13"]), fold(scales["w2"])], "use_w4_group_scaling": True}
        w13, w2 = (library.interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4") for codes in (w13, w2))
    library.cutlass_fused_moe(
        x,
        topk_ids.int(),
        topk_weights,
        w13,
        w2,
        torch.bfloat16,
        output=output,
        activation_type=getattr(library.ActivationType, _ACTIVATIONS[activation]),
        **options,
    )
    return output
