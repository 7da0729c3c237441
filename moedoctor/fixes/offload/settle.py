"""Moving what a loader left on the CPU to the device, for whoever holds it.

A quantisation config may hold another tensor over the memory of a parameter. It has to see the device too,
and the same memory as before: so memory is moved piece by piece, and every tensor in a piece is pointed
into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from moedoctor.fixes.offload.plan import span, storage_key
from moedoctor.fixes.offload.storage import Kept

_ALIGNMENT = 16
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
        if not _is_plain(one):
            kept.append((one, one.data))
            one.data = one.data.to(device)
    groups: dict[int, list[torch.Tensor]] = {}
    for one in own.values():
        if _is_plain(one) and one.device != device:
            groups.setdefault(storage_key(one), []).append(one)
    for one in held:
        if id(one) not in own and one.device != device and _is_plain(one) and storage_key(one) in groups:
            groups[storage_key(one)].append(one)
    for group in groups.values():
        for piece in _pieces(group):
            if any(id(one) in own for one in piece[2]):
                _move(piece, device, kept)


def _is_plain(tensor: torch.Tensor) -> bool:
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
            pieces.append((first - first % _ALIGNMENT, end, [one]))
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
