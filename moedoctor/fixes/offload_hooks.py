"""What an offload puts around a module's functions, and takes off again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from moedoctor.fixes.offload_ops import tensors_in
from moedoctor.fixes.offload_storage import StoredLayer
from moedoctor.fixes.prefetch import Pipeline

MARK = "_moedoctor_offload"
"""Attribute of every module that is wrapped; holds the pipeline, which lives as long as one of them."""

Forward = Callable[..., Any]


class Hooks:
    """Wrapped forwards, and `state_dict` and `load_state_dict` that mean the weights on the host."""

    def __init__(self, root: nn.Module, layers: Sequence[StoredLayer], pipeline: Pipeline, key: int) -> None:
        device = pipeline.buffers[0].device
        self._token = torch.zeros(1, dtype=torch.uint8, device=device)  # [1]
        self._pipeline = pipeline
        self._wrapped: list[tuple[nn.Module, Forward | None]] = []
        self._handles: list[Any] = []
        for index, layer in enumerate(layers):
            self._wrap(layer.module, _around_layer(layer, layer.module.forward, self._token, key, index))
            self._hook_state(layer)
        if not any(root is layer.module for layer in layers) and type(root).forward is not nn.Module.forward:
            self._wrap(root, _around_pass(root.forward, self._token, key))

    def remove(self) -> None:
        """Everything as it was."""
        for module, before in self._wrapped:
            del module.forward
            if before is not None:
                module.forward = before
            delattr(module, MARK)
        for handle in self._handles:
            handle.remove()

    def _wrap(self, module: nn.Module, forward: Forward) -> None:
        self._wrapped.append((module, vars(module).get("forward")))
        module.forward = forward
        setattr(module, MARK, self._pipeline)

    def _hook_state(self, layer: StoredLayer) -> None:
        """The device buffer of a parameter holds any layer's weights: what counts is on the host."""
        for owner in {id(one.owner): one.owner for one, _ in layer.items}.values():
            hosts = {
                name: region.of(layer.block.bytes)
                for one, region in layer.items
                for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
                if parameter is one.parameter
            }
            self._handles.append(owner._register_state_dict_hook(functools.partial(_saved, hosts)))
            loaded = functools.partial(_loaded, hosts, self._pipeline)
            self._handles.append(owner._register_load_state_dict_pre_hook(loaded))


def _around_layer(layer: StoredLayer, forward: Forward, token: torch.Tensor, key: int, index: int) -> Forward:
    places = [(one.owner, _attribute(one.owner, one.parameter)) for one, _ in layer.items]

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_gradients([*tensors_in(args), *tensors_in(kwargs)])
        weights = [getattr(owner, name) for owner, name in places]
        inputs = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
        torch.ops.moedoctor_offload.wait(weights, inputs, token, key, index)
        output = forward(*args, **kwargs)
        torch.ops.moedoctor_offload.release(tensors_in(output), token, key, index)
        return output

    return offloaded


def _around_pass(forward: Forward, token: torch.Tensor, key: int) -> Forward:
    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        torch.ops.moedoctor_offload.begin(token, key)
        output = forward(*args, **kwargs)
        torch.ops.moedoctor_offload.finish(tensors_in(output), token, key)
        return output

    return offloaded


def _refuse_gradients(tensors: Sequence[torch.Tensor]) -> None:
    """A backward pass would find another layer's weights in the buffer."""
    for one in tensors:
        if one.requires_grad:
            raise RuntimeError("an offloaded module runs forward only: call it under torch.no_grad()")


def _attribute(owner: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, one in owner.named_parameters(recurse=False) if one is parameter)


def _saved(
    hosts: dict[str, torch.Tensor], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state.update((prefix + name, host) for name, host in hosts.items() if prefix + name in state)


def _loaded(
    hosts: dict[str, torch.Tensor], pipeline: Pipeline, state: dict[str, Any], prefix: str, *others: Any
) -> None:
    for name, host in hosts.items():
        new = state.get(prefix + name)
        if isinstance(new, torch.Tensor) and new.shape == host.shape:
            pipeline.settle()
            host.copy_(new)
