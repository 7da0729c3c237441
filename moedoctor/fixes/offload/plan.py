"""Chooses what to offload: layers, the parameters of each that may go, and which of them fit the budget.

`make_plan` looks at a module and changes nothing. `RULES` lists why a parameter stays on the device.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import nn

from moedoctor.text import find_closest

_METADATA = re.compile(
    r"scale|zero|g_idx|sort_indices|absmax|(?:^|_)(?:zp|perm|permutation|alpha|global)s?(?=_|\d|$)"
)
_NAME_SHARE = 0.5
_TYPE_SHARE = 0.25
_VECTOR = 1 << 20
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_WHOLES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They read weights of the modules inside them, past those modules' `forward`."""
_FEW = 3
"""A container with fewer elements does not hold a module's layers."""
_DEPTH = 5
_OBJECTS = 20_000
"""Enough for any config. There is a limit because any object can hang on a module."""

Named = tuple[str, nn.Module]

RULES = (
    "name: the parameter's own name holds scale, zero, g_idx, sort_indices, absmax, or the word zp, perm,"
    f" alpha or global, and it has at most {_NAME_SHARE:.0%} of the bytes of the largest parameter beside it",
    "type and size: another dtype than the largest parameter beside it, and at most"
    f" {_TYPE_SHARE:.0%} of its bytes",
    f"vector: at most one dimension and at most {_VECTOR >> 20} MiB",
    "small: fewer bytes than keep_below",
    "shared: its memory belongs to something that stays, to another layer, or is held under another tensor"
    " by an object of the module, such as a quantization config",
    "reader: a hook before its layer's forward may read it, or a module outside of its layer owns it too",
    "written: the table of an embedding with max_norm, whose forward changes it",
    "kind: buffers, tensor subclasses, conjugate or negated views, and parameters outside of any layer",
)


@dataclass(frozen=True, eq=False)
class Weight:
    """One parameter of a module, under all its names."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    owners: tuple[nn.Module, ...]
    """The modules that have it as an attribute."""
    layers: tuple[int, ...]
    """Indices of the layers that use it. It can go only if there is exactly one."""


@dataclass(frozen=True)
class Plan:
    """The parameters that go, and the parameters that stay."""

    weights: Sequence[Weight]
    """All parameters of the module."""
    layers: Sequence[tuple[Named, Sequence[Weight]]]
    """The layers that have something to offload, in running order, each with the parameters that go."""
    reasons: Mapping[Weight, str]
    """The reason that a parameter stays."""


def make_plan(
    module: nn.Module,
    budget: int,
    patterns: Sequence[str],
    layers: Sequence[nn.Module] | None,
    keep_below: int,
    *,
    by_forward: bool = True,
) -> Plan:
    """Plan the offload of `module`. Raises ValueError for patterns and layers that do not fit it.

    `by_forward`: whether it is the layers' `forward` that reads their weights.
    """
    every_name = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not matches(every_name, pattern):
            near = ", ".join(find_closest_parts(pattern, every_name))
            raise ValueError(
                f"patterns: no parameter has {pattern!r} as a part of its name; the closest are: {near}"
            )
    units = find_layers(module) if layers is None else check_layers(module, layers, by_forward=by_forward)
    weights = _list_weights(module, units)
    barred = _find_barred(module, units, by_forward=by_forward)
    reasons: dict[Weight, str] = {}
    for weight in weights:
        reason = _find_own_reason(weight, patterns, keep_below) or barred.get(id(weight.parameter))
        if reason is not None:
            reasons[weight] = reason
    reasons |= _find_memory_reasons(module, weights, reasons)
    chosen: list[list[Weight]] = [[] for _ in units]
    left = budget
    for index in spread(len(units)):
        # Parameters that lie in one storage go together or not at all: else nothing would be freed.
        groups: dict[int, list[Weight]] = {}
        for weight in weights:
            if weight.layers == (index,) and weight not in reasons:
                groups.setdefault(identify_storage(weight.parameter), []).append(weight)
        for group in groups.values():
            needed = sum(measure_span(weight.parameter) for weight in group)
            if needed <= left:
                left -= needed
                chosen[index] += group
            else:
                reasons |= dict.fromkeys(group, "over the budget")
    used = [(unit, group) for unit, group in zip(units, chosen, strict=True) if group]
    if len(used) == 1:
        reasons |= dict.fromkeys(used.pop()[1], "the only layer to offload: its buffer is as large")
    return Plan(weights, used, reasons)


def _list_weights(module: nn.Module, units: Sequence[Named]) -> list[Weight]:
    """All parameters of `module`, each once."""
    names: dict[nn.Parameter, list[str]] = {}  # parameters are hashed by identity
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(parameter, []).append(owner)
    users: dict[nn.Parameter, list[int]] = {}
    for index, (_, unit) in enumerate(units):
        for parameter in unit.parameters():
            users.setdefault(parameter, []).append(index)
    return [
        Weight(tuple(own), parameter, tuple(owners[parameter]), tuple(users.get(parameter, ())))
        for parameter, own in names.items()
    ]


def _find_barred(module: nn.Module, units: Sequence[Named], *, by_forward: bool) -> dict[int, str]:
    """id of each parameter that may be read or written outside of its layer's `forward` -> why it stays."""
    barred: dict[int, str] = {}
    if by_forward:
        inside = _list_inside(units)
        for owner, reader in _find_readers(module):
            if reader is None or id(reader[1]) not in inside:
                why = "a module outside of its layer owns it too"
                barred.update((id(parameter), why) for parameter in owner.parameters(recurse=False))
        for _, unit in units:
            if unit._forward_pre_hooks:
                why = "a hook before its layer's forward may read it"
                barred.update((id(parameter), why) for parameter in unit.parameters())
    for embedding in module.modules():
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)) and embedding.max_norm is not None:
            barred[id(embedding.weight)] = "its embedding's forward changes it (max_norm)"
    return barred


def _find_own_reason(weight: Weight, patterns: Sequence[str], keep_below: int) -> str | None:
    """Return the reason that the parameter must stay, whatever else holds its memory."""
    if patterns and not any(matches(weight.names, pattern) for pattern in patterns):
        return "no pattern names it"
    if len(weight.layers) != 1:
        return "shared between layers" if weight.layers else "outside of the layers"
    siblings = list(weight.owners[-1].parameters(recurse=False))
    return find_rule(weight.names[0], weight.parameter, siblings, keep_below)


def _find_memory_reasons(
    module: nn.Module, weights: Sequence[Weight], reasons: Mapping[Weight, str]
) -> dict[Weight, str]:
    """Return the reason that each further parameter must stay: whole storages go or stay."""
    taken = {
        identify_storage(buffer): f"it shares memory with the buffer {name}"
        for name, buffer in module.named_buffers()
        if _is_plain(buffer) and buffer.numel()
    }
    parameters = {id(weight.parameter) for weight in weights}
    for tensor in find_held_tensors(module):
        if id(tensor) not in parameters and _is_plain(tensor):
            taken[identify_storage(tensor)] = (
                "its memory is held under another tensor by an object of the module"
            )
    layers_of: dict[int, tuple[int, ...]] = {}
    for weight in weights:
        if not _is_plain(weight.parameter):
            continue
        key = identify_storage(weight.parameter)
        if weight in reasons:
            taken.setdefault(key, f"it shares memory with {weight.names[0]}, which stays")
        elif layers_of.setdefault(key, weight.layers) != weight.layers:
            taken.setdefault(key, "its memory is shared between layers")
    free = [weight for weight in weights if weight not in reasons]
    return {
        weight: taken[identify_storage(weight.parameter)]
        for weight in free
        if identify_storage(weight.parameter) in taken
    }


def find_rule(
    name: str, tensor: torch.Tensor, siblings: Sequence[torch.Tensor], keep_below: int
) -> str | None:
    """Return the rule by which the parameter `tensor` stays on the device, or None if it may go.

    `siblings`: all parameters of the module that owns it, itself among them.
    """
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return f"{type(tensor.data).__name__} of layout {tensor.layout}: not plain memory"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugate or negative bit set: not plain memory"
    largest = max(siblings, key=lambda sibling: sibling.nbytes)
    share = tensor.nbytes / largest.nbytes if largest.nbytes else 1.0
    beside = largest is not tensor
    if beside and share <= _NAME_SHARE and is_metadata_name(name):
        return f"metadata by name, {share:.1%} of the largest parameter beside it"
    if beside and share <= _TYPE_SHARE and tensor.dtype != largest.dtype:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"metadata by type and size: {kind}, {share:.1%} of the largest parameter beside it"
    if tensor.dim() <= 1 and tensor.nbytes <= _VECTOR:
        return "vector"
    if tensor.nbytes < max(keep_below, 1):
        return f"fewer than {max(keep_below, 1)} bytes"
    return None


def is_metadata_name(name: str) -> bool:
    """Return True if the last dotted part of `name` is what quantization metadata is called."""
    return _METADATA.search(name.rpartition(".")[2].lower()) is not None


def matches(names: Sequence[str], pattern: str) -> bool:
    """Return True if `pattern` is whole dotted parts of a name: ``experts`` of ``mlp.experts.w2_weight``."""
    return any(f".{pattern}." in f".{name}." for name in names)


def find_closest_parts(pattern: str, names: Sequence[str]) -> list[str]:
    """Return up to three things that `pattern` may mean: parts of names, or else the shortest names."""
    parts = {part: None for name in names for part in [*name.split("."), name] if not part.isdigit()}
    return list(find_closest(pattern, parts)) or sorted(names, key=len)[:3]


def spread(count: int) -> list[int]:
    """Return 0 … count - 1 in an order in which every beginning is spread out evenly.

    So a budget for half of the layers takes every other layer, and each copy has two layers' time.
    """
    order: list[int] = []
    parts = 1
    while len(order) < count and parts <= 4 * count:
        for part in range(parts):
            index = (2 * part + 1) * count // (2 * parts)
            if index not in order:
                order.append(index)
        parts *= 2
    return order + [index for index in range(count) if index not in order]


def is_number(value: object) -> bool:
    """Return True if `value` is a finite number that a float holds."""
    with suppress(OverflowError):
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    return False


def measure_span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor, gaps included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def identify_storage(tensor: torch.Tensor) -> int:
    """The same number for tensors that lie in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


def runs(module: nn.Module) -> bool:
    """Return True if `forward` can be wrapped: lists have none, scripted modules a fixed one."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_layers(module: nn.Module) -> list[Named]:
    """Return the elements of the outermost containers, and the outermost other modules with parameters.

    A parent that owns parameters may read those of its children too, so it is one layer with them.
    """
    elements = _list_elements("", module)
    if len(elements) < _FEW:
        elements = []
    roots, inside = {id(element) for _, element in elements}, _list_inside(elements)
    owners: dict[int, Named] = {}  # modules that read parameters that no module below them is known to read
    for child, reader in _find_readers(module):
        owns = isinstance(child, _WHOLES) or next(child.parameters(recurse=False), None) is not None
        if not owns or reader is None or id(reader[1]) in inside:
            continue
        if not any(id(part) in roots for part in reader[1].modules()):
            owners.setdefault(id(reader[1]), reader)
    below = {id(part) for _, owner in owners.values() for part in owner.modules() if part is not owner}
    units = [*elements, *(owner for key, owner in owners.items() if key not in below)]
    order = {id(child): place for place, child in enumerate(module.modules())}
    return sorted(units, key=lambda unit: order[id(unit[1])])


def check_layers(module: nn.Module, given: Sequence[nn.Module], *, by_forward: bool) -> list[Named]:
    """Return the layers `given`, each once, with their names.

    `by_forward`: whether it is their `forward` that reads the weights. Raises ValueError for what cannot be a
    layer.
    """
    names = {id(child): name for name, child in module.named_modules()}
    unknown = [type(layer).__name__ for layer in given if id(layer) not in names]
    if unknown:
        raise ValueError(f"layers: {unknown[0]} is not a part of the module")
    units = list({id(layer): (names[id(layer)], layer) for layer in given}.values())
    for name, layer in units:
        inner = {id(child) for child in layer.modules() if child is not layer}
        if any(id(other) in inner for _, other in units):
            raise ValueError(f"layers: {name or 'the module itself'} contains another of the layers")
    for name, layer in units:
        if by_forward and not runs(layer):
            raise ValueError(
                f"layers: {name or 'the module itself'} ({type(layer).__name__}) has no forward to wrap;"
                " name the module that reads its parameters"
            )
    return units


def _find_readers(module: nn.Module) -> Iterator[tuple[nn.Module, Named | None]]:
    """Each module with the nearest module, itself or above it, whose `forward` can be wrapped."""
    readers: dict[str, Named | None] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        above = readers[name.rpartition(".")[0]] if name else None
        readers[name] = (name, child) if runs(child) else above
        yield child, readers[name]


def _list_elements(name: str, module: nn.Module) -> list[Named]:
    """The elements of the outermost containers that hold parameters, each once."""
    elements: dict[int, Named] = {}
    if isinstance(module, _WHOLES):
        return []
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if not (isinstance(module, _CONTAINERS) and runs(child)):
            elements.update((id(element), (at, element)) for at, element in _list_elements(full, child))
        elif next(child.parameters(), None) is not None:
            elements[id(child)] = (full, child)
    return list(elements.values())


def _list_inside(units: Sequence[Named]) -> set[int]:
    return {id(child) for _, unit in units for child in unit.modules()}


def find_held_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return tensors that plain objects of `module` hold, such as a quantization config with its scales.

    Attributes of modules, other than parameters and buffers, are followed through attributes, closures,
    dataclass fields, mappings, lists, tuples and sets; other modules are not.
    """
    tensors: dict[int, torch.Tensor] = {}
    visited: set[int] = set()
    queue: deque[tuple[Any, int]] = deque(
        (value, _DEPTH)
        for owner in module.modules()
        for name, value in vars(owner).items()
        if name not in ("_parameters", "_buffers", "_modules")
    )
    while queue:
        value, depth = queue.popleft()
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif depth and id(value) not in visited and not isinstance(value, (nn.Module, type)):
            if len(visited) >= _OBJECTS:
                break
            visited.add(id(value))
            queue.extend((inner, depth - 1) for inner in _list_held(value))
    return list(tensors.values())


def _list_held(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    attributes = getattr(value, "__dict__", None)  # of the instance: a property might do anything
    values = list(attributes.values()) if isinstance(attributes, dict) else []
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # not filled yet
            values.append(cell.cell_contents)
    return values
