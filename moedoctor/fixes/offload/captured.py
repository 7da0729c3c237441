"""Tensors that plain objects of a module hold, such as a quantisation config with its scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 5
_OBJECTS = 20_000
"""Enough for any config; a bound because what hangs on a module may be anything."""
_OWN = {"_parameters", "_buffers", "_modules"}


def held_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Tensors reachable from attributes of `module` and its submodules, other than as parameter or buffer.

    Attributes, dataclass fields, mappings, lists, tuples and sets are followed; other modules are not.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    for owner in module.modules():
        for key, value in vars(owner).items():
            if key not in _OWN:
                _walk(value, found, seen, _DEPTH)
    return list(found.values())


def _walk(value: Any, found: dict[int, torch.Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
        return
    if depth == 0 or id(value) in seen or len(seen) >= _OBJECTS or isinstance(value, (nn.Module, type)):
        return
    seen.add(id(value))
    for item in _inside(value):
        _walk(item, found, seen, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)
    elif dataclasses.is_dataclass(value):
        yield from (getattr(value, one.name, None) for one in dataclasses.fields(value))
    else:
        yield from _attributes(value)


def _attributes(value: Any) -> Iterable[Any]:
    """Instance attributes, read off the instance: a property might do anything."""
    own = getattr(value, "__dict__", None)
    yield from list(own.values()) if isinstance(own, dict) else []
    closure = getattr(value, "__closure__", None) or ()
    for cell in closure:
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
