"""Compiles kernels for GPUs that need not be there, with what their launchers give them.

A launcher is called with tensors that are on a GPU and have no memory. Its kernels are compiled with the
types, constants and options of that call, assembled by the ptxas that Triton brings, and not run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moedoctor.kernels.moe.expert_weights import ExpertWeights, make_fp8_weights
from moedoctor.kernels.moe.launch import _read_capability

LOWERINGS = (86, 90, 100, 120)
"""A capability of each kind that Triton compiles in its own way, so not each one needs compiles of its own.

80 and 89 compile as 86 does and have as much shared memory or more, and 121 compiles as 120 does. GPUs before
80 are refused, because their tensor cores have no bfloat16.
"""
_SHARED = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that one program can have; 99 elsewhere."""


@contextmanager
def compile_launches(capability: int) -> Iterator[list[Any]]:
    """Compile every launch in the block for a GPU with `capability`, and add it to the list that is yielded.

    Tensors of the block have no memory, so nothing in it may read a value.
    """
    done: list[Any] = []

    def launch(kernel: Any, grid: Any) -> Any:
        def compile_call(*arguments: Any, **options: Any) -> None:
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
            assert compiled.asm["cubin"][:4] == b"\x7fELF", (kernel, options)
            assert compiled.metadata.shared <= _SHARED.get(capability, 99) * 1024, (kernel, options)
            done.append(compiled)

        return compile_call  # None, as from the interpreter: nothing is kept to be launched again

    gpu = SimpleNamespace(
        get_current_device=lambda: capability,  # Triton keeps the compiled forms of each device apart
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    _read_capability.cache_clear()
    try:
        with (
            patch.object(driver, "_active", gpu),
            patch.object(JITFunction, "__getitem__", launch),
            patch.object(torch.cuda, "current_device", lambda: 0),
            patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
            patch.object(FakeTensor, "data_ptr", lambda x: x.storage_offset() * x.element_size()),
            patch.object(FakeTensor, "__getitem__", _take_rows),
            FakeTensorMode(),
            torch.device("cuda"),
        ):
            yield done
    finally:
        _read_capability.cache_clear()


def _take_rows(x: torch.Tensor, rows: int | slice) -> torch.Tensor:
    """Return ``x[rows]``, for which a torch without CUDA would want a GPU."""
    if isinstance(rows, int):
        return x.select(0, rows)
    start, stop, _ = rows.indices(len(x))
    return x.narrow(0, start, stop - start)


def make_empty_layer(
    quantization: str,
    tokens: int,
    *,
    activation: str = "silu",
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int, int] = (128, 2048, 768, 8),
) -> tuple[torch.Tensor, ExpertWeights, ExpertWeights, torch.Tensor, torch.Tensor]:
    """Return what `run_experts` takes, for a block of `compile_launches`.

    `quantization`: ``none``, ``nvfp4``, or ``fp8`` with a scale for each half; ``fp8 rows`` has one for each
    row, ``fp8 128x128`` for blocks of that size. `sizes`: experts, hidden, intermediate and top_k.
    """
    experts, hidden_size, intermediate_size, top_k = sizes
    halves = 1 if activation == "relu2" else 2
    weights = [
        _make_weights(quantization, (experts, rows, depth), halves if rows != hidden_size else 1, bias, dtype)
        for rows, depth in ((halves * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    ]
    ids = torch.empty(tokens, top_k, dtype=torch.int32 if tokens > 1 else torch.int64)
    return torch.empty(tokens, hidden_size, dtype=dtype), weights[0], weights[1], torch.empty(ids.shape), ids


def _make_weights(
    quantization: str, shape: tuple[int, int, int], halves: int, has_bias: bool, dtype: torch.dtype
) -> ExpertWeights:
    experts, rows, depth = shape
    bias = torch.empty(experts, rows, dtype=dtype) if has_bias else None
    if quantization == "none":
        return ExpertWeights(torch.empty(shape, dtype=dtype), bias=bias)
    if quantization == "nvfp4":
        groups = -(-depth // 64)  # of `pack_words`, which reads values
        words = torch.empty(experts, rows, 8 * groups, dtype=torch.int32)
        scales = torch.empty(experts, rows, groups, dtype=torch.int32)
        return ExpertWeights(words, scales, torch.empty(experts, halves), bias, halves=halves)
    values, kind = torch.empty(shape, dtype=torch.float8_e4m3fn), quantization.partition(" ")[2]
    if kind in ("", "rows"):
        scale = torch.empty((experts, rows, 1) if kind else (experts, halves))
        return make_fp8_weights(values, scale, bias=bias)
    tall, wide = map(int, kind.split("x"))
    scale = torch.empty(experts, halves * -(-rows // halves // tall), -(-depth // wide))
    return make_fp8_weights(values, scale, block=(tall, wide), halves=halves, bias=bias)
