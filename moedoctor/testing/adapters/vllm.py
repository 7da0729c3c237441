"""vLLM's MoE kernels and top-k operators, for a GPU. Each weight is converted by vLLM's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moedoctor.bench.moe.backends import UPSTREAM
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_backend import Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.testing.adapters.reference import read
from moedoctor.testing.questions import declare
from moedoctor.upstream.moe_backends.backends import VllmBackend
from moedoctor.upstream.releases.moe_kernels import MoeKernels


def make_kernel(name: str) -> Callable[..., torch.Tensor]:
    """Return the backend of that name as a MoE kernel. It refuses what vLLM's own selection refuses."""
    inputs = {variant.quantization: variant.activations for variant in UPSTREAM if variant.name == name}

    @declare(kind="moe", package="vllm", formats=list(inputs), inputs=inputs)
    def compute(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        scales: Mapping[str, torch.Tensor],
        format: str,
        activation: str,
    ) -> torch.Tensor:
        hidden, experts = hidden_states.shape[1], w2.shape[0]
        rows = w13.shape[1] if activation == "relu2" else w13.shape[1] // 2
        shape = LayerShape(hidden, rows, experts, topk_ids.shape[1], activation)
        backend = VllmBackend(Variant(name, format, inputs[format]))
        if reason := backend.unavailable(shape, str(hidden_states.device)):
            raise ValueError(reason)
        weights = read(w13, scales, "w13", format), read(w2, scales, "w2", format)
        steps = (float(scales[key]) for key in ("w13_input", "w2_input") if key in scales)
        prepared = backend.prepare(Layer(shape, format, *weights, *steps))
        return prepared(hidden_states, topk_weights, topk_ids)

    return compute


triton, marlin, humming, cutlass, deepgemm, emulation = map(
    make_kernel, ("TRITON", "MARLIN", "HUMMING", "VLLM_CUTLASS", "DEEPGEMM", "EMULATION")
)


def make_router(name: str, scoring: str) -> Callable[..., Any]:
    """Return the operator of that name as a router. `MoeKernels` gives it outputs that nobody wrote."""

    @declare(kind="router", package="vllm", scoring=scoring)
    def route(
        logits: torch.Tensor, top_k: int, renormalize: bool = False, bias: torch.Tensor | None = None
    ) -> Any:
        return getattr(MoeKernels.installed(), name)(logits, top_k, renormalize=renormalize, bias=bias)

    return route


topk_softmax, topk_sigmoid = make_router("topk_softmax", "softmax"), make_router("topk_sigmoid", "sigmoid")
