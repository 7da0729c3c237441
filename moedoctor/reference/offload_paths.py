"""vLLM's ways to run a module whose weights are on the host, restated; ours is compared with them.

Read from vllm/model_executor/offloader of 0.21.0 and written anew, without its configuration and logging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

ToDevice = Callable[[torch.Tensor], torch.Tensor]
DeviceView = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""(pinned uint8 [n] on the host, device) -> uint8 [n] on the device over the same memory."""


def functional_call_offload(
    layers: Sequence[nn.Module], names: Sequence[str], *, pin: bool, to_device: ToDevice | None = None
) -> None:
    """The path without UVA: each forward copies the whole state over and runs the layer with the copies.

    `names`: the parameters of each layer that go to the host. `to_device`: how a parameter is copied to a
    simulated device; by default as upstream does, `to(device, non_blocking=True)`. Two properties of this
    path cause failures: `state_dict()` inside forward (MD005), and that whoever else holds a parameter still
    sees host memory (MD003, MD020).
    """
    for layer in layers:
        named = dict(layer.named_parameters())
        device = next(iter(named.values())).device
        for name in names:
            named[name].data = _to_host(named[name].data, pin)
        layer.forward = _functional(layer, device, to_device)


def _functional(layer: nn.Module, device: torch.device, to_device: ToDevice | None) -> Callable[..., Any]:
    original = layer.forward

    def copied(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, non_blocking=True) if to_device is None else to_device(value)

    def forward(*args: Any, **kwargs: Any) -> Any:
        layer.forward = original
        state = {key: copied(value) for key, value in layer.state_dict().items()}
        output = functional_call(layer, state, args=args, kwargs=kwargs, tie_weights=False)
        layer.forward = forward
        return output

    return forward


def uva_offload(layers: Sequence[nn.Module], names: Sequence[str], device_view: DeviceView) -> None:
    """The path with UVA: parameters become device views of pinned memory, which kernels read over the bus."""
    for layer in layers:
        named = dict(layer.named_parameters())
        for name in names:
            parameter = named[name]
            host = _to_host(parameter.data, pin=True)
            view = device_view(host.view(torch.uint8).flatten(), parameter.device)  # [bytes]
            parameter.data = view.view(host.dtype).view(host.shape)


def _to_host(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    host = tensor.to("cpu", copy=True)
    return host.pin_memory() if pin else host


class PrefetchOffload:
    """`--offload-backend prefetch` with two layers ahead: buffers in turn, a copy stream, an event a layer.

    After a layer, the copy of the layer two later starts, into the buffer that the layer has used. CUDA only.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._stream = torch.cuda.Stream()
        self._layers = []
        buffers: list[list[torch.Tensor]] = [[], []]
        for index, layer in enumerate(layers):
            named = dict(layer.named_parameters())
            hosts = [_to_host(named[name].data, pin=True) for name in names]
            if index < 2:
                buffers[index] = [torch.empty_like(named[name].data) for name in names]
            for name, buffer in zip(names, buffers[index % 2], strict=True):
                named[name].data = buffer
            self._layers.append((hosts, buffers[index % 2], torch.cuda.Event()))
            layer.forward = self._hooked(index, layer.forward)
        for index in range(2):
            self._start(index)

    def _hooked(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.current_stream().wait_event(self._layers[index][2])
            output = original(*args, **kwargs)
            self._start((index + 2) % len(self._layers))
            return output

        return forward

    def _start(self, index: int) -> None:
        hosts, buffers, done = self._layers[index]
        fork = torch.cuda.Event()
        fork.record()
        self._stream.wait_event(fork)
        with torch.cuda.stream(self._stream):
            for buffer, host in zip(buffers, hosts, strict=True):
                buffer.copy_(host, non_blocking=True)
        done.record(self._stream)
