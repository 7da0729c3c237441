"""Moving the chosen parameters out of device memory and back, without copying anything twice."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from moedoctor.fixes.offload.pinned import HostBlock, Pin, allocate, device_view
from moedoctor.fixes.offload.plan import Known, Plan, span, storage_key
from moedoctor.fixes.offload.prefetch import Region, Unit

Kept = tuple[torch.Tensor, torch.Tensor]
"""A parameter or buffer, and the data that it had."""

_ALIGNMENT = 512
"""What torch's CUDA allocator gives too; kernels may rely on it."""


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """One layer's offloaded parameters, in one block of host memory."""

    name: str
    module: nn.Module
    items: tuple[tuple[Known, Region], ...]
    block: HostBlock

    def unit(self, slot: int) -> Unit:
        """What the pipeline needs to know of it."""
        regions = tuple(region for _, region in self.items)
        return Unit(self.name, self.block.bytes, self.block.pinned, slot, regions)


@dataclass(frozen=True, eq=False)
class Originals:
    """Device memory that is to be freed, watched without holding on to it."""

    storages: tuple[tuple[StorageWeakRef, int], ...]
    """With the bytes of each."""

    def freed(self) -> int:
        """Bytes whose storages are gone."""
        return sum(size for storage, size in self.storages if storage.expired())

    def held(self) -> int:
        """Bytes that somebody still holds on to."""
        return sum(size for storage, size in self.storages if not storage.expired())


def store(plan: Plan, pin: Pin | None) -> tuple[list[StoredLayer], str | None]:
    """Copy the chosen parameters to the host, and leave the module as it is. Also why pinning failed."""
    layers, failure = [], None
    for (name, module), chosen in zip(plan.layers, plan.chosen, strict=True):
        items, offset = [], 0
        for one in chosen:
            items.append((one, _region(one.parameter, offset)))
            offset += -(-items[-1][1].nbytes // _ALIGNMENT) * _ALIGNMENT
        # After one refusal the next one is as likely, and pinning what little is left would help nobody.
        block, why = allocate(offset, pin if failure is None else None)
        failure = failure or why
        for one, region in items:
            _bytes_of(block.bytes, region).copy_(_raw(one.parameter, region))
        layers.append(StoredLayer(name, module, tuple(items), block))
    return layers, failure


def watch(layers: Sequence[StoredLayer], device: torch.device) -> Originals:
    """The device memory that the stored parameters lie in."""
    storages = {
        storage_key(one.parameter): one.parameter.untyped_storage()
        for layer in layers
        for one, _ in layer.items
        if one.parameter.device == device
    }
    return Originals(tuple((StorageWeakRef(one), one.nbytes()) for one in storages.values()))


def empty(layers: Sequence[StoredLayer], device: torch.device) -> list[Kept]:
    """Let go of the parameters' memory on `device`; gives the data of those that lie elsewhere.

    To let go of that too would make no room on the device, and they need it again if the rest fails.
    """
    kept: list[Kept] = []
    for layer in layers:
        for one, _ in layer.items:
            if one.parameter.device != device:
                kept.append((one.parameter, one.parameter.data))
            one.parameter.data = torch.empty(0, dtype=one.parameter.dtype, device=device)
    return kept


def undo(layers: Sequence[StoredLayer], device: torch.device, kept: Sequence[Kept]) -> None:
    """After a failure: the parameters are where they were before `empty`, with their values.

    Where `device` has no room any more for what lay on it, it stays on the host, and one warning names it.
    """
    elsewhere = {id(one) for one, _ in kept}
    homeless = []
    for layer in layers:
        for one, region in layer.items:
            if id(one.parameter) in elsewhere:
                continue
            try:
                one.parameter.data = _bring_back(region, layer.block.bytes, device)
            except RuntimeError:  # torch's for no memory is one
                one.parameter.data = region.of(layer.block.bytes)
                homeless.append(one.names[0])
    for tensor, data in kept:
        tensor.data = data
    if homeless:
        named = ", ".join(homeless[:3]) + (f" and {len(homeless) - 3} more" if homeless[3:] else "")
        said = f"an offload failed and {device} has no room left for what lay there: on the host now: {named}"
        warnings.warn(said, RuntimeWarning, stacklevel=3)


def point(layer: StoredLayer, memory: torch.Tensor) -> None:
    """Make the layer's parameters views of `memory`, uint8 [n] laid out like its block."""
    for one, region in layer.items:
        one.parameter.data = region.of(memory)


def map_into(layer: StoredLayer, device: torch.device) -> None:
    """Make the layer's parameters views of its pinned host memory. Raises PinError where it is not pinned."""
    point(layer, device_view(layer.block.bytes, device))


def bring_back(layers: Sequence[StoredLayer], device: torch.device) -> list[Kept]:
    """Device memory of their own for all parameters, filled from the host.

    Gives each with its new data, and changes none: if memory runs out, all are as they were.
    """
    return [
        (one.parameter, _bring_back(region, layer.block.bytes, device))
        for layer in layers
        for one, region in layer.items
    ]


def buffers_for(layers: Sequence[StoredLayer], device: torch.device) -> list[torch.Tensor]:
    """Two buffers, each as large as the largest layer that uses it; one where there are two layers."""
    count = 1 if len(layers) == 2 else 2
    sizes = [max(one.block.bytes.numel() for one in layers[slot::count]) for slot in range(count)]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def _bring_back(region: Region, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty(region.nbytes, dtype=torch.uint8, device=device)  # [nbytes]
    fresh.copy_(_bytes_of(memory, region))
    typed = torch.empty(0, dtype=region.dtype, device=device)
    return typed.set_(fresh.untyped_storage(), 0, region.size, region.stride)  # size


def _region(tensor: torch.Tensor, offset: int) -> Region:
    return Region(offset, span(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _bytes_of(memory: torch.Tensor, region: Region) -> torch.Tensor:
    return memory[region.offset : region.offset + region.nbytes]  # [nbytes]


def _raw(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The bytes from the first to the last element of `tensor`, gaps and all."""
    first = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), first, (region.nbytes,), (1,))  # [nbytes]


_ELEMENT = 16
"""No element is larger."""

_Piece = tuple[int, int, list[torch.Tensor]]
"""First byte in the storage, byte after the last, and the tensors that lie there."""


def settle_in(
    module: nn.Module, device: torch.device, held: Sequence[torch.Tensor], kept: list[Kept]
) -> None:
    """Move parameters and buffers that lie elsewhere to `device`, and `held` tensors over the same memory.

    What each was goes to `kept`.
    """
    own = {id(one): one for one in [*module.parameters(), *module.buffers()] if one.device != device}
    for one in own.values():
        if not _is_movable(one):
            kept.append((one, one.data))
            one.data = one.data.to(device)
    groups: dict[int, list[torch.Tensor]] = {}
    for one in own.values():
        if _is_movable(one) and one.device != device:
            groups.setdefault(storage_key(one), []).append(one)
    for one in held:
        if id(one) not in own and one.device != device and _is_movable(one) and storage_key(one) in groups:
            groups[storage_key(one)].append(one)
    for group in groups.values():
        for piece in _pieces(group):
            if any(id(one) in own for one in piece[2]):
                _move(piece, device, kept)


def _is_movable(tensor: torch.Tensor) -> bool:
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _pieces(group: Sequence[torch.Tensor]) -> list[_Piece]:
    """The tensors of one storage, those whose bytes overlap together."""
    pieces: list[_Piece] = []
    for one in sorted(group, key=_first):
        first, end = _first(one), _first(one) + span(one)
        if pieces and first < pieces[-1][1]:
            before = pieces.pop()
            pieces.append((before[0], max(before[1], end), [*before[2], one]))
        else:
            pieces.append((first - first % _ELEMENT, end, [one]))
    return pieces


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _move(piece: _Piece, device: torch.device, kept: list[Kept]) -> None:
    start, end, tensors = piece
    raw = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    raw.set_(tensors[0].untyped_storage(), start, (end - start,), (1,))  # [n]
    memory = torch.empty(end - start, dtype=torch.uint8, device=device)  # [n]
    memory.copy_(raw)
    for one in tensors:
        kept.append((one, one.data))
        typed = torch.empty(0, dtype=one.dtype, device=device)
        offset = (_first(one) - start) // one.element_size()
        one.data = typed.set_(memory.untyped_storage(), offset, one.size(), one.stride())
