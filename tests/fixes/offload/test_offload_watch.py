"""The first eager pass notices weights that are read where others lie in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moedoctor.fixes.offloader import Offload, offload

WIDTH = 16


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def offloaded(model: nn.Module) -> Offload:
    return offload(model, 1 << 40, keep_below=0, pin=lambda memory: lambda: None)


class Peeping(nn.Module):
    """Its forward reads a weight past the layer that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.peep = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[1].weight
        x = x + weight.new_zeros(WIDTH) + torch.zeros_like(weight)[0]  # takes no values
        for layer in self.layers:
            x = layer(x)
        return x @ weight.t() if self.peep else x


def test_a_weight_that_is_read_past_its_layer_is_an_error_and_not_wrong_numbers() -> None:
    model, x = Peeping(), torch.randn(3, WIDTH)
    handle = offloaded(model)
    message = (
        r"layers.1.weight is offloaded, and aten.mm.default uses it outside of its layer's forward.*layers="
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(x)
    handle.restore()
    model(x)


def test_a_hook_behind_a_layer_that_reads_its_weight_is_an_error() -> None:
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), torch.randn(3, WIDTH)
    model[2].register_forward_hook(lambda module, inputs, output: output + module.weight[0])
    offloaded(model)
    with pytest.raises(RuntimeError, match=r"2\.weight is offloaded, and aten\.add\.Tensor uses it"):
        model(x)


def test_only_the_first_pass_is_watched() -> None:
    seen: list[Any] = []
    model, x = Peeping(), torch.randn(3, WIDTH)
    model.peep = False
    expected = model(x)
    offloaded(model)
    model.layers[1].register_forward_hook(lambda *_: seen.append(_get_current_dispatch_mode()))
    assert all(torch.equal(model(x), expected) for _ in range(3))
    assert [one is not None for one in seen] == [True, False, False]


def test_a_module_with_compiled_parts_runs_them_compiled_from_the_first_pass_on() -> None:
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    model, x = Peeping(), torch.randn(3, WIDTH)
    model.peep = False
    expected = model(x)
    offloaded(model)
    model.layers[2].compile(fullgraph=True, backend=backend)
    seen: list[Any] = []
    model.layers[1].register_forward_hook(lambda *_: seen.append(_get_current_dispatch_mode()))
    assert torch.equal(model(x), expected)
    assert (len(graphs), seen) == (1, [None])
    torch._dynamo.reset()
