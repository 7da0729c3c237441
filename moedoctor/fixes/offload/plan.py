"""What is to be offloaded: layers, the parameters of each that may go, and which of them fit the budget."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Known:
    """One parameter of a module, under all its names."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    owner: nn.Module
    layer: int | None
    """Index of the layer that it belongs to; None for none or several."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Parameters in, layers out."""

    known: tuple[Known, ...]
    layers: tuple[tuple[str, nn.Module], ...]
    """Those that have something to offload, in running order."""
    chosen: tuple[tuple[Known, ...], ...]
    """The parameters to offload, layer by layer."""
    reasons: Mapping[int, str]
    """id of a parameter that stays -> why."""


def make_plan(
    module: nn.Module,
    budget: int,
    patterns: Sequence[str],
    layers: Sequence[nn.Module] | None,
    keep_below: int,
    *,
    by_forward: bool = True,
) -> Plan:
    """Look at `module`, change nothing. Raises ValueError for patterns and layers that do not fit it.

    `by_forward`: whether it is the layers' `forward` that reads their weights.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    everything = [name for group in names.values() for name in group]
    for pattern in patterns:
        if not matches(everything, pattern):
            near = ", ".join(closest(pattern, everything))
            raise ValueError(
                f"patterns: no parameter has {pattern!r} as a part of its name; the closest are: {near}"
            )
    units = find_layers(module) if layers is None else check_layers(module, layers, by_forward=by_forward)
    place = _places(units)
    barred = _read_elsewhere(module, units) if by_forward else {}
    owners = {id(one): owner for owner in module.modules() for one in owner.parameters(recurse=False)}
    known = tuple(
        Known(tuple(group), parameters[key], owners[key], _only(place.get(key, [])))
        for key, group in names.items()
    )
    reasons = _reasons(module, known, place, barred, patterns, keep_below)
    chosen: list[tuple[Known, ...]] = [()] * len(units)
    left = budget
    for index in spread(len(units)):
        for group in _by_memory(
            [one for one in known if one.layer == index and id(one.parameter) not in reasons]
        ):
            needed = sum(span(one.parameter) for one in group)
            if needed <= left:
                left -= needed
                chosen[index] = (*chosen[index], *group)
            else:
                reasons.update((id(one.parameter), "over the budget") for one in group)
    if sum(1 for group in chosen if group) == 1:
        alone = next(group for group in chosen if group)
        reasons.update(
            (id(one.parameter), "the only layer to offload: its buffer is as large") for one in alone
        )
        chosen = [()] * len(units)
    used = [index for index in range(len(units)) if chosen[index]]
    return Plan(known, tuple(units[i] for i in used), tuple(chosen[i] for i in used), reasons)


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor, gaps and all."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _places(units: Sequence[tuple[str, nn.Module]]) -> dict[int, list[int]]:
    """id of a parameter -> the layers that use it."""
    place: dict[int, list[int]] = {}
    for index, (_, unit) in enumerate(units):
        for parameter in unit.parameters():
            place.setdefault(id(parameter), []).append(index)
    return place


def _read_elsewhere(module: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> dict[int, str]:
    """id of each parameter that may be read before or after its layer's `forward` -> why."""
    hooked = [one for _, one in units if one._forward_pre_hooks]
    why = dict.fromkeys(read_outside(module, units), "a module outside of its layer owns it too")
    for one in hooked:
        why.update((id(inner), "a hook before its layer's forward may read it") for inner in one.parameters())
    return why


def _by_memory(known: Sequence[Known]) -> list[list[Known]]:
    """Parameters that lie in one storage go together or not at all: else nothing would be freed."""
    groups: dict[int, list[Known]] = {}
    for one in known:
        groups.setdefault(storage_key(one.parameter), []).append(one)
    return list(groups.values())


def _only(indices: Sequence[int]) -> int | None:
    return indices[0] if len(indices) == 1 else None


def _reasons(
    module: nn.Module,
    known: Sequence[Known],
    place: Mapping[int, Sequence[int]],
    barred: Mapping[int, str],
    patterns: Sequence[str],
    keep_below: int,
) -> dict[int, str]:
    """id of each parameter that must stay -> why; settled for whole storages, which go or stay as one."""
    reasons: dict[int, str] = {}
    renormed = {
        id(one.weight)
        for one in module.modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None
    }
    for one in known:
        siblings = list(one.owner.parameters(recurse=False))
        why = stays(one.names[0], one.parameter, siblings, keep_below)
        if patterns and not any(matches(one.names, pattern) for pattern in patterns):
            why = "no pattern names it"
        elif one.layer is None:
            why = "shared between layers" if place.get(id(one.parameter)) else "outside of the layers"
        elif why is None and id(one.parameter) in renormed:
            why = "its embedding's forward changes it (max_norm)"
        elif why is None:
            why = barred.get(id(one.parameter))
        if why is not None:
            reasons[id(one.parameter)] = why
    taken = {
        storage_key(buffer): f"its memory is that of the buffer {name}"
        for name, buffer in _plain_buffers(module)
    }
    objects = {id(one.parameter) for one in known}
    for tensor in held_tensors(module):
        if id(tensor) not in objects and _is_plain(tensor):
            taken[storage_key(tensor)] = "its memory is held under another tensor by an object of the module"
    layer_of: dict[int, int | None] = {}
    for one in known:
        if not _is_plain(one.parameter):
            continue
        key = storage_key(one.parameter)
        if id(one.parameter) in reasons:
            taken.setdefault(key, f"its memory is that of {one.names[0]}, which stays")
        elif layer_of.setdefault(key, one.layer) != one.layer:
            taken.setdefault(key, "its memory is shared between layers")
    for one in known:
        if id(one.parameter) not in reasons and storage_key(one.parameter) in taken:
            reasons[id(one.parameter)] = taken[storage_key(one.parameter)]
    return reasons


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that lie in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _plain_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, one) for name, one in module.named_buffers() if _is_plain(one) and one.numel()]


_METADATA = re.compile(
    r"scale|zero|g_idx|sort_indices|absmax|(?:^|_)(?:zp|perm|permutation|alpha|global)s?(?=_|\d|$)"
)
_NAME_SHARE = 0.5
_TYPE_SHARE = 0.25
_VECTOR = 1 << 20

RULES = (
    "name: the parameter's own name holds scale, zero, g_idx, sort_indices, absmax, or the word zp, perm,"
    f" alpha or global, and it has at most {_NAME_SHARE:.0%} of the bytes of the largest parameter beside it",
    "type and size: another dtype than the largest parameter beside it, and at most"
    f" {_TYPE_SHARE:.0%} of its bytes",
    f"vector: at most one dimension and at most {_VECTOR >> 20} MiB",
    "small: fewer bytes than keep_below",
    "shared: its memory belongs to something that stays, to another layer, or is held under another tensor"
    " by an object of the module, such as a quantisation config",
    "reader: a hook before its layer's forward may read it, or a module outside of its layer owns it too",
    "written: the table of an embedding with max_norm, whose forward changes it",
    "kind: buffers, tensor subclasses, conjugate or negated views, and parameters outside of any layer",
)


def is_metadata_name(name: str) -> bool:
    """Whether the last dotted part of `name` is what quantisation metadata is called."""
    return _METADATA.search(name.rpartition(".")[2].lower()) is not None


def stays(name: str, tensor: torch.Tensor, siblings: Sequence[torch.Tensor], keep_below: int) -> str | None:
    """By which rule the parameter `tensor` stays on the device; None where it may go.

    `siblings`: all parameters of the module that owns it, itself among them.
    """
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        return f"{type(tensor.data).__name__} of layout {tensor.layout}: not plain memory"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugate or negative bit set: not plain memory"
    largest = max(siblings, key=lambda one: one.nbytes)
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


def matches(names: Sequence[str], pattern: str) -> bool:
    """Whether `pattern` is whole dotted parts of one of `names`: ``experts`` of ``mlp.experts.w2_weight``."""
    return any(f".{pattern}." in f".{name}." for name in names)


def closest(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three things that could have been meant by `pattern`: parts of names, or else whole names."""
    parts = list(
        dict.fromkeys(part for name in names for part in [*name.split("."), name] if not part.isdigit())
    )
    return difflib.get_close_matches(pattern, parts, n=3, cutoff=0.5) or sorted(names, key=len)[:3]


def spread(count: int) -> list[int]:
    """0 … count - 1 in an order whose every beginning is spread out evenly.

    So a budget for half of the layers takes every other one, and each copy has two layers' time.
    """
    order: list[int] = []
    parts = 1
    while len(order) < count:
        for part in range(parts):
            index = (2 * part + 1) * count // (2 * parts)
            if index not in order:
                order.append(index)
        parts *= 2
        if parts > 4 * count:
            order.extend(index for index in range(count) if index not in order)
    return order[:count]


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float holds."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


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
