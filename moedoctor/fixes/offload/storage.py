"""Moves parameters out of device memory and back, without copying anything twice."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from moedoctor.fixes.offload.pinned import HostBlock, Pin, allocate
from moedoctor.fixes.offload.plan import Plan, Weight, identify_storage, measure_span
from moedoctor.fixes.offload.prefetch import Region, Unit, view_at

Before = tuple[torch.Tensor, torch.Tensor]
"""A parameter or buffer, and the data that it had."""
Originals = list[tuple[StorageWeakRef, int]]
"""Storages in device memory that are to be freed, watched without holding on to them; and their bytes."""

_ALIGNMENT = 512
"""As torch's CUDA allocator aligns; kernels may rely on it."""
_LARGEST_ELEMENT = 16


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """One layer's offloaded parameters, in one block of host memory."""

    name: str
    module: nn.Module
    items: tuple[tuple[Weight, Region], ...]
    block: HostBlock

    def make_unit(self, slot: int) -> Unit:
        """Return what the pipeline needs to know of it."""
        regions = tuple(region for _, region in self.items)
        return Unit(self.name, self.block.bytes, self.block.pinned, slot, regions)

    def bind(self, memory: torch.Tensor) -> None:
        """Make its parameters views of `memory`, uint8 [n] laid out like its block."""
        for weight, region in self.items:
            weight.parameter.data = region.view(memory)


def store(plan: Plan, pin: Pin | None) -> tuple[list[StoredLayer], str | None]:
    """Return the chosen parameters, copied to the host, and why pinning failed."""
    layers, failure = [], None
    for (name, module), chosen in plan.layers:
        items, offset = [], 0
        for weight in chosen:
            tensor = weight.parameter
            region = Region(
                offset, measure_span(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
            )
            items.append((weight, region))
            offset += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
        # After one refusal the next is as likely, and pinning what little is left would help nobody.
        block, why = allocate(offset, pin if failure is None else None)
        failure = failure or why
        for weight, region in items:
            region.view_bytes(block.bytes).copy_(
                _view_bytes(weight.parameter, _find_first_byte(weight.parameter), region.nbytes)
            )
        layers.append(StoredLayer(name, module, tuple(items), block))
    return layers, failure


def watch(layers: Sequence[StoredLayer], device: torch.device) -> Originals:
    """Return the device memory that the stored parameters lie in."""
    storages = {
        identify_storage(weight.parameter): weight.parameter.untyped_storage()
        for layer in layers
        for weight, _ in layer.items
        if weight.parameter.device == device
    }
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]


def free(layers: Sequence[StoredLayer], device: torch.device) -> list[Before]:
    """Let go of the parameters' memory on `device`. Return the data of those that lie elsewhere.

    Letting go of that too would make no room on the device, and it is needed again if the rest fails.
    """
    before: list[Before] = []
    for layer in layers:
        for weight, _ in layer.items:
            if weight.parameter.device != device:
                before.append((weight.parameter, weight.parameter.data))
            weight.parameter.data = torch.empty(0, dtype=weight.parameter.dtype, device=device)
    return before


def undo(layers: Sequence[StoredLayer], device: torch.device, before: Sequence[Before]) -> None:
    """After a failure: put the parameters where they were before `free`, with their values.

    If `device` has no room any more for what lay on it, it stays on the host, and one warning names it.
    """
    elsewhere = {id(tensor) for tensor, _ in before}
    homeless = []
    for layer in layers:
        for weight, region in layer.items:
            if id(weight.parameter) in elsewhere:
                continue
            try:
                weight.parameter.data = _bring_back(region, layer.block.bytes, device)
            except RuntimeError:  # torch's error for no memory is one
                weight.parameter.data = region.view(layer.block.bytes)
                homeless.append(weight.names[0])
    for tensor, data in before:
        tensor.data = data
    if homeless:
        message = f"an offload failed and {device} has no room left for what lay there: on the host now: "
        warnings.warn(message + name_some(homeless), RuntimeWarning, stacklevel=3)


def name_some(names: Sequence[str]) -> str:
    """Name the first three and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def bring_back(layers: Sequence[StoredLayer], device: torch.device) -> list[Before]:
    """Return all parameters, each with new device memory of its own that is filled from the host.

    Changes no parameter: if memory runs out, all are as they were.
    """
    return [
        (weight.parameter, _bring_back(region, layer.block.bytes, device))
        for layer in layers
        for weight, region in layer.items
    ]


def make_buffers(layers: Sequence[StoredLayer], device: torch.device) -> list[torch.Tensor]:
    """Two buffers, each as large as the largest layer that uses it; one if there are two layers."""
    count = 1 if len(layers) == 2 else 2
    sizes = [max(layer.block.bytes.numel() for layer in layers[slot::count]) for slot in range(count)]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def _bring_back(region: Region, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty(region.nbytes, dtype=torch.uint8, device=device)  # [nbytes]
    fresh.copy_(region.view_bytes(memory))
    return view_at(fresh, 0, region.dtype, region.size, region.stride)


def settle_in(
    module: nn.Module, device: torch.device, held: Sequence[torch.Tensor], before: list[Before]
) -> None:
    """Move parameters and buffers that a loader left elsewhere to `device`, for everybody who holds them.

    A quantization config may hold another tensor over the memory of a parameter; `held` are such tensors.
    They must see the device too, and the same memory as before. So memory is moved piece by piece, and every
    tensor in a piece is pointed into it. What each tensor was is added to `before`.
    """
    own = {
        id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.device != device
    }
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in own.values():
        if _is_movable(tensor):
            groups.setdefault(identify_storage(tensor), []).append(tensor)
        else:
            before.append((tensor, tensor.data))
            tensor.data = tensor.data.to(device)
    for tensor in held:
        if id(tensor) not in own and tensor.device != device and _is_movable(tensor):
            groups.get(identify_storage(tensor), []).append(tensor)
    for group in groups.values():
        for start, end, tensors in _split_pieces(group):
            if any(id(tensor) in own for tensor in tensors):
                memory = torch.empty(end - start, dtype=torch.uint8, device=device)  # [end - start]
                memory.copy_(_view_bytes(tensors[0], start, end - start))
                for tensor in tensors:
                    before.append((tensor, tensor.data))
                    size, stride = tuple(tensor.size()), tuple(tensor.stride())
                    tensor.data = view_at(
                        memory, _find_first_byte(tensor) - start, tensor.dtype, size, stride
                    )


def _is_movable(tensor: torch.Tensor) -> bool:
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _split_pieces(group: Sequence[torch.Tensor]) -> list[tuple[int, int, list[torch.Tensor]]]:
    """(first byte in the storage, byte after the last, tensors) of each part of one storage.

    Tensors whose bytes overlap are in one piece.
    """
    pieces: list[tuple[int, int, list[torch.Tensor]]] = []
    for tensor in sorted(group, key=_find_first_byte):
        first, end = _find_first_byte(tensor), _find_first_byte(tensor) + measure_span(tensor)
        if pieces and first < pieces[-1][1]:
            start, last, tensors = pieces.pop()
            pieces.append((start, max(last, end), [*tensors, tensor]))
        else:
            pieces.append((first - first % _LARGEST_ELEMENT, end, [tensor]))
    return pieces


def _find_first_byte(tensor: torch.Tensor) -> int:
    """The tensor's first byte in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _view_bytes(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """uint8 [count] from byte `first` of the tensor's storage on, gaps included."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), first, (count,), (1,))
