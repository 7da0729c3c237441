"""The problems of `offloader.yaml`: small modules, run before and after their weights go to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moedoctor.testing.questions import Setting

_PASSES = 3


class _Held(nn.Module):
    """A layer that reads its scale through another object, as a quantization config does."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)
        self.scale = nn.Parameter(torch.rand(hidden) + 0.5)
        self.config = {"scale": self.scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.config["scale"]


class _Twice(nn.Module):
    """Runs the first of its layers again at the end."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return x


def _build_ordinary(layers: int, hidden: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()) for _ in range(layers)))


def _build_many_sizes(layers: int, hidden: int) -> nn.Module:
    widths = [hidden * (1 + number % 3) for number in range(layers + 1)]
    return nn.Sequential(*(nn.Linear(widths[number], widths[number + 1]) for number in range(layers)))


def _build_tied(layers: int, hidden: int) -> nn.Module:
    module = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))
    module[-1].weight = module[0].weight
    return module


MODULES: Mapping[str, Callable[[int, int], nn.Module]] = {
    "ordinary": _build_ordinary,
    "layers_of_many_sizes": _build_many_sizes,
    "layer_called_twice": lambda layers, hidden: _Twice([nn.Linear(hidden, hidden) for _ in range(layers)]),
    "weight_held_elsewhere": lambda layers, hidden: nn.Sequential(*(_Held(hidden) for _ in range(layers))),
    "tied_weights": _build_tied,
    "state_dict": _build_ordinary,
    "inference_mode": _build_ordinary,
    "traceable": _build_ordinary,
}
"""Question -> (layers, hidden size) -> the module."""


def ask(make: Callable[..., Any], question: str, sizes: Mapping[str, int], how: Setting) -> str | None:
    """Return what is wrong after the module's weights were offloaded, or None."""
    torch.manual_seed(how.seed)
    module = MODULES[question](sizes["layers"], sizes["hidden"]).to(how.device)
    inputs = [torch.randn(4, sizes["hidden"], device=how.device) for _ in range(_PASSES)]  # [4, H] each
    with torch.no_grad():
        expected = [module(x) for x in inputs]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
    # A budget of all bytes but one: what an offloader keeps on the device must be right as well.
    made = make(module, max(1, weight_bytes - 1))
    if question == "state_dict":
        after = module.state_dict()
        if after.keys() != before.keys():
            return f"names differ: {sorted(after.keys() ^ before.keys())[:3]}"
        wrong = [name for name in before if not torch.equal(after[name].to(how.device), before[name])]
        return f"other values: {', '.join(wrong[:3])}" if wrong else None
    run: Callable[[torch.Tensor], torch.Tensor] = module
    if question == "traceable":
        torch.compiler.reset()  # hooks are not among what a compiled pass is guarded by
        run = torch.compile(module, fullgraph=True, backend="eager")
    with torch.inference_mode() if question == "inference_mode" else torch.no_grad():
        for number, x in enumerate(inputs):
            if not torch.equal(run(x), expected[number]):
                return f"the output of pass {number} differs from the module's output before"
    del made
    return None
