"""Copies packed experts from pinned host memory to their slots, as bfloat16 again."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_kernel(
    copies_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunks: tl.tensor,
    capacity: tl.constexpr,
    size: tl.constexpr,
    rare: tl.constexpr,
) -> None:
    """Carry out `copies`, the list of `lookup_kernel`, any number of programs.

    `table` int64 [chunks, 5], a row a block of `moedoctor.fixes._packed_experts`: its address in the host's
    expert 0, its elements' address in slot 0, bytes from one packed expert to the next, bytes from one slot
    to the next, elements (a multiple of 16).
    """
    total = tl.load(copies_ptr) * chunks
    place = tl.arange(0, size)  # [size]
    pair = tl.arange(0, size // 2)  # [size / 2]
    last = tl.arange(0, rare + 1)  # [rare + 1]
    index = tl.program_id(0)
    while index < total:
        number = index // chunks
        entry = table_ptr + (index - number * chunks) * 5
        expert = tl.load(copies_ptr + 1 + number).to(tl.int64)
        slot = tl.load(copies_ptr + 1 + capacity + number).to(tl.int64)
        source = tl.load(entry) + expert * tl.load(entry + 2)
        target = tl.load(entry + 1) + slot * tl.load(entry + 3)
        inside = tl.multiple_of(tl.load(entry + 4).to(tl.int32), 16)
        from_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.uint8)), 16)
        to_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int16)), 16)
        tail_ptr = tl.multiple_of((source + size + size // 2).to(tl.pointer_type(tl.int32)), 16)
        low = tl.load(from_ptr + place).to(tl.int32)  # [size]
        codes = tl.load(from_ptr + size + pair).to(tl.int32)  # [size / 2]
        tail = tl.load(tail_ptr + last)  # [rare + 1]
        highest = tl.sum(tl.where(last == rare, tail, 0), axis=0)
        code = tl.interleave(codes & 15, codes >> 4)  # [size]
        word = ((low & 0x80) << 8) | ((highest - code) << 7) | (low & 0x7F)
        tl.store(to_ptr + place, word.to(tl.int16), mask=place < inside)
        tl.debug_barrier()  # the rare ones are written over
        position = tail & 0xFFFF
        tl.store(to_ptr + position, (tail >> 16).to(tl.int16), mask=(last < rare) & (position < inside))
        index += tl.num_programs(0)
