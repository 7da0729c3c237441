"""What an offload puts around a module's functions, and takes off again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from moedoctor.fixes.offload_layers import runs
from moedoctor.fixes.offload_ops import own_memory, tensors_in
from moedoctor.fixes.offload_storage import StoredLayer
from moedoctor.fixes.offload_watch import Watch, unwatched
from moedoctor.fixes.prefetch import Pipeline

MARK = "_moedoctor_offload"
"""Attribute of every module that is wrapped; holds the pipeline, which lives as long as one of them."""

Forward = Callable[..., Any]
Reader = Callable[[nn.Module], tuple[Any, str]]
"""For a layer: the object that has the function that reads the layer's weights, and the function's name."""


class Hooks:
    """Wrapped forwards, and `state_dict` and `load_state_dict` that mean the weights on the host."""

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[StoredLayer],
        pipeline: Pipeline,
        key: int,
        reader: Reader | None = None,
    ) -> None:
        device = pipeline.buffers[0].device
        self._token = torch.zeros(1, dtype=torch.uint8, device=device)  # [1]
        self._pipeline = pipeline
        self._wrapped: list[tuple[nn.Module, Any, str, Forward | None]] = []
        self._handles: list[Any] = []
        places = [reader(one.module) if reader is not None else (one.module, "forward") for one in layers]
        functions = [getattr(owner, name) for owner, name in places]  # before anything is changed
        try:
            self._wrap_all(root, layers, places, functions, key, reader)
        except BaseException:
            self.remove()
            raise

    def _wrap_all(
        self,
        root: nn.Module,
        layers: Sequence[StoredLayer],
        places: Sequence[tuple[Any, str]],
        functions: Sequence[Forward],
        key: int,
        reader: Reader | None,
    ) -> None:
        for index, (layer, (owner, name)) in enumerate(zip(layers, places, strict=True)):
            if reader is None:
                around = _around_layer(layer, functions[index], self._token, key, index)
            else:
                around = _around_reader(layer, functions[index], self._pipeline, index)
            self._wrap(layer.module, owner, name, around)
            self._hook_state(layer)
        # Nothing would tie `begin` to readers, which a compiler does not see: such passes have no bounds.
        if reader is None and runs(root) and not any(root is layer.module for layer in layers):
            self._wrap(
                root, root, "forward", _around_pass(root.forward, self._token, key, Watch(root, layers))
            )

    def remove(self) -> None:
        """Everything as it was, also after a beginning that failed."""
        for module, owner, name, before in reversed(self._wrapped):
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)
            vars(module).pop(MARK, None)
        self._wrapped.clear()
        for handle in self._handles:
            handle.remove()

    def _wrap(self, module: nn.Module, owner: Any, name: str, function: Forward) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, function)
        self._wrapped.append((module, owner, name, before))
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
    places = _places(layer)

    def on_fetched_weights(*args: Any, **kwargs: Any) -> Any:
        _refuse_gradients((args, kwargs))
        weights = [getattr(owner, name) for owner, name in places]
        inputs = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
        torch.ops.moedoctor_offload.wait(weights, inputs, token, key, index)
        output = own_memory(forward(*args, **kwargs), weights)
        torch.ops.moedoctor_offload.release(tensors_in(output), token, key, index)
        return output

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        return unwatched(on_fetched_weights, args, kwargs)

    return offloaded


def _around_reader(layer: StoredLayer, function: Forward, pipeline: Pipeline, index: int) -> Forward:
    """`function`, which runs inside an operator and is traced by no compiler, on the layer's own weights."""
    places = _places(layer)

    @functools.wraps(function)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        _refuse_gradients((args, kwargs))
        pipeline.wait(index, [getattr(owner, name) for owner, name in places])
        try:
            return function(*args, **kwargs)
        finally:
            pipeline.release(index)

    return offloaded


def _around_pass(forward: Forward, token: torch.Tensor, key: int, watch: Watch) -> Forward:
    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        torch.ops.moedoctor_offload.begin(token, key)
        if torch.compiler.is_compiling() or watch.done:
            output = forward(*args, **kwargs)
        else:
            output = watch.over(forward, args, kwargs)
        torch.ops.moedoctor_offload.finish(tensors_in(output), token, key)
        return output

    return offloaded


def _refuse_gradients(arguments: Any) -> None:
    """A backward pass would find another layer's weights in the buffer."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in(arguments)):
        raise RuntimeError("an offloaded module runs forward only: call it under torch.no_grad()")


def _places(layer: StoredLayer) -> list[tuple[nn.Module, str]]:
    """Where the layer's parameters hang: the module and the attribute."""
    return [(one.owner, _attribute(one.owner, one.parameter)) for one, _ in layer.items]


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
