"""Why compiled cells of the fix `offload` have a second control, on a CPU with real `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moedoctor.fixes.offloader import offload
from moedoctor.upstream.engine.probes import take_off_the_host

WIDTH, TOKENS, LAYERS = 128, 16, 2


@torch.library.custom_op("moedoctor_second_control::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [T, H]. The compiler does not fuse across it, as with vLLM's attention and MoE operators."""
    return (x.float().cumsum(0) / torch.arange(1, len(x) + 1)[:, None]).bfloat16()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def normalised(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """RMS norm of ``x + residual``, and that sum; [T, H] each."""
    wide = x.float() + residual
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)  # [T, H]
    return scaled.bfloat16() * weight, wide.bfloat16()


class Layer(nn.Module):
    """Like a decoder layer of vLLM: returns an update and the residual, which the next layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.norm = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = normalised(opaque(x), self.norm, residual)
        return self.product(x), residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(x)  # [T, H]
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:weights are no longer prefetched")
def test_rounding_depends_on_the_code_and_not_on_the_place_of_weights() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(TOKENS, WIDTH).bfloat16()
    eager, plain = model(x), torch.compile(model, fullgraph=True)(x)
    torch._dynamo.reset()
    handle = offload(model, 1 << 40, keep_below=0)
    assert torch.equal(model(x), eager)
    compiled = torch.compile(model, fullgraph=True)
    copied = compiled(x)
    assert not torch.equal(copied, plain), "the copies changed no rounding, so this shows nothing"
    assert take_off_the_host(model) >= handle.report().host_bytes > 0
    assert torch.equal(compiled(x), copied)
