"""The float32 reference as a MoE kernel, and what makes one of a function of a whole layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference import e2m1
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.moe_layer import Layer, Problem, compute_expected
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.testing.questions import declare

Run = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]
"""(layer, x [T, H], topk_weights [T, K], topk_ids [T, K]) -> [T, H]."""


def make_moe(run: Run, **declared: Any) -> Callable[..., Tensor]:
    """Return a MoE kernel that computes by `run`; `declared` as in `declare`."""

    @declare(kind="moe", **declared)
    def compute(
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        scales: Mapping[str, Tensor],
        format: str,
        activation: str = "silu",
    ) -> Tensor:
        rows = w13.shape[1] if activation == "relu2" else w13.shape[1] // 2
        shape = LayerShape(x.shape[1], rows, len(w2), topk_ids.shape[1], activation)
        weights = (
            read(w13, scales, "w13", format, 1 if activation == "relu2" else 2),
            read(w2, scales, "w2", format),
        )
        steps = (float(scales[key]) for key in ("w13_input", "w2_input") if key in scales)
        return run(Layer(shape, format, *weights, *steps), x, topk_weights, topk_ids)

    return compute


def read(values: Tensor, scales: Mapping[str, Tensor], name: str, format: str, parts: int = 1) -> Weight:
    """Return ``w13``, of `parts` with blocks of their own, or ``w2``: an example of how scales are read."""
    if format == "fp8":
        return Fp8(values, scales[name])
    if format == "fp8-block":
        return Fp8(values, scales[name], (128, 128), parts)
    if format == "nvfp4":
        return Nvfp4(values, scales[name], scales[f"{name}_global"])
    if format == "mxfp4":
        factor = torch.exp2(scales[name].float() - 127)  # [E, N, K/32]
        weight: Tensor = e2m1.decode(e2m1.unpack(values)) * factor.repeat_interleave(32, -1)
        return weight
    return values


def _compute(layer: Layer, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    known = torch.where((topk_ids >= 0) & (topk_ids < layer.shape.experts), topk_ids, -1)  # [T, K]
    return compute_expected(Problem(layer, x, topk_weights, known), "none").bfloat16()


compute = make_moe(_compute, activations=("silu", "gelu", "gelu_tanh", "relu2"))
