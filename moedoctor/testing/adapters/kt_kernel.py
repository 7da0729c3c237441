"""kt-kernel's MoE for CPUs, by the AMX and AVX2 classes of its extension.

`KTMoEWrapper` pins host memory, which needs a GPU. Its steps are taken here without it: weights are loaded as
its `load_weights` does, and ids and shares are copied as 64 bits and float32, as its `forward` does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moedoctor.testing.questions import declare

# T = tokens, E = experts, K = top_k, H = hidden size, I = intermediate size
_AMX = {
    "bf16": "AMXBF16_MOE",
    "fp8": "AMXFP8PerChannel_MOE",
    "fp8-block": "AMXFP8_MOE",
    "mxfp4": "AMXFP4_KGroup_MOE",
}
_AVX2 = {
    "bf16": "AVX2BF16_MOE",
    "fp8-block": "AVX2FP8_MOE",
    "mxfp4": "AVX2MXFP4_MOE",
    "nvfp4": "AVX2MXFP4_MOE",
}
_GROUPS = {"fp8-block": 128, "mxfp4": 32, "nvfp4": 16}
"""Format -> columns that share a scale."""


@functools.cache
def _start_workers() -> Any:
    """Return the queue of the workers; a process has one."""
    extension = importlib.import_module("kt_kernel").kt_kernel_ext
    pool = extension.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [2]
    return extension.CPUInfer(pool)


def _list_scales(scales: Mapping[str, Tensor], name: str, weight: Tensor, format: str) -> Tensor | None:
    """Return the scales of ``w13`` or ``w2`` as the kernels read them, [E, N] or [E, N, blocks]."""
    if format == "bf16":
        return None
    if format == "fp8":  # a scale for each row
        return scales[name].float()[:, None].expand(weight.shape[:2]).contiguous()
    if format == "mxfp4":
        return torch.exp2(scales[name].float() - 127).bfloat16()
    if format == "nvfp4":
        return (scales[name].float() * scales[f"{name}_global"].float()[:, None, None]).bfloat16()
    return scales[name].float().contiguous()


def _list_addresses(experts: Tensor | None, count: int) -> list[list[int]]:
    """Return the addresses of each expert's tensor, for one NUMA node."""
    return [[0] * count if experts is None else [each.data_ptr() for each in experts]]


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy without gaps, [max(T, 1), ...]: an empty tensor has no address."""
    copy = torch.zeros(max(len(tensor), 1), tensor.shape[1], dtype=dtype)
    copy[: len(tensor)] = tensor
    return copy


def make_kernel(classes: Mapping[str, str]) -> Callable[..., Tensor]:
    """Return the classes of kt-kernel's extension as a MoE kernel; `classes`: format -> name."""

    @declare(kind="moe", package="kt-kernel", formats=list(classes))
    def compute(
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        scales: Mapping[str, Tensor],
        format: str,
    ) -> Tensor:
        workers = _start_workers()
        moe = importlib.import_module("kt_kernel").kt_kernel_ext.moe
        experts, top_k, rows = len(w2), topk_ids.shape[1], w13.shape[1] // 2
        on_gpu = torch.zeros(experts, dtype=torch.bool)
        config = moe.MOEConfig(experts, top_k, x.shape[1], rows, on_gpu.data_ptr())
        config.pool = workers.backend_
        config.max_len = 512  # `chunked_prefill_size` of the wrapper
        s13, s2 = (_list_scales(scales, name, w, format) for name, w in (("w13", w13), ("w2", w2)))
        gate, up = w13.chunk(2, 1)  # each [E, I, ...]
        gate_scale, up_scale = (None, None) if s13 is None else s13.chunk(2, 1)
        config.gate_projs, config.up_projs, config.down_projs = (
            _list_addresses(w, experts) for w in (gate, up, w2)
        )
        config.gate_scales, config.up_scales, config.down_scales = (
            _list_addresses(scale, experts) for scale in (gate_scale, up_scale, s2)
        )
        if format != "bf16":
            config.quant_config.bits = 4 if format in ("mxfp4", "nvfp4") else 8
            config.quant_config.zero_point = False
            config.quant_config.per_channel = format == "fp8"
            config.quant_config.group_size = _GROUPS.get(format, 0)
        layer = getattr(moe, classes[format])(config)
        order, count = torch.arange(experts), torch.tensor([len(x)], dtype=torch.int32)
        workers.submit(layer.load_weights_task(order.data_ptr()))
        workers.sync()
        ids, shares = _copy(topk_ids, torch.int64), _copy(topk_weights, torch.float32)
        hidden = _copy(x, x.dtype)
        output = torch.zeros_like(hidden)  # the wrapper's buffer is zero at first, too
        addresses = (each.data_ptr() for each in (ids, shares, hidden, output))
        workers.submit(layer.forward_task(count.data_ptr(), top_k, *addresses, False))
        workers.sync()
        return output[: len(x)]

    return compute


run_amx, run_avx2 = make_kernel(_AMX), make_kernel(_AVX2)
