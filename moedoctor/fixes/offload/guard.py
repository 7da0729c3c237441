"""Writes to offloaded weights, and copies of offloaded modules, are errors: they would be lost or mixed up.

The weights are on the host, and what lies in the device buffer is overwritten by the next copy. So whoever
writes a parameter, points it elsewhere or puts another in its place is told so, where that can be seen
without reading values: by the object, its address and torch's own count of writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from moedoctor.fixes.offload.prefetch import Pipeline
from moedoctor.fixes.offload.storage import StoredLayer

_INSTEAD = "load weights with load_state_dict(), or call restore() first"


class Guard:
    """The offloaded parameters of one layer, as they were left by the offload."""

    def __init__(self, layer: StoredLayer, pipeline: Pipeline, index: int) -> None:
        self._places = places(layer)
        self._pipeline = pipeline
        self._index = index
        self._names = [one.names[0] for one, _ in layer.items]
        self._parameters = [one.parameter for one, _ in layer.items]
        base = pipeline.buffers[pipeline.units[index].slot].data_ptr()
        self._addresses = [base + region.offset for _, region in layer.items]
        self._versions: list[int | None] = [one._version for one in self._parameters]

    def check(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """`weights`, what the module has now, are the parameters as they were left; their counts of writes.

        Raises RuntimeError, naming the parameter, where one was written or replaced.
        """
        for name, what in self._changes(weights):
            raise RuntimeError(f"{name} is offloaded and {what}, which is not kept: {_INSTEAD}")
        return [one._version for one in weights]

    def check_after(self, weights: Sequence[torch.Tensor], before: Sequence[int]) -> None:
        """The layer has run. Raises RuntimeError, naming the parameter, where it wrote its own weights."""
        for name, one, version in zip(self._names, weights, before, strict=True):
            if one._version != version:
                raise RuntimeError(
                    f"{name} is offloaded and was written by its layer's own forward, which is not kept:"
                    " leave it out of patterns="
                )

    def changed(self) -> list[str]:
        """Names of the parameters that `check` would raise for."""
        return [name for name, _ in self._changes(self._now())]

    def check_now(self) -> None:
        """`check` of what the module has now."""
        self.check(self._now())

    def loaded(self, parameter: nn.Parameter) -> None:
        """The weights on the host are new, and `load_state_dict` is about to write `parameter` too."""
        for place, one in enumerate(self._parameters):
            if one is parameter:
                self._versions[place] = None

    def _now(self) -> list[torch.Tensor]:
        return [getattr(owner, name) for owner, name in self._places]

    def _changes(self, weights: Sequence[torch.Tensor]) -> Iterator[tuple[str, str]]:
        counted = self._index not in self._pipeline.compiled
        for place, weight in enumerate(weights):
            if weight is not self._parameters[place]:
                yield self._names[place], "another tensor was put in its place"
            elif weight.data_ptr() != self._addresses[place]:
                yield self._names[place], "its data was exchanged or moved"
            elif self._versions[place] is None:
                self._versions[place] = weight._version
            elif counted and weight._version != self._versions[place]:
                yield self._names[place], "was written in place"


def places(layer: StoredLayer) -> list[tuple[nn.Module, str]]:
    """Where the layer's parameters hang: the module and the attribute."""
    return [(one.owner, _attribute(one.owner, one.parameter)) for one, _ in layer.items]


def _attribute(owner: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, one in owner.named_parameters(recurse=False) if one is parameter)


class StateHooks:
    """`state_dict` and `load_state_dict` of one module, which mean the weights on the host.

    The device buffer of a parameter holds any layer's weights.
    """

    def __init__(self, owner: nn.Module, layer: StoredLayer, pipeline: Pipeline, guard: Guard) -> None:
        self._pipeline = pipeline
        self._guard = guard
        self._hosts = {}
        self._parameters = {}
        self._new: set[str] = set()
        for one, region in layer.items:
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                if parameter is one.parameter:
                    self._hosts[name] = region.of(layer.block.bytes)
                    self._parameters[name] = one.parameter
        self.handles: list[Any] = [
            owner._register_state_dict_hook(self._saved),
            owner._register_load_state_dict_pre_hook(self._load),
            owner.register_load_state_dict_post_hook(self._loaded),
        ]

    def _saved(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._guard.check_now()
        state.update((prefix + name, host) for name, host in self._hosts.items() if prefix + name in state)

    def _load(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, host in self._hosts.items():
            new = state.get(prefix + name)
            if isinstance(new, torch.Tensor) and new.shape == host.shape:
                self._pipeline.settle()
                host.copy_(new)
                self._guard.loaded(self._parameters[name])
                self._new.add(name)

    def _loaded(self, module: nn.Module, incompatible: Any) -> None:
        """With assign=True another parameter was put in place; the one that reads the buffer comes back."""
        for name in self._new:
            module._parameters[name] = self._parameters[name]
        self._new.clear()


class Watch(TorchDispatchMode):
    """Sees what runs between the layers of a pass. Compiled code, and what layers do, it does not see."""

    def __init__(self, root: nn.Module, layers: Sequence[StoredLayer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root = root
        self._layers = layers
        self._names: dict[int | None, str] = {}
        self.done = False
        self.saw = False
        """Whether a whole pass ran under it."""

    def over(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `forward` returns. Raises RuntimeError where it reads offloaded weights between layers."""
        # Compiled parts would be run eagerly under a mode, and round otherwise.
        if not any(_is_compiled(one) for one in self._root.modules()):
            items = [one for layer in self._layers for one, _ in layer.items]
            self._names = {memory_of(one.parameter): one.names[0] for one in items}
            with self:
                output = forward(*args, **kwargs)
            self.saw = True
        else:
            output = forward(*args, **kwargs)
        self.done = True
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func):
            for one in tensors_in((args, kwargs or {})):
                name = self._names.get(memory_of(one))
                if name is not None:
                    raise RuntimeError(
                        f"{name} is offloaded, and {func} uses it outside of its layer's forward, where other"
                        " weights lie in its place: name the module that uses it with layers=, or keep it on"
                        " the device by leaving it out of patterns="
                    )
        return func(*args, **(kwargs or {}))


def unwatched(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a layer's function, whose reads are in order."""
    watch = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    if not isinstance(watch, Watch):
        return function(*args, **kwargs)
    watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        return function(*args, **kwargs)
    finally:
        watch.__enter__()  # type: ignore[no-untyped-call]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _reads(func: Any) -> bool:
    """Whether it uses values: a view does not, nor does what takes type and shape alone."""
    name = func._schema.name.partition("::")[2]
    if name.startswith("new_") or name.endswith("_like"):
        return False
    aliases = [one.alias_info for one in func._schema.returns]
    return not any(one is not None and not one.is_write for one in aliases)


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors of what a layer returns: one, or any nesting of tuples, lists and mappings of them."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [one for item in output for one in tensors_in(item)]
    if isinstance(output, Mapping):
        return [one for item in output.values() for one in tensors_in(item)]
    return []


def memory_of(tensor: torch.Tensor) -> int | None:
    """The same for tensors that lie in the same memory; None for kinds without a plain one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return int(tensor.untyped_storage()._cdata)
