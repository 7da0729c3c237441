"""GPU time of a release's top-k kernels, and what its FP8 kernel makes of NaN: the claims of MD001.

Each function measures in the calling process, on a device that is already set, and returns plain
figures. Times are microseconds a launch in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moedoctor.bench.timing import Call, compare_times
from moedoctor.upstream.releases.moe_kernels import MoeKernels
from moedoctor.upstream.releases.wheel import find_installed_library

TOKENS = (1, 128, 1024, 8192)
EXPERTS, TOP_K = 128, 8
_INPUT_SETS = 4
_NAN_SHARE = 0.1
"""The share of rows that are all NaN, as in vllm-project/vllm#39593."""


@dataclass(frozen=True)
class Batch:
    """Inputs and outputs of one shape, several sets of them."""

    router: str
    logits: tuple[torch.Tensor, ...]
    """[T, E] each."""
    bias: torch.Tensor | None
    """[E] float32"""
    weights: torch.Tensor
    """[T, K] float32"""
    ids: torch.Tensor
    """[T, K] int32"""

    @property
    def shape(self) -> str:
        return f"{self.router} {self.logits[0].shape[0]}x{self.logits[0].shape[1]}"


def make_batch(router: str, tokens: int, device: str) -> Batch:
    """Return random bf16 logits, the first `_NAN_SHARE` of rows NaN. Sigmoid has a bias."""
    draw = torch.Generator(device).manual_seed(0)
    logits = [
        torch.randn(tokens, EXPERTS, generator=draw, device=device).bfloat16() for _ in range(_INPUT_SETS)
    ]
    for rows in logits:
        rows[: int(tokens * _NAN_SHARE)] = float("nan")
    bias = None if router == "softmax" else torch.rand(EXPERTS, generator=draw, device=device) - 0.5
    weights = torch.empty(tokens, TOP_K, device=device)  # [T, K]
    ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device=device)  # [T, K]
    return Batch(router, tuple(logits), bias, weights, ids)


def separate_launch(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time what `torch.nan_to_num` before the release's kernels adds, at 128 tokens and 128 experts."""
    kernels, rows = MoeKernels.load(_find_library(unit, sources)), []
    for router in ("softmax", "sigmoid"):
        batch = make_batch(router, 128, device)
        plain = _bind_calls(kernels, batch)
        cleaned = [torch.empty_like(logits) for logits in batch.logits]  # [T, E] each
        after = _bind_calls(kernels, replace(batch, logits=tuple(cleaned)))
        with_cleaning = [
            partial(_call_after_cleaning, logits, out, call)
            for logits, out, call in zip(batch.logits, cleaned, after, strict=True)
        ]
        calls: dict[str, Sequence[Call]] = {"alone": plain, "with_nan_to_num": with_cleaning}
        times = compare_times(calls, baseline="alone")
        row = {"kernel": f"topk_{router}", **times.ratios["with_nan_to_num"].to_row("overhead", offset=-1)}
        for name in reversed(calls):
            row |= times.times[name].to_row(f"{name}_us")
        rows.append(row)
    return {"rows": rows}


def _call_after_cleaning(source: torch.Tensor, out: torch.Tensor, call: Call) -> None:
    torch.nan_to_num(source, nan=float("-inf"), out=out)
    call()


def time_kernels(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time the release's `topk_softmax` alone; another release needs another process."""
    kernels, rows = MoeKernels.load(_find_library(unit, sources)), []
    for tokens in TOKENS:
        batch = make_batch("softmax", tokens, device)
        spread = compare_times({"kernel": _bind_calls(kernels, batch)}, baseline="kernel").times["kernel"]
        rows.append({"shape": batch.shape, **spread.to_row("kernel_us")})
    return {"rows": rows}


def count_fp8_nan(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Count what the release's FP8 quantization kernel, and torch's own cast, make of NaN."""
    from moedoctor.upstream.releases.moe_kernels import quantize_to_fp8

    values = torch.randn(64, 512, device=device).bfloat16()  # [T, N]
    values[::2] = float("nan")
    values[1::4] = -float("nan")
    nan = values.isnan()  # [T, N]
    quantized = quantize_to_fp8(_find_library(unit, sources), values).float()  # [T, N]
    sound = (quantized[~nan] - values[~nan].float()).abs() <= values[~nan].float().abs() / 16 + 2**-9
    if not bool(sound.all()):
        raise RuntimeError("the quantization kernel is wrong on finite values, so its NaN means nothing")
    became = quantized[nan]
    return {
        "nan_values": int(nan.sum()),
        "clamped_to_plus_448": float((became == 448).double().mean()),
        "clamped_to_minus_448": float((became == -448).double().mean()),
        "still_nan": float(became.isnan().double().mean()),
        "torch_cast_still_nan": float(values[nan].to(torch.float8_e4m3fn).float().isnan().double().mean()),
    }


def _bind_calls(kernels: MoeKernels, batch: Batch) -> list[Call]:
    function, outputs = f"topk_{batch.router}", (batch.weights, batch.ids)
    return [
        kernels.bind(function, *outputs, logits, bias=batch.bias, renormalize=False)
        for logits in batch.logits
    ]


def _find_library(unit: str, sources: Mapping[str, str]) -> Path:
    return find_installed_library() if unit == "installed" else Path(sources[unit])
