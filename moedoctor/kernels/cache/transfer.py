"""Copies experts from pinned host memory to their slots, as told by a list on the device.

A kernel may read pinned memory at its own address. Every program reads a tile of 32 KiB at once; a few of
them keep the bus busy, and they need no copy engine and no host.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
