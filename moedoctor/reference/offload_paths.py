"""vLLM's way to run a module whose weights are on the host if there is no UVA, restated.

Read from vllm/model_executor/offloader of 0.21.0 and written anew, without its configuration and logging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

ToDevice = Callable[[torch.Tensor], torch.Tensor]


def offload_by_functional_call(
    layers: Sequence[nn.Module], names: Sequence[str], *, to_device: ToDevice | None = None
) -> None:
    """Offload without UVA or pinned memory: each forward copies the whole state and runs with the copies.

    `names`: the parameters of each layer that go to the host. `to_device`: how a parameter is copied to a
    simulated device; by default as upstream does, `to(device, non_blocking=True)`. Two properties of this
    path cause failures: `state_dict()` inside forward (MD005), and that whoever else holds a parameter still
    sees host memory (MD003, MD020).
    """
    for layer in layers:
        named = dict(layer.named_parameters())
        device = next(iter(named.values())).device
        for name in names:
            named[name].data = named[name].data.to("cpu", copy=True)
        layer.forward = _wrap_forward(layer, device, to_device)


def _wrap_forward(layer: nn.Module, device: torch.device, to_device: ToDevice | None) -> Callable[..., Any]:
    original = layer.forward

    def copy(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, non_blocking=True) if to_device is None else to_device(value)

    def forward(*args: Any, **kwargs: Any) -> Any:
        layer.forward = original
        state = {key: copy(value) for key, value in layer.state_dict().items()}
        output = functional_call(layer, state, args=args, kwargs=kwargs, tie_weights=False)
        layer.forward = forward
        return output

    return forward
