"""Weights that an operator reads by itself are fetched inside it; compiled code is that without offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from moedoctor.faults.offload.late_device import LateDevice
from moedoctor.fixes.offload.prefetch import CopyEngine
from moedoctor.fixes.offloader import Offload, offload

WIDTH, TOKENS, LAYERS = 64, 12, 5
EXPERTS: dict[int, Experts] = {}
"""By the number of their layer, as vLLM's MoE operator finds its layer by name."""


class Experts(nn.Module):
    """What the operator runs; `forward` shows a compiler the operator alone."""

    device: LateDevice | None = None
    angry = False

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5)
        self.right: list[bool] = []
        EXPERTS[number] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.moedoctor_reader.experts(x, self.number)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        if self.angry:
            raise ArithmeticError
        if self.device is not None:
            # What a kernel queued now would read when its turn comes.
            self.device.run(lambda: self.right.append(bool((self.weight == self.number).all())))
        return torch.tanh(x.float() @ self.weight.float()).bfloat16()  # [T, W]


_LIBRARY = torch.library.Library("moedoctor_reader", "DEF")
_LIBRARY.define("experts(Tensor x, int number) -> Tensor")
_LIBRARY.impl("experts", lambda x, number: EXPERTS[number].computed(x), "CPU")
torch.library.register_fake("moedoctor_reader::experts", lambda x, number: torch.empty_like(x), lib=_LIBRARY)


def normalised(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's RMS norm: of the sum in float32, which is rounded for the next layer only. [T, W] each."""
    wide = x.float() + residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * scale).bfloat16(), wide.bfloat16()


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.experts = Experts(number)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = normalised(x, torch.zeros_like(x) if residual is None else residual)
        x, residual = normalised(self.attention(x), residual)
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
        return normalised(x, residual)[0]


IDS = torch.arange(TOKENS)


def pinned(memory: torch.Tensor) -> Callable[[], None]:
    return lambda: None


def read_by(experts: nn.Module) -> tuple[Any, str]:
    return experts, "computed"


def around_layers(model: Model) -> Offload:
    return offload(
        model.layers, 1 << 40, patterns=("experts",), layers=list(model.layers), keep_below=0, pin=pinned
    )


def inside(model: Model, *, root: nn.Module | None = None, **options: Any) -> Offload:
    layers = [one.experts for one in model.layers]
    arguments = {"keep_below": 0, "pin": pinned, "reader": read_by, **options}
    return offload(root or model.layers, 1 << 40, patterns=("experts",), layers=layers, **arguments)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(model: Model, passes: int = 1) -> tuple[torch.Tensor, str]:
    """What a compiled pass gives, the last of some, and the compiler's code."""
    function = torch.compile(model, fullgraph=True)
    output, (code,) = run_and_get_code(function, IDS)
    for _ in range(passes - 1):
        output = function(IDS)
    return output, code


def test_operators_between_layers_change_the_rounding_of_compiled_code() -> None:
    """Why there is a `reader`. Eager, nothing changes."""
    model = Model()
    eager, (plain, _) = model(IDS), compiled(model)
    around_layers(model)
    torch._dynamo.reset()
    assert torch.equal(model(IDS), eager)
    assert not torch.equal(compiled(model)[0], plain)


@pytest.mark.parametrize("pin", [pinned, False])
@pytest.mark.parametrize("whole", [True, False])
def test_inside_the_operator_compiled_code_is_that_without_offload(pin: Any, whole: bool) -> None:
    model = Model()
    eager, (plain, code) = model(IDS), compiled(model)
    report = inside(model, root=model if whole else None, pin=pin).report()
    assert report.host_bytes == LAYERS * WIDTH * WIDTH * 2
    torch._dynamo.reset()
    output, with_offload = compiled(model, passes=3)
    assert torch.equal(output, plain)
    assert with_offload == code
    assert "moedoctor_reader.experts" in code
    assert torch.equal(model(IDS), eager)


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_on_a_late_device_every_kernel_reads_its_own_layers_weights(seed: int | None) -> None:
    assert all(late(LateDevice(seed))) is True


class NeverForks(LateDevice):
    """Copies do not wait for computation."""

    def fork(self) -> None:
        return


def test_where_copies_do_not_wait_for_the_operator_some_kernel_reads_other_weights() -> None:
    assert not all(one for seed in range(6) for one in late(NeverForks(seed)))


def late(device: LateDevice) -> list[bool]:
    """Two compiled passes; for each kernel, whether it read its own layer's weights."""
    model = Model()
    for number, layer in enumerate(model.layers):
        layer.experts.weight.fill_(number)
        layer.experts.device = device
    inside(model, engine=device)
    compiled(model, passes=2)
    device.synchronize()
    right = [one for layer in model.layers for one in layer.experts.right]
    assert len(right) == 2 * LAYERS
    return right


def test_restored_the_function_is_the_layers_own_again() -> None:
    model = Model()
    expected = model(IDS)
    handle = inside(model, engine=CopyEngine())
    assert all("computed" in vars(layer.experts) for layer in model.layers)
    assert all("forward" not in vars(one) for one in model.modules())
    handle.restore()
    assert all("computed" not in vars(layer.experts) for layer in model.layers)
    assert torch.equal(model(IDS), expected)


def test_a_reader_that_names_nothing_leaves_the_module_unchanged() -> None:
    model = Model()
    expected = model(IDS)
    with pytest.raises(AttributeError, match="forward_impl"):
        inside(model, reader=lambda experts: (experts, "forward_impl"))
    assert torch.equal(model(IDS), expected)
    inside(model)  # nothing is in its way


def test_an_operator_that_failed_does_not_spoil_the_next_pass() -> None:
    model = Model()
    expected = model(IDS)
    inside(model)
    model.layers[2].experts.angry = True
    with pytest.raises(ArithmeticError):
        model(IDS)
    model.layers[2].experts.angry = False
    assert all(torch.equal(model(IDS), expected) for _ in range(2))


def test_gradients_are_refused() -> None:
    model = Model()
    inside(model)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="forward only"):
        model.layers[0].experts.computed(torch.randn(2, WIDTH, requires_grad=True))
