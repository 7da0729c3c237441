"""vLLM's MoE kernels and top-k operators, for a GPU. Each weight is converted by vLLM's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moedoctor.bench.moe.backends import UPSTREAM
from moedoctor.reference.moe_backend import Variant
from moedoctor.reference.moe_layer import Layer
from moedoctor.testing.adapters.reference import make_moe
from moedoctor.testing.questions import declare
from moedoctor.upstream.moe_backends.backends import VllmBackend
from moedoctor.upstream.releases.moe_kernels import MoeKernels


def make_kernel(name: str) -> Callable[..., Tensor]:
    """Return the backend of that name as a MoE kernel. It refuses what vLLM's own selection refuses."""
    inputs = {variant.quantization: variant.activations for variant in UPSTREAM if variant.name == name}

    def run(layer: Layer, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        backend = VllmBackend(Variant(name, layer.quantization, inputs[layer.quantization]))
        if reason := backend.unavailable(layer.shape, str(x.device)):
            raise ValueError(reason)
        return backend.prepare(layer)(x, topk_weights, topk_ids)

    return make_moe(run, package="vllm", formats=list(inputs), inputs=inputs)


triton, marlin, humming, cutlass, deepgemm, emulation = map(
    make_kernel, ("TRITON", "MARLIN", "HUMMING", "VLLM_CUTLASS", "DEEPGEMM", "EMULATION")
)


def make_router(name: str, scoring: str) -> Callable[..., Any]:
    """Return the operator of that name as a router. `MoeKernels` gives it outputs that nobody wrote."""

    @declare(kind="router", package="vllm", scoring=scoring)
    def route(logits: Tensor, top_k: int, renormalize: bool = False, bias: Tensor | None = None) -> Any:
        return getattr(MoeKernels.installed(), name)(logits, top_k, renormalize=renormalize, bias=bias)

    return route


topk_softmax, topk_sigmoid = make_router("topk_softmax", "softmax"), make_router("topk_sigmoid", "sigmoid")
