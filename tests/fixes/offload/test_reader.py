"""Weights that an operator looks up are fetched inside it; compiled code is the same as without offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.fixes.offload.prefetch import CopyEngine
from moedoctor.fixes.offloader import Offload, offload
from tests.fixes.offload.models import pinned

WIDTH, TOKENS, LAYERS = 64, 12, 5
EXPERTS: dict[int, Experts] = {}
"""The experts by layer number; vLLM's MoE operator finds its layer by name."""


class Experts(nn.Module):
    """The operator runs `computed`; a compiler that traces `forward` sees only the operator."""

    device: LateDevice | None = None

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5)
        self.right: list[bool] = []
        EXPERTS[number] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.moedoctor_reader.experts(x, self.number)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        if self.device is not None:
            # The value that a kernel queued now reads when it runs.
            self.device.run(lambda: self.right.append(bool((self.weight == self.number).all())))
        return torch.tanh(x.float() @ self.weight.float()).bfloat16()  # [T, W]


_LIBRARY = torch.library.Library("moedoctor_reader", "DEF")
_LIBRARY.define("experts(Tensor x, int number) -> Tensor")
_LIBRARY.impl("experts", lambda x, number: EXPERTS[number].computed(x), "CPU")
torch.library.register_fake("moedoctor_reader::experts", lambda x, number: torch.empty_like(x), lib=_LIBRARY)


def normalized(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of the float32 sum, as in vLLM; the sum is rounded only for the next layer. [T, W] each."""
    wide = x.float() + residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * scale).bfloat16(), wide.bfloat16()


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.experts = Experts(number)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = normalized(x, torch.zeros_like(x) if residual is None else residual)
        x, residual = normalized(self.attention(x), residual)
        return self.experts(x), residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return normalized(x, residual)[0]


IDS = torch.arange(TOKENS)


def read_by(experts: nn.Module) -> tuple[Any, str]:
    return experts, "computed"


def inside(model: Model, *, root: nn.Module | None = None, **options: Any) -> Offload:
    layers = [layer.experts for layer in model.layers]
    arguments = {"keep_below": 0, "pin": pinned, "reader": read_by, **options}
    return offload(root or model.layers, 1 << 40, patterns=("experts",), layers=layers, **arguments)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Model, passes: int = 1) -> tuple[torch.Tensor, str]:
    """Return the output of the last of `passes` compiled passes, and the compiler's code."""
    from torch._inductor.utils import run_and_get_code  # takes seconds, so not in each collection

    function = torch.compile(model, fullgraph=True)
    output, (code,) = run_and_get_code(function, IDS)
    for _ in range(passes - 1):
        output = function(IDS)
    return output, code


@pytest.mark.slow
def test_with_a_reader_compiled_code_is_the_same_as_without_offload() -> None:
    model = Model()
    eager, (plain, code) = model(IDS), compiled(model)
    report = inside(model, root=model).report()
    assert report.host_bytes == LAYERS * WIDTH * WIDTH * 2
    torch._dynamo.reset()
    output, with_offload = compiled(model, passes=3)
    assert torch.equal(output, plain)
    assert with_offload == code
    assert "moedoctor_reader.experts" in code
    assert torch.equal(model(IDS), eager)


@pytest.mark.parametrize("seed", [None, 0])
def test_on_a_late_device_every_kernel_reads_its_own_layers_weights(seed: int | None) -> None:
    model, device = Model(), LateDevice(seed)
    for number, layer in enumerate(model.layers):
        layer.experts.weight.fill_(number)
        layer.experts.device = device
    inside(model, engine=device)
    function = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        function(IDS)
    device.synchronize()
    assert [flag for layer in model.layers for flag in layer.experts.right] == [True] * 2 * LAYERS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_a_reader_the_operator_runs_after_the_copies_of_its_own_and_earlier_layers() -> None:
    """A compiler that may reorder must see this in its graph: the weight is no input of the operator."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    model = Model()
    eager = model(IDS)
    inside(model, root=model, reader=None)
    graphs: list[torch.fx.Graph] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    function = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    assert torch.equal(function(IDS), eager)
    operators = [node for node in graphs[0].nodes if "experts" in str(node.target)]
    assert len(operators) == LAYERS
    for number, node in enumerate(operators):
        before, todo = set(), [node]
        while todo:
            new = [source for source in todo.pop().all_input_nodes if source not in before]
            before.update(new)
            todo += new
        assert len([source for source in before if "wait" in str(source.args[:1])]) == number + 1


def test_restore_puts_back_the_function_of_each_layer() -> None:
    model = Model()
    expected = model(IDS)
    handle = inside(model, engine=CopyEngine())
    assert all("computed" in vars(layer.experts) for layer in model.layers)
    assert all("forward" not in vars(module) for module in model.modules())
    handle.restore()
    assert all("computed" not in vars(layer.experts) for layer in model.layers)
    assert torch.equal(model(IDS), expected)


def test_a_reader_that_names_no_function_leaves_the_module_unchanged() -> None:
    model = Model()
    expected = model(IDS)
    with pytest.raises(AttributeError, match="forward_impl"):
        inside(model, reader=lambda experts: (experts, "forward_impl"))
    assert torch.equal(model(IDS), expected)
    inside(model)  # the failed call left nothing behind


@pytest.mark.parametrize("reader", [read_by, None])
def test_gradients_are_refused_because_buffers_are_reused(reader: Any) -> None:
    model = Model()
    inside(model, reader=reader)
    experts, x = model.layers[0].experts, torch.randn(2, WIDTH, requires_grad=True)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"forward only: call it under torch.no_grad"):
        (experts.computed if reader else experts)(x)
