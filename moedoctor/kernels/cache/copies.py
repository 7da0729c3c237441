"""Launches the copies of an expert cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton

from moedoctor.kernels.cache.transfer import transfer_kernel
from moedoctor.kernels.cache.unpack import unpack_kernel

_WIDE_TILE, _NARROW_TILE = 4096, 1024
"""int64 elements and bytes a program moves at once."""
_PROGRAMS = 16
"""Four of them fill a PCIe 5 link of an H200, the others cover their starts."""
_UNPACK_PROGRAMS = 128
"""One takes 7 microseconds for a block, of which the link needs 0.2."""


class Transfer:
    """The copies of one cache: host tensors [E, ...] to slots [capacity, ...], by the list of a lookup."""

    def __init__(
        self,
        host: Mapping[str, torch.Tensor],
        packed: Mapping[str, tuple[torch.Tensor, int, int]],
        slots: Mapping[str, torch.Tensor],
        sizes: tuple[int, int],
    ) -> None:
        """`host`: tensors [E, ...]; `packed`: uint8 [E, blocks, bytes], the elements of one expert, and the
        weights that a block can list.

        Each name is in one of them and in `slots`. What the host holds must be pinned where `slots` are on a
        GPU. All of them stay alive with this object. `sizes`: elements a block, those that share a byte.
        """
        self._keep = (dict(host), dict(packed), dict(slots))
        self._size, self._lanes = sizes
        self._rare = max((rare for _, _, rare in packed.values()), default=0)
        device = next(iter(slots.values())).device
        wide: list[Sequence[int]] = []
        narrow: list[Sequence[int]] = []
        for name, source in host.items():
            target = slots[name]
            stride = source[0].nbytes
            aligned = all(one % 16 == 0 for one in (source.data_ptr(), target.data_ptr(), stride))
            step = 8 * _WIDE_TILE if aligned else _NARROW_TILE
            for start in range(0, stride, step):
                length = min(step, stride - start)
                entry = (source.data_ptr() + start, target.data_ptr() + start, stride, length)
                (wide if aligned else narrow).append(entry)
        blocks: list[Sequence[int]] = []
        for name, (source, elements, rare) in packed.items():
            target = slots[name]
            for number in range(source.shape[1]):
                start = number * self._size
                from_to = (source.data_ptr() + number * source.shape[2], target.data_ptr() + 2 * start)
                inside = min(elements - start, self._size)
                blocks.append((*from_to, source[0].nbytes, target[0].nbytes, inside, rare))
        self._wide, self._narrow, self._blocks = (_table(one, device) for one in (wide, narrow, blocks))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(table.nbytes for table in (self._wide, self._narrow, self._blocks) if table is not None)

    def launch(
        self, copies: torch.Tensor, programs: int = _PROGRAMS, unpack_programs: int = _UNPACK_PROGRAMS
    ) -> None:
        """Carry out `copies` int32 [1 + 2 * capacity] on the current stream."""
        capacity = copies.numel() // 2
        with torch.cuda.device_of(copies):
            for table, wide in ((self._wide, True), (self._narrow, False)):
                if table is not None:
                    transfer_kernel[(programs,)](
                        copies,
                        table,
                        table.shape[0],
                        capacity=capacity,
                        wide=wide,
                        tile=_WIDE_TILE if wide else _NARROW_TILE,
                        num_warps=8 if wide else 4,
                    )
            if self._blocks is not None:
                unpack_kernel[(unpack_programs,)](
                    copies,
                    self._blocks,
                    self._blocks.shape[0],
                    capacity=capacity,
                    size=self._size,
                    lanes=self._lanes,
                    rare_lanes=triton.next_power_of_2(max(self._rare, 2)),
                    num_warps=8,
                )


def _table(rows: list[Sequence[int]], device: torch.device) -> torch.Tensor | None:
    return torch.tensor(rows, dtype=torch.int64, device=device) if rows else None
