"""Copies experts from pinned host memory to their slots, by a list on the device.

A kernel reads pinned memory in place, at the address that `find_device_address` gives. Every program reads a
tile of 32 KiB at once; a few of them keep the bus busy, and they need no copy engine and no host.

Shapes: E experts, chunks (pieces that an expert is copied in), tile (elements of a chunk). Of packed blocks:
size elements in columns bytes of lanes elements each, tail words at the end, rare weights in its list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from moedoctor.kernels.device_guard import make_current
from moedoctor.kernels.host_address import find_device_address


@triton.jit(do_not_specialize=["chunks"])
def transfer_kernel(
    copies_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.constexpr,
    wide: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Carry out `copies`, the list of `lookup_kernel`, any number of programs.

    `table` int64 [chunks, 4] cuts an expert into chunks of at most a tile: address in the host's expert 0,
    address in slot 0, bytes from one expert to the next, bytes of the chunk. `wide`: all of them are
    multiples of 16, and a tile is of int64; else of bytes.
    """
    total = tl.load(copies_ptr) * chunks
    place = tl.arange(0, tile)  # [tile]
    index = tl.program_id(0)
    while index < total:
        number = index // chunks
        entry = table_ptr + (index - number * chunks) * 4
        expert = tl.load(copies_ptr + 1 + number).to(tl.int64)
        slot = tl.load(copies_ptr + 1 + capacity + number).to(tl.int64)
        stride = tl.load(entry + 2)
        length = tl.load(entry + 3)
        source = tl.load(entry) + expert * stride
        target = tl.load(entry + 1) + slot * stride
        if wide:
            inside = place < tl.multiple_of((length // 8).to(tl.int32), 2)
            from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
            to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        else:
            inside = place < length.to(tl.int32)
            from_ptr = source.to(tl.pointer_type(tl.uint8))
            to_ptr = target.to(tl.pointer_type(tl.uint8))
        tl.store(to_ptr + place, tl.load(from_ptr + place, mask=inside), mask=inside)
        index += tl.num_programs(0)


_WIDE_TILE, _NARROW_TILE = 4096, 1024
"""int64 elements and bytes a program moves at once."""
_PROGRAMS = 16
"""Four of them fill a PCIe 5 link of an H200, the others cover their starts."""
_UNPACK_PROGRAMS = 128
"""Half or twice as many take the same time: the link is the limit."""
_UNPACK_WARPS = 8


class Transfer:
    """The copies of one cache: host tensors [E, ...] to slots [capacity, ...], by the list of a lookup."""

    def __init__(
        self,
        host: Mapping[str, torch.Tensor],
        packed: Mapping[str, tuple[torch.Tensor, int, int, int]],
        slots: Mapping[str, torch.Tensor],
        sizes: tuple[int, int],
    ) -> None:
        """`host`: tensors [E, ...]; `packed`: uint8 [E, blocks, bytes], the elements of one expert, the words
        of a block's tail, and at which of them its list begins.

        Each name is in one of them and in `slots`. What the host holds must be pinned if `slots` are on a
        GPU. All of them stay alive with this object. `sizes`: elements a block, those that share a byte.
        Raises PinError if the GPU cannot read it in place.
        """
        self._keep = (dict(host), dict(packed), dict(slots))
        self._size, self._lanes = sizes
        self._tail = max((tail for _, _, tail, _ in packed.values()), default=0)
        self._rare = max((tail - listed for *_, tail, listed in packed.values()), default=0)
        device = next(iter(slots.values())).device
        wide: list[Sequence[int]] = []
        narrow: list[Sequence[int]] = []
        for name, source in host.items():
            target = slots[name]
            stride, address = source[0].nbytes, find_device_address(source, device)
            aligned = all(value % 16 == 0 for value in (address, target.data_ptr(), stride))
            step = 8 * _WIDE_TILE if aligned else _NARROW_TILE
            for start in range(0, stride, step):
                length = min(step, stride - start)
                entry = (address + start, target.data_ptr() + start, stride, length)
                (wide if aligned else narrow).append(entry)
        blocks: list[Sequence[int]] = []
        for name, (source, elements, tail, listed) in packed.items():
            target, address = slots[name], find_device_address(source, device)
            for number in range(source.shape[1]):
                start = number * self._size
                from_to = (address + number * source.shape[2], target.data_ptr() + 2 * start)
                inside = min(elements - start, self._size)
                blocks.append((*from_to, source[0].nbytes, target[0].nbytes, inside, tail, listed))
        self._wide, self._narrow, self._blocks = (
            torch.tensor(rows, dtype=torch.int64, device=device) if rows else None
            for rows in (wide, narrow, blocks)
        )

    @property
    def tables(self) -> list[torch.Tensor]:
        """The memory that `launch` reads on the device, apart from the list of copies."""
        return [table for table in (self._wide, self._narrow, self._blocks) if table is not None]

    def launch(
        self, copies: torch.Tensor, programs: int = _PROGRAMS, unpack_programs: int = _UNPACK_PROGRAMS
    ) -> None:
        """Carry out `copies` int32 [1 + 2 * capacity] on the current stream."""
        capacity = copies.numel() // 2
        with make_current(copies):
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
                    tail_size=triton.next_power_of_2(max(self._tail, _UNPACK_WARPS * 32)),
                    rare_lanes=triton.next_power_of_2(max(self._rare, 2)),
                    num_warps=_UNPACK_WARPS,
                )


@triton.jit
def _popcount(byte: tl.tensor) -> tl.tensor:
    """Return how many bits of each byte are set."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit(do_not_specialize=["chunks"])
def unpack_kernel(
    copies_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.constexpr,
    size: tl.constexpr,
    lanes: tl.constexpr,
    tail_size: tl.constexpr,
    rare_lanes: tl.constexpr,
) -> None:
    """Carry out `copies`, the list of `lookup_kernel`, any number of programs.

    `table` int64 [chunks, 7], a row a block of `moedoctor.fixes.cache.packed`: its address in the host's
    expert 0, its elements' address in slot 0, bytes from one packed expert to the next, bytes from one slot
    to the next, elements (a multiple of 16), words of its tail, and where in it the list begins.

    Every byte of a block is asked for once, in whole lines of 128 bytes: a request for a part of a line seems
    to cost as much.
    """
    columns: tl.constexpr = size // lanes
    total = tl.load(copies_ptr) * chunks
    lane = tl.arange(0, lanes)[:, None]  # [lanes, 1]
    column = tl.arange(0, columns)  # [columns]
    place = lane * columns + column[None, :]  # [lanes, columns]
    tail_word = tl.arange(0, tail_size)  # [tail]
    last = tl.arange(0, rare_lanes)  # [rare]
    index = tl.program_id(0)
    while index < total:
        number = index // chunks
        entry = table_ptr + (index - number * chunks) * 7
        expert = tl.load(copies_ptr + 1 + number).to(tl.int64)
        slot = tl.load(copies_ptr + 1 + capacity + number).to(tl.int64)
        source = tl.load(entry) + expert * tl.load(entry + 2)
        target = tl.load(entry + 1) + slot * tl.load(entry + 3)
        inside = tl.multiple_of(tl.load(entry + 4).to(tl.int32), 16)
        tail_words = tl.multiple_of(tl.load(entry + 5).to(tl.int32), 32)
        listed_at = tl.load(entry + 6).to(tl.int32)
        from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.uint8)), 16)
        to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int16)), 16)
        plane_ptr = from_ptr + size + column  # [columns]
        tail_ptr = tl.multiple_of((source + size + 2 * columns).to(tl.pointer_type(tl.int32)), 16)
        low = tl.load(from_ptr + place).to(tl.int32)  # [lanes, columns]
        first = tl.load(plane_ptr).to(tl.int32)  # [columns]
        second = tl.load(plane_ptr + columns).to(tl.int32)  # [columns]
        tail = tl.load(tail_ptr + tail_word, mask=tail_word < tail_words, other=size)  # [tail]
        meaning = tl.sum(tl.where(tail_word == 0, tail, 0), 0)
        top, above = meaning & 0xFF, (meaning >> 8) & 0xFF
        at = listed_at + last  # [rare]
        # The last word of a full tail may be one of the codes: it is no weight of the list.
        rare = tl.where(at < tail_words, tl.gather(tail, tl.minimum(at, tail_size - 1), 0), size)  # [rare]
        # A weight's code of three bits is that of its number: how many before it have one.
        escaped = first & second  # [columns]
        before = _popcount(escaped)  # [columns]
        before = tl.cumsum(before, 0) - before
        order = before[None, :] + _popcount(escaped[None, :] & ((1 << lane) - 1))  # [lanes, columns]
        order = tl.reshape(order, [size])
        other = tl.zeros([size], tl.int32)
        for bit in tl.static_range(3):
            word_of = tl.minimum(1 + 3 * (order >> 5) + bit, tail_size - 1)  # [size]
            other |= ((tl.gather(tail, word_of, 0) >> (order & 31)) & 1) << bit
        other = tl.reshape(other, [lanes, columns])
        other += tl.where(other >= above, 3, 0)
        code = (first[None, :] >> lane) & 1 | ((second[None, :] >> lane) & 1) << 1  # [lanes, columns]
        below_top = tl.where(code == 3, other, above + code)  # [lanes, columns]
        word = ((low & 0x80) << 8) | ((top - below_top) << 7) | (low & 0x7F)
        tl.store(to_ptr + place, word.to(tl.int16), mask=place < inside)
        tl.debug_barrier()  # the listed ones take their exponent from the list
        position = rare & 0xFFFF  # [rare]
        listed = position < inside
        word = tl.load(to_ptr + position, mask=listed, other=0).to(tl.int32)  # [rare]
        word = (word & 0x807F) | ((rare >> 16) << 7)
        tl.store(to_ptr + position, word.to(tl.int16), mask=listed)
        index += tl.num_programs(0)
