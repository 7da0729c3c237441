"""The operators around each offloaded layer, which a compiler traces and keeps in order.

`wait` is declared to write the layer's parameters, so nothing that reads them can move in front of it, not
even what depends on weights alone. It is declared to write the layer's inputs too: an opaque operator that
finds the weights by itself, as vLLM's MoE layer does, has no other tie to it. `release` reads the layer's
outputs, so it comes behind all that led to them. All write a token, which orders them among each other.
`eager` is false in compiled code.
`copied` is a clone that no compiler takes out: it sees no reason for one where weights are returned.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from moedoctor.fixes.offload.prefetch import Pipeline

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


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors of what a layer returns: one, or any nesting of tuples, lists and mappings of them."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [one for item in output for one in tensors_in(item)]
    if isinstance(output, Mapping):
        return [one for item in output.values() for one in tensors_in(item)]
    return []


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


def memory_of(tensor: torch.Tensor) -> int | None:
    """The same for tensors that lie in the same memory; None for kinds without a plain one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return int(tensor.untyped_storage()._cdata)


def _lies_in(tensor: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    if torch.compiler.is_compiling():  # storages cannot be traced, bases can
        return any(tensor is one or tensor._base is one for one in weights)
    memory = memory_of(tensor)
    return memory is not None and any(memory_of(one) == memory for one in weights)
