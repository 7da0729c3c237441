"""The first eager pass is watched: weights that are read outside of their layer's `forward` are an error.

In their place lie other weights then, so the numbers would be wrong and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from moedoctor.fixes.offload.ops import memory_of, tensors_in
from moedoctor.fixes.offload.storage import StoredLayer


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
