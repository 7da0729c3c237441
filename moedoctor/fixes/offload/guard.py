"""Errors in place of wrong numbers: writes to offloaded weights, copies, and reads outside of a layer.

The weights are on the host, and a device buffer is overwritten by the next copy. So a write to a parameter
would be lost, and a read outside of the layer's `forward` would find another layer's weights. `Guard` sees
writes without reading values: by the object, its address and torch's own count of writes in place. `Watch`
sees reads, in the first eager pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from moedoctor.fixes.offload.plan import identify_storage
from moedoctor.fixes.offload.prefetch import Pipeline
from moedoctor.fixes.offload.storage import StoredLayer

_INSTEAD = "load weights with load_state_dict(), or call restore() first"


class Guard:
    """The offloaded parameters of one layer, as they were left by the offload."""

    def __init__(self, layer: StoredLayer, pipeline: Pipeline, index: int) -> None:
        self._places = [
            next((owner, name) for name, own in owner.named_parameters(recurse=False) if own is parameter)
            for owner, parameter in ((weight.owners[-1], weight.parameter) for weight, _ in layer.items)
        ]
        self._pipeline = pipeline
        self._index = index
        self._names = [weight.names[0] for weight, _ in layer.items]
        self._parameters = [weight.parameter for weight, _ in layer.items]
        base = pipeline.buffers[pipeline.units[index].slot].data_ptr()
        self._addresses = [base + region.offset for _, region in layer.items]
        self._versions: list[int | None] = [parameter._version for parameter in self._parameters]

    def read_weights(self) -> list[torch.Tensor]:
        """Return what the module has now in the places of the parameters."""
        return [getattr(owner, name) for owner, name in self._places]

    def check(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """Check that `weights` are the parameters as they were left. Return their counts of writes.

        Raises RuntimeError, naming the parameter, if one was written or replaced.
        """
        for name, what in self._find_changes(weights):
            raise RuntimeError(f"{name} is offloaded and {what}, which is not kept: {_INSTEAD}")
        return [weight._version for weight in weights]

    def check_after(self, weights: Sequence[torch.Tensor], before: Sequence[int]) -> None:
        """Raise RuntimeError, naming the parameter, if the layer has written its own weights."""
        for name, weight, version in zip(self._names, weights, before, strict=True):
            if weight._version != version:
                raise RuntimeError(
                    f"{name} is offloaded and was written by its layer's own forward, which is not kept:"
                    " leave it out of patterns="
                )

    def list_changed(self) -> list[str]:
        """Return the names of the parameters that `check` would raise for."""
        return [name for name, _ in self._find_changes(self.read_weights())]

    def note_load(self, parameter: nn.Parameter) -> None:
        """The weights on the host are new, and `load_state_dict` is about to write `parameter` too."""
        for place, own in enumerate(self._parameters):
            if own is parameter:
                self._versions[place] = None

    def _find_changes(self, weights: Sequence[torch.Tensor]) -> Iterator[tuple[str, str]]:
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


class StateHooks:
    """`state_dict` and `load_state_dict` of one module, which mean the weights on the host."""

    def __init__(
        self, owner: nn.Module, layer: StoredLayer, pipeline: Pipeline, guard: Guard, handles: list[Any]
    ) -> None:
        self._pipeline = pipeline
        self._guard = guard
        self._stored: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}
        """Attribute -> the parameter, and its weights on the host."""
        self._new: set[str] = set()
        for weight, region in layer.items:
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                if parameter is weight.parameter:
                    self._stored[name] = weight.parameter, region.view(layer.block.bytes)
        hooks: tuple[tuple[Any, Any], ...] = (
            (owner._register_state_dict_hook, self._save),
            (owner._register_load_state_dict_pre_hook, self._load),
            (owner.register_load_state_dict_post_hook, self._put_back),
        )
        for register, hook in hooks:
            handles.append(register(hook))  # at once: if the next fails, this one is removed

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._guard.check(self._guard.read_weights())
        for name, (_, host) in self._stored.items():
            if prefix + name in state:
                state[prefix + name] = host

    def _load(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, (parameter, host) in self._stored.items():
            new = state.get(prefix + name)
            if isinstance(new, torch.Tensor) and new.shape == host.shape:
                self._pipeline.settle()
                host.copy_(new)
                self._guard.note_load(parameter)
                self._new.add(name)

    def _put_back(self, module: nn.Module, incompatible: Any) -> None:
        """Put the parameter that reads the buffer back: assign=True puts another in its place."""
        for name in self._new:
            module._parameters[name] = self._stored[name][0]
        self._new.clear()


class Watch(TorchDispatchMode):
    """Watches the first eager pass: a read of an offloaded weight between layers raises RuntimeError.

    It does not see what compiled code and layers do.
    """

    def __init__(self, root: nn.Module, layers: Sequence[StoredLayer], pipeline: Pipeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root = root
        self._weights = [weight for layer in layers for weight, _ in layer.items]
        self._pipeline = pipeline
        self._names: dict[int | None, str] = {}
        self.done = False

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `forward` returns. Raises RuntimeError if it reads offloaded weights between layers."""
        # Compiled parts would be run eagerly under a mode, and round otherwise.
        modules = self._root.modules()
        if any(module._compiled_call_impl or "_orig_mod" in module._modules for module in modules):
            output = forward(*args, **kwargs)
            self._pipeline.go_unwatched("in parts compiled")
        else:
            self._names = {identify_memory(weight.parameter): weight.names[0] for weight in self._weights}
            with self:
                output = forward(*args, **kwargs)
            self._pipeline.watched = True
        self.done = True
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func):
            for tensor in find_tensors((args, kwargs or {})):
                name = self._names.get(identify_memory(tensor))
                if name is not None:
                    raise RuntimeError(
                        f"{name} is offloaded, and {func} uses it outside of its layer's forward, where other"
                        " weights lie in its place: name the module that uses it with layers=, or keep it on"
                        " the device by leaving it out of patterns="
                    )
        return func(*args, **(kwargs or {}))


def call_unwatched(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a layer's function, which may read its weights."""
    watch = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    if not isinstance(watch, Watch):
        return function(*args, **kwargs)
    watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        return function(*args, **kwargs)
    finally:
        watch.__enter__()  # type: ignore[no-untyped-call]


def _reads(func: Any) -> bool:
    """Return True if the operator uses values: a view does not, nor does `empty_like`."""
    name = func._schema.name.partition("::")[2]
    if name.startswith("new_") or name.endswith("_like"):
        return False
    aliases = [result.alias_info for result in func._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in any nesting of tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts: Any = value.values() if isinstance(value, Mapping) else ()
    if isinstance(value, (tuple, list)):
        parts = value
    return [tensor for part in parts for tensor in find_tensors(part)]


def identify_memory(tensor: torch.Tensor) -> int | None:
    """The same number for tensors that lie in the same memory; None for kinds without plain memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return identify_storage(tensor)
