"""The wrappers of an offloaded module's functions: operators that a compiler traces and keeps in order.

`wait` is declared to write the layer's parameters, so nothing that reads them can move in front of it, not
even what depends on weights alone. It is declared to write the layer's inputs too: an opaque operator that
finds the weights by itself, as vLLM's MoE layer does, has no other tie to it. `release` reads the layer's
outputs, so it comes behind everything that led to them. All write a token, which orders them among each
other. Its value names the pipeline: a token is an input of compiled code, while a number would be a constant,
and wrong if a compiler's cache gives the code to another module. `eager` is false in compiled code. `copied`
is a clone that no compiler removes; compilers see no reason to clone weights that a layer returns.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from moedoctor.fixes.offload.guard import (
    Guard,
    StateHooks,
    Watch,
    call_unwatched,
    find_tensors,
    identify_memory,
)
from moedoctor.fixes.offload.plan import runs
from moedoctor.fixes.offload.prefetch import Pipeline
from moedoctor.fixes.offload.storage import StoredLayer

MARK = "_moedoctor_offload"
"""Attribute of every module that is wrapped; holds the pipeline, which lives as long as one of them."""

Forward = Callable[..., Any]
Reader = Callable[[nn.Module], tuple[Any, str]]
"""For a layer: the object that has the function that reads the layer's weights, and the function's name."""

# An operator takes tensors and numbers, no objects: a token names a pipeline. Entries vanish with it.
_PIPELINES: weakref.WeakValueDictionary[int, Pipeline] = weakref.WeakValueDictionary()
_TOKENS = itertools.count()


def _begin(token: torch.Tensor, eager: bool) -> None:
    pipeline = _PIPELINES[int(token)]
    pipeline.begin()
    if not eager:
        pipeline.go_unwatched("compiled")


def _wait(
    weights: list[torch.Tensor], inputs: list[torch.Tensor], token: torch.Tensor, unit: int, eager: bool
) -> None:
    pipeline = _PIPELINES[int(token)]
    if not eager:
        pipeline.compiled.add(unit)
    pipeline.wait(unit, weights)


def _release(outputs: list[torch.Tensor], token: torch.Tensor, unit: int) -> None:
    _PIPELINES[int(token)].release(unit)


def _finish(outputs: list[torch.Tensor], token: torch.Tensor) -> None:
    _PIPELINES[int(token)].finish()


_LIBRARY = torch.library.Library("moedoctor_offload", "DEF")
for _schema, _function in {
    "begin(Tensor(a!) token, bool eager) -> ()": _begin,
    "wait(Tensor(a!)[] weights, Tensor(c!)[] inputs, Tensor(b!) token, int unit, bool eager) -> ()": _wait,
    "release(Tensor[] outputs, Tensor(a!) token, int unit) -> ()": _release,
    "finish(Tensor[] outputs, Tensor(a!) token) -> ()": _finish,
    "copied(Tensor weight) -> Tensor": torch.clone,
}.items():
    _LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    _fake = torch.clone if _function is torch.clone else lambda *arguments: None
    torch.library.register_fake(f"moedoctor_offload::{_name}", _fake, lib=_LIBRARY)


class Hooks:
    """Wrapped forwards, and `state_dict` and `load_state_dict` that mean the weights on the host."""

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[StoredLayer],
        pipeline: Pipeline,
        reader: Reader | None = None,
    ) -> None:
        self._pipeline = pipeline
        # On the CPU, so that no device need be waited for to read it.
        self._token = torch.tensor([next(_TOKENS)], device="cpu")  # [1]
        _PIPELINES[int(self._token)] = pipeline
        self._wrapped: list[tuple[nn.Module, Any, str, Forward | None]] = []
        self._handles: list[Any] = []
        self._guards: list[Guard] = []
        owners = [
            reader(layer.module) if reader is not None else (layer.module, "forward") for layer in layers
        ]
        functions = [getattr(owner, name) for owner, name in owners]  # before anything is changed
        around = self._wrap_layer if reader is None else self._wrap_reader
        try:
            for index, (layer, (owner, name)) in enumerate(zip(layers, owners, strict=True)):
                guard = Guard(layer, pipeline, index)
                self._guards.append(guard)
                self._wrap(layer.module, owner, name, around(functions[index], guard, index), index)
                for inner in dict.fromkeys(owner for weight, _ in layer.items for owner in weight.owners):
                    StateHooks(inner, layer, pipeline, guard, self._handles)
            # Nothing would tie `begin` to readers, which a compiler does not see: such passes have no bounds.
            if reader is None and runs(root) and not any(root is layer.module for layer in layers):
                run_pass = self._wrap_pass(root.forward, Watch(root, layers, pipeline))
                self._wrap(root, root, "forward", run_pass, None)
        except BaseException:
            self.remove()
            raise

    def list_changed(self) -> list[str]:
        """Return the names of the parameters that somebody wrote or replaced, which a pass would refuse."""
        return [name for guard in self._guards for name in guard.list_changed()]

    def remove(self) -> None:
        """Make everything as it was, also after a beginning that failed."""
        for module, owner, name, before in reversed(self._wrapped):
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)
            vars(module).pop(MARK, None)
        self._wrapped.clear()
        for handle in self._handles:
            handle.remove()

    def _wrap(self, module: nn.Module, owner: Any, name: str, function: Forward, index: int | None) -> None:
        """Call `function` in place of the function `name` of `owner`. `index`: of its unit; None: a pass."""
        pipeline = self._pipeline

        @functools.wraps(getattr(owner, name))
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except BaseException:
                pipeline.abandon(index)
                raise

        before = vars(owner).get(name)
        setattr(owner, name, call)
        self._wrapped.append((module, owner, name, before))
        setattr(module, MARK, pipeline)

    def _wrap_layer(self, forward: Forward, guard: Guard, index: int) -> Forward:
        token = self._token

        def call_on_weights(*args: Any, **kwargs: Any) -> Any:
            _refuse_gradients((args, kwargs))
            weights = guard.read_weights()
            eager = not torch.compiler.is_compiling()  # a compiler hands over copies, and ignores guards
            before = guard.check(weights) if eager else None
            inputs = [tensor for tensor in find_tensors((args, kwargs)) if tensor.is_floating_point()]
            torch.ops.moedoctor_offload.wait(weights, inputs, token, index, eager)
            output = _own_memory(forward(*args, **kwargs), weights)
            torch.ops.moedoctor_offload.release(find_tensors(output), token, index)
            if before is not None:
                guard.check_after(weights, before)
            return output

        return lambda *args, **kwargs: call_unwatched(call_on_weights, args, kwargs)

    def _wrap_reader(self, function: Forward, guard: Guard, index: int) -> Forward:
        """`function` on the layer's own weights. It runs inside an operator, which no compiler traces."""
        pipeline = self._pipeline

        def call_on_weights(*args: Any, **kwargs: Any) -> Any:
            _refuse_gradients((args, kwargs))
            weights = guard.read_weights()
            before = guard.check(weights)
            pipeline.wait(index, weights)
            output = function(*args, **kwargs)
            pipeline.release(index)
            guard.check_after(weights, before)
            return output

        return call_on_weights

    def _wrap_pass(self, forward: Forward, watch: Watch) -> Forward:
        token = self._token

        def run_pass(*args: Any, **kwargs: Any) -> Any:
            eager = not torch.compiler.is_compiling()
            torch.ops.moedoctor_offload.begin(token, eager)
            watched = eager and not watch.done
            output = watch.run(forward, args, kwargs) if watched else forward(*args, **kwargs)
            torch.ops.moedoctor_offload.finish(find_tensors(output), token)
            return output

        return run_pass


def _refuse_gradients(arguments: Any) -> None:
    """Raise RuntimeError: a backward pass would find another layer's weights in the buffer."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in find_tensors(arguments)):
        raise RuntimeError("an offloaded module runs forward only: call it under torch.no_grad()")


def _own_memory(output: Any, weights: Sequence[torch.Tensor]) -> Any:
    """`output` of a layer, with a copy of each tensor that lies in the memory of `weights`, which moves on.

    Raises RuntimeError if such a tensor is inside an object that cannot be taken apart.
    """
    if not any(_is_in(tensor, weights) for tensor in find_tensors(output)):
        return output

    def copy_own(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.moedoctor_offload.copied(tensor) if _is_in(tensor, weights) else tensor

    own = _pytree.tree_map_only(torch.Tensor, copy_own, output)
    if any(_is_in(tensor, weights) for tensor in find_tensors(own)):
        raise RuntimeError(
            f"an offloaded layer returns its own weights in a {type(output).__name__}, where they cannot be"
            " exchanged for copies; return copies of them"
        )
    return own


def _is_in(tensor: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    if torch.compiler.is_compiling():  # storages cannot be traced, bases can
        return any(tensor is weight or tensor._base is weight for weight in weights)
    memory = identify_memory(tensor)
    return memory is not None and any(identify_memory(weight) == memory for weight in weights)
