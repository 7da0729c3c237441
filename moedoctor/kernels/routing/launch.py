"""Chooses the kernel and the shape for a batch, and launches it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.routing.half_softmax import half_softmax_kernel
from moedoctor.kernels.routing.topk import topk_kernel

_WARP = 32
_VECTOR_BYTES = 16
_MOST_EXPERTS = 512
"""The most that the half-precision kernel holds in registers."""
_LONGEST_PICK = 16
"""The largest `top_k` that it unrolls."""


@dataclass(frozen=True)
class Shape:
    """The tiles of logits of a kernel's programs."""

    rows: int
    """Tokens a program."""
    lanes: int
    """Lanes a row."""
    width: int
    """Experts a lane."""
    warps: int
    registers: int | None = None
    """Registers a thread at most: what rare rows need must not keep other programs off the GPU."""


def launch_topk(
    logits: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    scoring: str,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    num_groups: int = 1,
    topk_groups: int = 1,
    routed_scaling_factor: float = 1.0,
    nan_policy: str | None = "zero",
    shape: Shape | None = None,
) -> None:
    """Route `logits` [T, E] into `weights` float32 [T, K] and `ids` int32 [T, K] in one launch.

    Arguments are those of `moedoctor.fixes.routing`, which checks them. ``nan_policy=None`` leaves the
    NaN handling out, to measure what it costs; its results on rows that hold a NaN mean nothing. `shape`
    replaces the tuned one.
    """
    (tokens, experts), top_k = logits.shape, ids.shape[1]
    if tokens == 0:
        return
    policy, size = nan_policy or "none", logits.element_size()
    half = is_half_softmax(logits, top_k, scoring, bias, num_groups, routed_scaling_factor)
    if shape is None and half:
        shape = choose_half_softmax_shape(tokens, experts)
    shape = shape or choose_topk_shape(tokens, experts, top_k, num_groups, size, policy)
    programs, places = triton.cdiv(tokens, shape.rows), (tokens, *logits.stride())
    common = {
        "experts": experts,
        "top_k": top_k,
        "renormalize": renormalize,
        "policy": policy,
        "rows": shape.rows,
        "lanes": shape.lanes,
        "width": shape.width,
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
    }
    groups = num_groups if num_groups > 1 else 0
    with make_current(logits):
        if half:
            half_softmax_kernel[(programs,)](logits, weights, ids, *places, **common)
            return
        topk_kernel[(programs,)](
            logits,
            logits if bias is None else bias,
            weights,
            ids,
            *places,
            0 if bias is None else bias.stride(0),
            routed_scaling_factor,
            scoring=scoring,
            has_bias=bias is not None,
            groups=groups,
            kept_groups=topk_groups,
            group_size=experts // num_groups,
            padded_groups=triton.next_power_of_2(groups) if groups else 0,
            **common,
        )


def is_half_softmax(
    logits: torch.Tensor, top_k: int, scoring: str, bias: torch.Tensor | None, num_groups: int, scale: float
) -> bool:
    """Return True if `half_softmax_kernel` takes this call."""
    return (
        scoring == "softmax"
        and bias is None
        and num_groups == 1
        and scale == 1.0
        and logits.dtype in (torch.bfloat16, torch.float16)
        and logits.shape[1] <= _MOST_EXPERTS
        and top_k <= _LONGEST_PICK
    )


def choose_half_softmax_shape(tokens: int, experts: int) -> Shape:
    """Return the shape of `half_softmax_kernel`, from measurements on an H200.

    Few tokens: a program of one warp each. More: fewer programs with more rows, as starting a program takes
    about as long as routing a row.
    """
    lanes, width = _cover(triton.next_power_of_2(experts), _WARP, element_size=2)
    together = max(_WARP // lanes, 1)  # rows that share a warp
    if tokens <= 512 or lanes > _WARP:
        return Shape(rows=together, lanes=lanes, width=width, warps=1)
    if width == 8:
        return Shape(rows=2, lanes=lanes, width=width, warps=1, registers=64)
    if tokens <= 2048 or lanes < _WARP:
        return Shape(rows=4 * together, lanes=lanes, width=width, warps=4, registers=64)
    return Shape(rows=16, lanes=lanes, width=width, warps=4, registers=72)


def choose_topk_shape(
    tokens: int, experts: int, top_k: int, num_groups: int, element_size: int, policy: str = "zero"
) -> Shape:
    """Return the shape of `topk_kernel`: each padded group starts on a lane of its own.

    Programs have one warp if that is as fast: then no exchange between warps is needed to decide whether a
    row is routed again.
    """
    groups = triton.next_power_of_2(num_groups)
    columns = groups * triton.next_power_of_2(experts // num_groups)
    lanes, width = _cover(columns, max(_WARP, groups, triton.next_power_of_2(top_k)), element_size)
    if lanes > _WARP:
        return Shape(rows=1, lanes=lanes, width=width, warps=min(max(columns // 1024, 1), 8))
    together = _WARP // lanes  # rows that share a warp
    if tokens <= 512:
        return Shape(rows=together, lanes=lanes, width=width, warps=1)
    if width <= 4 and tokens <= 2048:
        return Shape(rows=2 * together, lanes=lanes, width=width, warps=1, registers=80)
    if width <= 4:
        registers = 80 if policy == "finite" else None
        return Shape(rows=4 * together, lanes=lanes, width=width, warps=1, registers=registers)
    return Shape(rows=4 * together, lanes=lanes, width=width, warps=4)


def _cover(columns: int, lanes: int, element_size: int) -> tuple[int, int]:
    """Return lanes, at least `lanes`, and elements a lane, at most one vector load."""
    widest = max(_VECTOR_BYTES // element_size, 1)
    lanes = min(columns, max(lanes, columns // widest))
    return lanes, columns // lanes
