"""Which modules are the layers: what is fetched before a module's `forward` must be read in there alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_WHOLES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They read weights of the modules inside them, past those modules' `forward`."""
_FEW = 3
"""With fewer elements a container is not what gives a module its layers."""

Named = tuple[str, nn.Module]


def runs(module: nn.Module) -> bool:
    """Whether `module` has a `forward` that can be wrapped: lists have none, scripted modules a fixed one."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_layers(module: nn.Module) -> list[Named]:
    """The elements of the outermost containers, and beside them the outermost modules that own parameters.

    A parent that owns parameters may read those of its children too, so it is one layer with them.
    """
    elements = _elements("", module)
    if len(elements) < _FEW:
        elements = []
    roots = {id(one) for _, one in elements}
    inside = _within(elements)
    owners = [
        (name, one)
        for name, one in _owners(module)
        if id(one) not in inside and not any(id(inner) in roots for inner in one.modules())
    ]
    below = {id(inner) for _, one in owners for inner in one.modules() if inner is not one}
    units = [*elements, *(pair for pair in owners if id(pair[1]) not in below)]
    order = {id(one): place for place, one in enumerate(module.modules())}
    return sorted(units, key=lambda pair: order[id(pair[1])])


def check_layers(module: nn.Module, given: Sequence[nn.Module], *, by_forward: bool) -> list[Named]:
    """The layers `given`, each once, with their names. Raises ValueError for what cannot be a layer.

    `by_forward`: whether it is their `forward` that reads the weights.
    """
    found = {id(one): (name, one) for name, one in module.named_modules()}
    given = list(given)  # may be an iterator
    unknown = [type(one).__name__ for one in given if id(one) not in found]
    if unknown:
        raise ValueError(f"layers: {unknown[0]} is no part of the module")
    units = list({id(one): found[id(one)] for one in given}.values())
    for name, one in units:
        if any(other is not one and any(other is inner for inner in one.modules()) for _, other in units):
            raise ValueError(f"layers: {name or 'the module itself'} contains another of the layers")
    for name, one in units:
        if by_forward and not runs(one):
            raise ValueError(
                f"layers: {name or 'the module itself'} ({type(one).__name__}) has no forward to wrap;"
                " name the module that reads its parameters"
            )
    return units


def read_outside(module: nn.Module, units: Sequence[Named]) -> set[int]:
    """ids of parameters that a module outside of all `units` owns too, and so may read at any time."""
    inside = _within(units)
    readers = _readers(module)
    return {
        id(parameter)
        for name, owner in module.named_modules(remove_duplicate=False)
        for parameter in owner.parameters(recurse=False)
        if (reader := readers[name]) is None or id(reader[1]) not in inside
    }


def _owners(module: nn.Module) -> list[Named]:
    """The modules whose `forward` reads parameters that no module below them is known to read, each once."""
    readers = _readers(module)
    found: dict[int, Named] = {}
    for name, one in module.named_modules(remove_duplicate=False):
        whole = isinstance(one, _WHOLES)
        reader = readers[name]
        if reader is not None and (whole or next(one.parameters(recurse=False), None) is not None):
            found.setdefault(id(reader[1]), reader)
    return list(found.values())


def _readers(module: nn.Module) -> dict[str, Named | None]:
    """For the name of each module, the nearest one, itself or above it, whose `forward` can be wrapped."""
    found: dict[str, Named | None] = {}
    for name, one in module.named_modules(remove_duplicate=False):
        above = found[name.rpartition(".")[0]] if name else None
        found[name] = (name, one) if runs(one) else above
    return found


def _elements(name: str, module: nn.Module) -> list[Named]:
    """The elements of the outermost containers that hold parameters, each once."""
    found: dict[int, Named] = {}
    if isinstance(module, _WHOLES):
        return []
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if isinstance(module, _CONTAINERS) and runs(child):
            inner = [(full, child)] if next(child.parameters(), None) is not None else []
        else:
            inner = _elements(full, child)
        found.update((id(one), (where, one)) for where, one in inner)
    return list(found.values())


def _within(units: Sequence[Named]) -> set[int]:
    return {id(inner) for _, one in units for inner in one.modules()}
