"""What an offload puts around a module's functions, and takes off again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from moedoctor.fixes.offload.guard import (
    Guard,
    StateHooks,
    Watch,
    memory_of,
    places,
    tensors_in,
    unwatched,
)
from moedoctor.fixes.offload.plan import runs
from moedoctor.fixes.offload.prefetch import Pipeline
from moedoctor.fixes.offload.storage import StoredLayer

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
        self._guards: list[Guard] = []
        owners = [reader(one.module) if reader is not None else (one.module, "forward") for one in layers]
        functions = [getattr(owner, name) for owner, name in owners]  # before anything is changed
        try:
            self._wrap_all(root, layers, owners, functions, key, reader)
        except BaseException:
            self.remove()
            raise

    def _wrap_all(
        self,
        root: nn.Module,
        layers: Sequence[StoredLayer],
        owners: Sequence[tuple[Any, str]],
        functions: Sequence[Forward],
        key: int,
        reader: Reader | None,
    ) -> None:
        for index, (layer, (owner, name)) in enumerate(zip(layers, owners, strict=True)):
            guard = Guard(layer, self._pipeline, index)
            self._guards.append(guard)
            if reader is None:
                around = _around_layer(
                    layer, functions[index], guard, self._pipeline, self._token, key, index
                )
            else:
                around = _around_reader(layer, functions[index], guard, self._pipeline, index)
            self._wrap(layer.module, owner, name, around)
            for inner in {id(one.owner): one.owner for one, _ in layer.items}.values():
                self._handles += StateHooks(inner, layer, self._pipeline, guard).handles
        # Nothing would tie `begin` to readers, which a compiler does not see: such passes have no bounds.
        if reader is None and runs(root) and not any(root is layer.module for layer in layers):
            around = _around_pass(root.forward, self._pipeline, self._token, key, Watch(root, layers))
            self._wrap(root, root, "forward", around)

    def changed(self) -> list[str]:
        """Names of the parameters that somebody wrote or replaced, which a pass would refuse."""
        return [name for one in self._guards for name in one.changed()]

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


def _around_layer(
    layer: StoredLayer,
    forward: Forward,
    guard: Guard,
    pipeline: Pipeline,
    token: torch.Tensor,
    key: int,
    index: int,
) -> Forward:
    where = places(layer)

    def on_fetched_weights(*args: Any, **kwargs: Any) -> Any:
        _refuse_gradients((args, kwargs))
        weights = [getattr(owner, name) for owner, name in where]
        eager = not torch.compiler.is_compiling()  # a compiler hands over copies, and looks into no guard
        before = guard.check(weights) if eager else None
        inputs = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
        torch.ops.moedoctor_offload.wait(weights, inputs, token, key, index, eager)
        output = own_memory(forward(*args, **kwargs), weights)
        torch.ops.moedoctor_offload.release(tensors_in(output), token, key, index)
        if before is not None:
            guard.check_after(weights, before)
        return output

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return on_fetched_weights(*args, **kwargs)
        with _closing(pipeline):
            return unwatched(on_fetched_weights, args, kwargs)

    return offloaded


def _around_reader(
    layer: StoredLayer, function: Forward, guard: Guard, pipeline: Pipeline, index: int
) -> Forward:
    """`function`, which runs inside an operator and is traced by no compiler, on the layer's own weights."""
    where = places(layer)

    @functools.wraps(function)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        _refuse_gradients((args, kwargs))
        weights = [getattr(owner, name) for owner, name in where]
        before = guard.check(weights)
        with _closing(pipeline):
            pipeline.wait(index, weights)
            try:
                output = function(*args, **kwargs)
            finally:
                pipeline.release(index)
        guard.check_after(weights, before)
        return output

    return offloaded


def _around_pass(
    forward: Forward, pipeline: Pipeline, token: torch.Tensor, key: int, watch: Watch
) -> Forward:
    def one_pass(*args: Any, **kwargs: Any) -> Any:
        eager = not torch.compiler.is_compiling()
        torch.ops.moedoctor_offload.begin(token, key, eager)
        if not eager or watch.done:
            output = forward(*args, **kwargs)
        else:
            output = watch.over(forward, args, kwargs)
            if watch.saw:
                pipeline.watched = True
            else:
                pipeline.go_unwatched("in parts compiled")
        torch.ops.moedoctor_offload.finish(tensors_in(output), token, key)
        return output

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return one_pass(*args, **kwargs)
        with _closing(pipeline):
            return one_pass(*args, **kwargs)

    return offloaded


@contextlib.contextmanager
def _closing(pipeline: Pipeline) -> Iterator[None]:
    """A pass that fails is over: another thread may begin one."""
    try:
        yield
    except BaseException:
        pipeline.abandon()
        raise


def _refuse_gradients(arguments: Any) -> None:
    """A backward pass would find another layer's weights in the buffer."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in(arguments)):
        raise RuntimeError("an offloaded module runs forward only: call it under torch.no_grad()")


# An operator takes tensors and numbers, no objects: a pipeline is named by a number. Entries vanish with it.
_PIPELINES: weakref.WeakValueDictionary[int, Pipeline] = weakref.WeakValueDictionary()
_KEYS = itertools.count()

_LIBRARY = torch.library.Library("moedoctor_offload", "DEF")
_LIBRARY.define("begin(Tensor(a!) token, int key, bool eager) -> ()")
_LIBRARY.define(
    "wait(Tensor(a!)[] weights, Tensor(c!)[] inputs, Tensor(b!) token, int key, int unit, bool eager) -> ()"
)
_LIBRARY.define("release(Tensor[] outputs, Tensor(a!) token, int key, int unit) -> ()")
_LIBRARY.define("copied(Tensor weight) -> Tensor")
_LIBRARY.define("finish(Tensor[] outputs, Tensor(a!) token, int key) -> ()")


def enrol(pipeline: Pipeline) -> int:
    """The number by which the operators know `pipeline`, for as long as it lives."""
    key = next(_KEYS)
    _PIPELINES[key] = pipeline
    return key


def _begin(token: torch.Tensor, key: int, eager: bool) -> None:
    _PIPELINES[key].begin()
    if not eager:
        _PIPELINES[key].go_unwatched("compiled")


def _wait(
    weights: list[torch.Tensor],
    inputs: list[torch.Tensor],
    token: torch.Tensor,
    key: int,
    unit: int,
    eager: bool,
) -> None:
    if not eager:
        _PIPELINES[key].compiled.add(unit)
    _PIPELINES[key].wait(unit, weights)


def _release(outputs: list[torch.Tensor], token: torch.Tensor, key: int, unit: int) -> None:
    _PIPELINES[key].release(unit)


def _finish(outputs: list[torch.Tensor], token: torch.Tensor, key: int) -> None:
    _PIPELINES[key].finish()


def _nothing(*arguments: Any) -> None:
    return


for _name, _function in {"begin": _begin, "wait": _wait, "release": _release, "finish": _finish}.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moedoctor_offload::{_name}", _nothing, lib=_LIBRARY)
_LIBRARY.impl("copied", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("moedoctor_offload::copied", torch.clone, lib=_LIBRARY)


def own_memory(output: Any, weights: Sequence[torch.Tensor]) -> Any:
    """`output` of a layer, with a copy for each tensor that lies in the memory of `weights`, which moves on.

    Raises RuntimeError where such a tensor is inside an object that cannot be taken apart.
    """

    def copied(one: torch.Tensor) -> torch.Tensor:
        return torch.ops.moedoctor_offload.copied(one) if _lies_in(one, weights) else one

    if not any(_lies_in(one, weights) for one in tensors_in(output)):
        return output
    own = _pytree.tree_map_only(torch.Tensor, copied, output)
    if any(_lies_in(one, weights) for one in tensors_in(own)):
        raise RuntimeError(
            f"an offloaded layer returns its own weights in a {type(output).__name__}, where they cannot be"
            " exchanged for copies; return copies of them"
        )
    return own


def _lies_in(tensor: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    if torch.compiler.is_compiling():  # storages cannot be traced, bases can
        return any(tensor is one or tensor._base is one for one in weights)
    memory = memory_of(tensor)
    return memory is not None and any(memory_of(one) == memory for one in weights)
