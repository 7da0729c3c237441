"""What is to be offloaded: layers, the parameters of each that may go, and which of them fit the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moedoctor.fixes.offload.captured import held_tensors
from moedoctor.fixes.offload.layers import check_layers, find_layers, read_outside
from moedoctor.fixes.offload.policy import closest, matches, spread, stays


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
