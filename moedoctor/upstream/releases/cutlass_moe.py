"""vLLM's CUTLASS product for FP8 MoE layers, ``cutlass_moe_mm``, of the installed vLLM."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from moedoctor.results import UnavailableError


def operators() -> Any:
    """The namespace that holds it, filled by loading vLLM's extensions; raises UnavailableError without."""
    try:
        import vllm._C
    except (ImportError, OSError) as error:
        raise UnavailableError(f"vLLM's CUTLASS kernels cannot be loaded: {error}") from error
    with contextlib.suppress(ImportError):  # where releases from about 0.20.0 keep them
        import vllm._C_stable_libtorch  # noqa: F401
    if not hasattr(torch.ops._C, "cutlass_moe_mm"):
        raise UnavailableError("the installed vLLM has no operator cutlass_moe_mm")
    return torch.ops._C


def cutlass_product(ops: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[T, N] in bfloat16 of x [T, K], the first T / E rows by expert 0, and so on; T above 64.

    `x`, `weight` [E, N, K]: float8_e4m3fn; `scales`: float32 [E, N, 1], one each output channel.
    """
    experts, size_n, size_k = weight.shape
    tokens = x.shape[0]
    each = tokens // experts

    def longs(value: int) -> torch.Tensor:
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
        longs(size_k),
        longs(size_k),
        longs(size_n),
        False,
        True,
    )
    return out
