"""Hits first by vLLM's own TRITON on a GPU: the bits of a layer without a cache, also in a CUDA graph."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedoctor.models.layer_shape import LayerShape
from moedoctor.plugin import expert_cache_fix, hits_first
from moedoctor.plugin.expert_cache_layer import find_host_experts, install
from moedoctor.plugin.expert_cache_options import CacheOptions
from moedoctor.reference.moe_backend import Variant
from moedoctor.reference.moe_layer import make_layer
from moedoctor.upstream.moe_backends.backends import VllmBackend

pytestmark = [pytest.mark.gpu, pytest.mark.upstream]
SHAPE = LayerShape(512, 256, 64, 4)
SLOTS, DEVICE = 24, "cuda:0"
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layer(torch.nn.Module):
    """The attributes of vLLM's layer that the cache reads."""

    def __init__(self, prepared: Any) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(prepared._w13, requires_grad=False)
        self.w2_weight = torch.nn.Parameter(prepared._w2, requires_grad=False)
        self.quant_method = SimpleNamespace(moe_kernel=prepared.kernel)
        self.local_num_experts, self.top_k = SHAPE.experts, SHAPE.top_k


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Keep what is imported, unlike the other tests: vLLM registers types once a process."""


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose tiles and whether ids are sorted as the plug-in does in an engine."""
    triton = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.triton_moe")
    if not hasattr(triton, "_prepare_expert_assignment"):
        pytest.skip("this vLLM sorts all ids")
    for name, wrap in (
        ("try_get_optimal_moe_config", expert_cache_fix._keep_tiles),
        ("_prepare_expert_assignment", expert_cache_fix._keep_assignment),
    ):
        monkeypatch.setattr(triton, name, wrap(getattr(triton, name)))


def call_of(tokens: int, seed: int) -> Call:
    """Return (x [T, H], topk_weights [T, K], topk_ids [T, K])."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, SHAPE.hidden, generator=draw, device=DEVICE).bfloat16()
    weights = torch.rand(tokens, SHAPE.top_k, generator=draw, device=DEVICE)
    ids = torch.rand(tokens, SHAPE.experts, generator=draw, device=DEVICE).topk(SHAPE.top_k).indices.int()
    return x, weights, ids


def compute(prepared: Any, layer: Layer, call: Call) -> torch.Tensor:
    output: torch.Tensor = prepared.kernel.apply(
        call[0],
        layer.w13_weight,
        layer.w2_weight,
        call[1],
        call[2],
        activation=prepared._activation,
        global_num_experts=SHAPE.experts,
        expert_map=None,
        apply_router_weight_on_input=False,
    )
    return output.clone()


@pytest.mark.parametrize("quantization", ["bf16", "fp8"])
def test_two_calls_have_the_bits_of_a_layer_without_a_cache(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = Variant("TRITON", quantization, "none" if quantization == "bf16" else "fp8")
    backend = VllmBackend(variant)
    if (reason := backend.unavailable(SHAPE, DEVICE)) is not None:
        pytest.skip(reason)
    prepared: Any = backend.prepare(make_layer(SHAPE, quantization, device=DEVICE))
    layer = Layer(prepared)
    calls = [call_of(tokens, seed) for seed in range(8) for tokens in (1, 2, 4)]
    expected = [compute(prepared, layer, call) for call in calls]

    split = []
    in_two = hits_first.compute_in_two
    monkeypatch.setattr(hits_first, "compute_in_two", lambda *given: (split.append(1), in_two(*given))[1])
    install(layer, CacheOptions(SLOTS), torch.device(DEVICE), captured=True)
    (experts,) = find_host_experts(torch.nn.ModuleList([layer]))
    assert experts.hits_first
    for call, right in zip(calls, expected, strict=True):
        assert torch.equal(compute(prepared, layer, call), right)
    assert len(split) == len(calls)
    stats = experts.cache.stats
    assert stats.hits
    assert stats.misses

    held = calls[1]
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        output = compute(prepared, layer, held)
    for call, right in zip(calls[4::3], expected[4::3], strict=True):
        for to, values in zip(held, call, strict=True):
            to.copy_(values)
        graph.replay()
        assert torch.equal(output, right)
