"""The fix `offload` fetches experts inside vLLM's MoE operator, in stubs shaped like the releases."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm_stub import write_files

from moedoctor.plugin import offload_fix
from moedoctor.upstream.engine.probes import list_pipelines, serve_from_gpu
from tests.plugin.test_offload_fix import stub

MOE = """
import torch
from torch import nn

LAYERS = {{}}


def get_layer_from_name(layer_name):
    return LAYERS[layer_name]


def _moe_forward(hidden_states, router_logits, layer_name):
    layer = get_layer_from_name(layer_name)
    return {call}


def _moe_forward_shared(hidden_states, router_logits, layer_name):
    layer = get_layer_from_name(layer_name)
    return {call}


LIBRARY = torch.library.Library("moedoctor_vllm_{name}", "FRAGMENT")
LIBRARY.define("moe_forward(Tensor x, Tensor logits, str layer_name) -> Tensor")
LIBRARY.impl("moe_forward", _moe_forward, "CPU")
torch.library.register_fake(
    "moedoctor_vllm_{name}::moe_forward", lambda x, logits, layer_name: torch.empty_like(x), lib=LIBRARY
)


class MoERunner(nn.Module):
    def __init__(self, name, experts):
        super().__init__()
        self.layer_name = name
        if {owns}:
            self.routed_experts = experts
        LAYERS[name] = self if {owns} else experts
        self._forward_entry = torch.ops.moedoctor_vllm_{name}.moe_forward

    def forward(self, hidden_states, router_logits):
        return self._forward_entry(hidden_states, router_logits, self.layer_name)

    def {reader}(self, {layer}hidden_states, router_logits):
        {layer_is}
        return torch.tanh(hidden_states.float() @ layer.w13_weight.float()).to(hidden_states.dtype)
"""


@dataclass(frozen=True)
class Shape:
    """The layout of a release's MoE layer."""

    version: str
    reader: str = "_forward_impl"
    newer: bool = False
    """The runner is the layer; the experts are a separate module that is never called."""

    def text(self, name: str) -> str:
        """The runner's file; `name` keeps its operators apart from those of other tests."""
        call = f"layer.{self.reader}(" if self.newer else f"layer.runner.{self.reader}(layer, "
        layer, is_layer = ("", "layer = self.routed_experts") if self.newer else ("layer, ", "pass")
        parts = {"layer": layer, "layer_is": is_layer, "call": f"{call}hidden_states, router_logits)"}
        return MOE.format(name=name, owns=self.newer, reader=self.reader, **parts)


OLDEST, OLDER, NEWER = Shape("0.19.1", "forward_impl"), Shape("0.21.0"), Shape("0.33.0", newer=True)
_NAMES = (f"moe_{number}" for number in itertools.count())
WIDTH = 192


class RoutedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5
        self.w13_weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, *arguments: Any) -> Any:
        raise AssertionError("never called")


class FusedMoE(RoutedExperts):
    def __init__(self, runner: Any, name: str) -> None:
        super().__init__()
        self.runner = runner(name, self)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return self.runner.forward(hidden_states, router_logits)


class Layer(nn.Module):
    def __init__(self, runner: Any, number: int, *, newer: bool) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.experts = runner(name, RoutedExperts()) if newer else FusedMoE(runner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, x)


@dataclass(frozen=True)
class Made:
    """A model whose layers vLLM put on the host, and its offloader; its `post_init` ends loading."""

    model: nn.Sequential
    offloader: Any


X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
Maker = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    def made(shape: Shape, change: Callable[[Any], None] = lambda layer: None) -> Made:
        stub(tmp_path, monkeypatch, shape.version)
        runner_file = "vllm/model_executor/layers/fused_moe/runner/moe_runner.py"
        write_files(tmp_path, {runner_file: shape.text(next(_NAMES))})
        offload_fix.apply(shape.version)
        runner = importlib.import_module("vllm.model_executor.layers.fused_moe.runner.moe_runner").MoERunner
        offloader = importlib.import_module("vllm.model_executor.offloader.uva").UVAOffloader(1 << 30)
        torch.manual_seed(0)
        layers = [Layer(runner, number, newer=shape.newer) for number in range(4)]
        for layer in layers:
            change(layer)
        return Made(nn.Sequential(*map(offloader._maybe_offload_to_cpu, layers)), offloader)

    with torch.no_grad():
        yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [OLDER, NEWER], ids=lambda shape: shape.version)
def test_the_operator_reads_weights_from_the_host(make, shape, caplog):
    """`test_reader` compares compiled code."""
    made = make(shape)
    expected = made.model(X)
    made.offloader.post_init()
    host_bytes = made.offloader._moedoctor_offload.report().host_bytes
    assert host_bytes == 4 * 2 * WIDTH * WIDTH
    assert "fetched inside the MoE operator" in caplog.messages[-1]
    assert all("forward" not in vars(module) for module in made.model.modules())
    compiled = torch.compile(made.model, fullgraph=True, backend="aot_eager")
    copied = compiled(X)
    assert serve_from_gpu(made.model)["bytes"] == host_bytes
    assert torch.equal(made.model(X), expected)
    assert torch.equal(compiled(X), copied), "the same compiled code, with weights from elsewhere"
    for pipeline in list_pipelines(made.model):
        pipeline.settle()
        for unit in pipeline.units:
            unit.host.zero_()
    assert not torch.equal(made.model(X), expected)


def another_weight(layer: Any) -> None:
    layer.attention = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)


def python_entry(layer: Any) -> None:
    runner = layer.experts.runner
    runner._forward_entry = lambda x, logits, name: runner._forward_impl(layer.experts, x, logits)


@pytest.mark.parametrize(
    ("shape", "change"),
    [(OLDEST, lambda layer: None), (OLDER, another_weight), (OLDER, python_entry)],
    ids=["another function reads them", "not only experts", "no operator"],
)
def test_without_a_known_operator_experts_are_fetched_around_the_layers(make, shape, change, caplog):
    made = make(shape, change)
    expected = made.model(X)
    made.offloader.post_init()
    assert "fetched around each layer" in caplog.messages[-1]
    assert all("forward" in vars(layer) for layer in made.model)
    assert torch.equal(made.model(X), expected)
