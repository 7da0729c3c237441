"""Copies packed experts from pinned host memory to their slots, as bfloat16 again."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["chunks"])
def unpack_kernel(
    copies_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.constexpr,
    size: tl.constexpr,
    lanes: tl.constexpr,
    rare_lanes: tl.constexpr,
) -> None:
    """Carry out `copies`, the list of `lookup_kernel`, any number of programs.

    `table` int64 [chunks, 6], a row a block of `moedoctor.fixes.cache.packed`: its address in the host's
    expert 0, its elements' address in slot 0, bytes from one packed expert to the next, bytes from one slot
    to the next, elements (a multiple of 16), weights that it can list.
    """
    columns: tl.constexpr = size // lanes
    total = tl.load(copies_ptr) * chunks
    lane = tl.arange(0, lanes)[:, None]  # [lanes, 1]
    column = tl.arange(0, columns)  # [columns]
    place = lane * columns + column[None, :]  # [lanes, columns]
    last = tl.arange(0, rare_lanes)  # [rare]
    index = tl.program_id(0)
    while index < total:
        number = index // chunks
        entry = table_ptr + (index - number * chunks) * 6
        expert = tl.load(copies_ptr + 1 + number).to(tl.int64)
        slot = tl.load(copies_ptr + 1 + capacity + number).to(tl.int64)
        source = tl.load(entry) + expert * tl.load(entry + 2)
        target = tl.load(entry + 1) + slot * tl.load(entry + 3)
        inside = tl.multiple_of(tl.load(entry + 4).to(tl.int32), 16)
        rare = tl.load(entry + 5).to(tl.int32)
        from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.uint8)), 16)
        to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int16)), 16)
        plane_ptr = from_ptr + size + column  # [columns]
        tail = source + size + 3 * columns
        listed = last < rare  # [rare]
        low = tl.load(from_ptr + place).to(tl.int32)  # [lanes, columns]
        first = tl.load(plane_ptr).to(tl.int32)  # [columns]
        second = tl.load(plane_ptr + columns).to(tl.int32)  # [columns]
        third = tl.load(plane_ptr + 2 * columns).to(tl.int32)  # [columns]
        position = tl.load(tail.to(tl.pointer_type(tl.uint16)) + last, mask=listed, other=size)  # [rare]
        tail += 2 * rare
        exponent = tl.load(tail.to(tl.pointer_type(tl.uint8)) + last, mask=listed, other=0)  # [rare]
        highest = tl.load((tail + rare).to(tl.pointer_type(tl.uint8))).to(tl.int32)
        code = (first[None, :] >> lane) & 1 | ((second[None, :] >> lane) & 1) << 1  # [lanes, columns]
        code |= ((third[None, :] >> lane) & 1) << 2
        word = ((low & 0x80) << 8) | ((highest - code) << 7) | (low & 0x7F)
        tl.store(to_ptr + place, word.to(tl.int16), mask=place < inside)
        tl.debug_barrier()  # the listed ones take their exponent from the list
        position = position.to(tl.int32)
        listed = position < inside
        word = tl.load(to_ptr + position, mask=listed, other=0).to(tl.int32)  # [rare]
        word = (word & 0x807F) | (exponent.to(tl.int32) << 7)
        tl.store(to_ptr + position, word.to(tl.int16), mask=listed)
        index += tl.num_programs(0)
