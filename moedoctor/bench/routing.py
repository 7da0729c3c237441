"""GPU time of top-k routing: ours against a release's kernel, with and without a NaN policy.

Each function measures in the calling process, on a device that is already set, and returns plain
figures. Times are microseconds a launch in a CUDA graph; results are checked before they are timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moedoctor.bench.timing import Call, compare_times
from moedoctor.kernels.routing.launch import Shape, half_softmax_shape, launch_topk, topk_shape
from moedoctor.reference import routing as reference
from moedoctor.reference.agreement import differing_rows
from moedoctor.results import UnavailableError
from moedoctor.upstream.releases.moe_kernels import MoeKernels
from moedoctor.upstream.releases.wheel import KernelError, installed_library

TOKENS = (1, 128, 1024, 8192)
EXPERTS = (128, 256)
TOP_K = 8
_INPUT_SETS = 4
_NAN_SHARE = 0.1
"""Rows of the cost measurements that are all NaN, as in vllm-project/vllm#39593."""


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
    renormalize: bool = False

    @property
    def shape(self) -> str:
        shape = f"{self.router} {self.logits[0].shape[0]}x{self.logits[0].shape[1]}"
        return f"{shape} renormalized" if self.renormalize else shape

    @property
    def scoring(self) -> str:
        return "softmax" if self.router == "softmax" else "sigmoid"

    @property
    def function(self) -> str:
        return "grouped_topk" if self.router == "grouped" else f"topk_{self.router}"

    @property
    def options(self) -> dict[str, Any]:
        """What every implementation of the router takes."""
        groups = {"num_groups": 8, "topk_groups": 4} if self.router == "grouped" else {}
        return {"bias": self.bias, "renormalize": self.renormalize, **groups}


def make_batch(
    router: str, tokens: int, experts: int, device: str, *, nan_share: float = 0.0, renormalize: bool = False
) -> Batch:
    """Return random bf16 logits; the first `nan_share` of rows is NaN. Sigmoid and grouped have a bias."""
    draw = torch.Generator(device).manual_seed(0)
    logits = [
        torch.randn(tokens, experts, generator=draw, device=device).bfloat16() for _ in range(_INPUT_SETS)
    ]
    for rows in logits:
        rows[: int(tokens * nan_share)] = float("nan")
    bias = None if router == "softmax" else torch.rand(experts, generator=draw, device=device) - 0.5
    weights = torch.empty(tokens, TOP_K, device=device)  # [T, K]
    ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device=device)  # [T, K]
    return Batch(router, tuple(logits), bias, weights, ids, renormalize)


def against_peer(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time ours and the release's `topk_softmax` in turn, over TOKENS and EXPERTS, plain and renormalized."""
    return _compared(_load(unit, sources), [("softmax", False), ("softmax", True)], device)


def other_routers_against_peer(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time ours and the release's `topk_sigmoid` and `grouped_topk` in turn, with a bias."""
    return _compared(_load(unit, sources), [("sigmoid", False), ("sigmoid", True), ("grouped", True)], device)


def policy_cost(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time each NaN policy relative to the same kernel and shape without one; clean rows, all routers."""
    rows = []
    for router, tokens, policy in product(("softmax", "sigmoid", "grouped"), TOKENS, ("zero", "finite")):
        batch = make_batch(router, tokens, EXPERTS[0], device)
        shape = _shape(batch, policy)
        calls = {"none": _ours(batch, None, shape), "policy": _ours(batch, policy, shape)}
        rows.append({"shape": batch.shape, "policy": policy, **_in_turn(calls, "overhead", offset=-1)})
    return {"rows": rows}


def separate_launch(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time what `torch.nan_to_num` before the release's kernels adds, at 128 tokens and 128 experts."""
    kernels, rows = _load(unit, sources), []
    for router in ("softmax", "sigmoid"):
        batch = make_batch(router, 128, 128, device, nan_share=_NAN_SHARE)
        plain = _peer(kernels, batch)
        cleaned = [torch.empty_like(logits) for logits in batch.logits]  # [T, E] each
        after = _peer(kernels, replace(batch, logits=tuple(cleaned)))
        with_cleaning = [
            partial(_call_after_cleaning, logits, out, call)
            for logits, out, call in zip(batch.logits, cleaned, after, strict=True)
        ]
        times = _in_turn({"alone": plain, "with_nan_to_num": with_cleaning}, "overhead", offset=-1)
        rows.append({"kernel": f"topk_{router}", **times})
    return {"rows": rows}


def _call_after_cleaning(source: torch.Tensor, out: torch.Tensor, call: Call) -> None:
    torch.nan_to_num(source, nan=float("-inf"), out=out)
    call()


def kernel_times(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Time the release's `topk_softmax` alone; another release needs another process."""
    kernels, rows = _load(unit, sources), []
    for tokens in TOKENS:
        batch = make_batch("softmax", tokens, 128, device, nan_share=_NAN_SHARE)
        spread = compare_times({"kernel": _peer(kernels, batch)}, baseline="kernel").times["kernel"]
        rows.append({"shape": batch.shape, **spread.row("kernel_us")})
    return {"rows": rows}


def fp8_nan(unit: str, device: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Count what the release's FP8 quantization kernel, and torch's own cast, make of NaN."""
    from moedoctor.upstream.releases.moe_kernels import static_scaled_fp8_quant

    values = torch.randn(64, 512, device=device).bfloat16()  # [T, N]
    values[::2] = float("nan")
    values[1::4] = -float("nan")
    nan = values.isnan()  # [T, N]
    quantised = static_scaled_fp8_quant(_path(unit, sources), values).float()  # [T, N]
    sound = (quantised[~nan] - values[~nan].float()).abs() <= values[~nan].float().abs() / 16 + 2**-9
    if not bool(sound.all()):
        raise RuntimeError("the quantisation kernel is wrong on finite values, so its NaN means nothing")
    became = quantised[nan]
    return {
        "nan_values": int(nan.sum()),
        "clamped_to_plus_448": float((became == 448).double().mean()),
        "clamped_to_minus_448": float((became == -448).double().mean()),
        "still_nan": float(became.isnan().double().mean()),
        "torch_cast_still_nan": float(values[nan].to(torch.float8_e4m3fn).float().isnan().double().mean()),
    }


def _compared(kernels: MoeKernels, routers: Sequence[tuple[str, bool]], device: str) -> dict[str, Any]:
    rows = []
    for (router, renormalize), experts, tokens in product(routers, EXPERTS, TOKENS):
        batch = make_batch(router, tokens, experts, device, renormalize=renormalize)
        ours, peer = _ours(batch, "zero"), _peer(kernels, batch)
        correct = all(_is_right(batch, index, call) for index, call in enumerate(ours))
        row: dict[str, Any] = {"shape": batch.shape, "tokens": tokens, "correct": correct}
        if correct:  # a wrong result is not timed
            row |= _in_turn({"peer": peer, "ours": ours}, "time_ratio")
        rows.append(row)
    return {"rows": rows, "top_k": TOP_K, "dtype": "bfloat16"}


def _in_turn(calls: Mapping[str, Sequence[Call]], ratio: str, *, offset: float = 0.0) -> dict[str, float]:
    """Return the `ratio` of the second call's time to the first's, and microseconds of each by its name."""
    first, second = calls
    times = compare_times(calls, baseline=first)
    row = times.ratios[second].row(ratio, offset=offset)
    for name in (second, first):
        row |= times.times[name].row(f"{name}_us")
    return row


def _is_right(batch: Batch, index: int, call: Call) -> bool:
    batch.weights.fill_(float("nan"))
    batch.ids.fill_(-1)
    call()
    logits = batch.logits[index]
    _, expected = getattr(reference, batch.function)(logits.float(), TOP_K, **batch.options)
    wrong = differing_rows(
        logits,
        batch.ids,
        batch.weights,
        expected,
        scoring=batch.scoring,
        bias=batch.bias,
        renormalize=batch.renormalize,
    )
    return not bool(wrong.any())


def _shape(batch: Batch, policy: str) -> Shape:
    (tokens, experts), size = batch.logits[0].shape, batch.logits[0].element_size()
    if batch.router == "softmax":
        return half_softmax_shape(tokens, experts)
    return topk_shape(tokens, experts, TOP_K, batch.options.get("num_groups", 1), size, policy)


def _ours(batch: Batch, policy: str | None, shape: Shape | None = None) -> list[Call]:
    return [
        partial(
            launch_topk,
            logits,
            batch.weights,
            batch.ids,
            scoring=batch.scoring,
            nan_policy=policy,
            shape=shape,
            **batch.options,
        )
        for logits in batch.logits
    ]


def _peer(kernels: MoeKernels, batch: Batch) -> list[Call]:
    if batch.router == "grouped":
        return [kernels.bound_grouped(logits, TOP_K, **batch.options) for logits in batch.logits]
    outputs = (batch.weights, batch.ids)
    return [kernels.bound(batch.function, *outputs, logits, **batch.options) for logits in batch.logits]


def _path(unit: str, sources: Mapping[str, str]) -> Path:
    return installed_library() if unit == "installed" else Path(sources[unit])


def _load(unit: str, sources: Mapping[str, str]) -> MoeKernels:
    try:
        return MoeKernels.load(_path(unit, sources))
    except KernelError as error:
        raise UnavailableError(str(error)) from error
