"""bfloat16 experts in some 69 % of their bytes, without loss, for a bus that is the bottleneck.

The exponents of a weight matrix differ little. A block holds 8192 neighboring weights:

    8192 bytes       sign and mantissa of each weight
    2 * 1024 bytes   two bits of each: its place among the three most common exponents, or 3 for another one
    tail             one word: what the codes mean
                     three words for each 32 codes of 3, in order: one of the eight exponents around the three
                     a word for each weight with no code: its position and exponent

Example: the common exponents are 118 to 120, and the eight around them 113 to 117 and 121 to 123 (top = 123,
above = 3). A weight of exponent 119 has the code 1. One of 122 has the code 3, and if it is the 33rd of the
block with that code, the lowest bit of each of the second three words: they make 1, its distance from top.
One of 97 has the code 0 and a word in the list, which wins.

All bits come out as they went in. `moedoctor.kernels.cache.transfer` unpacks them on their way to the slot.
Of a normal distribution a quarter of the weights has a code of 3, and two in a thousand have none. That
exponents of trained weights hold few bits is the observation of DFloat11, arXiv 2504.11651, which stores them
in a Huffman code of some 2.6 bits. Here every weight finds its code by counting bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIZE = 8192
"""Elements a block."""
LANES = 8
"""Elements whose codes share a byte of each bit plane; they are `SIZE / LANES` apart."""
_COMMON = 3
"""Exponents with a code of two bits; the fourth code, `_COMMON`, says that three more bits follow."""
_OTHERS = 8
_LINE = 128
"""Bytes that a GPU asks the bus for at once. Every part of a block begins and ends at a multiple of it."""
_MOST_RARE = 256
_NO_PLACE = 0xFFFF
_TOGETHER = 1 << 26
"""Elements packed at once: packing takes some 80 bytes for each."""


@dataclass(frozen=True)
class PackedExperts:
    """One tensor [E, ...] of bfloat16, packed."""

    blocks: torch.Tensor
    """uint8 [E, blocks, `count_block_bytes`] on the host"""
    elements: int
    """Of one expert."""
    tail: int
    """Words of 32 bits at the end of a block: what the codes mean, the codes of three bits, and the list."""
    listed: int
    """Index of the tail's word at which the list begins."""


@dataclass(frozen=True)
class _Codes:
    """The parts that `pack` writes for blocks; all int32 or bool."""

    exponent: torch.Tensor
    """[blocks, SIZE]"""
    top: torch.Tensor
    """[blocks]: the highest exponent that has a code"""
    above: torch.Tensor
    """[blocks]: how many exponents of three bits are above the common ones"""
    below_top: torch.Tensor
    """[blocks, SIZE]: how far an exponent is below `top`"""
    escaped: torch.Tensor
    """[blocks, SIZE]: whether it has a code of three bits"""
    rare: torch.Tensor
    """[blocks, SIZE]: whether it has none"""


def count_block_bytes(tail: int) -> int:
    """Signs and mantissas, two bit planes, and the tail."""
    return SIZE + 2 * SIZE // LANES + 4 * tail


def pack(tensor: torch.Tensor, *, device: torch.device) -> PackedExperts | None:
    """Pack bfloat16 `tensor` [E, ...] on `device`. Return None for another type or if it does not fit.

    It does not fit if the exponents of a block differ too much, if the elements of an expert are not a
    multiple of 16, or if padding the last block takes more than packing gains.
    """
    experts, elements = tensor.shape[0], tensor[0].numel()
    count = -(-elements // SIZE)
    if tensor.dtype is not torch.bfloat16 or elements % 16 or count * count_block_bytes(1) >= 2 * elements:
        return None
    step = max(_TOGETHER // (count * SIZE), 1)
    words = tensor.contiguous().view(experts, elements).view(torch.int16)  # [E, elements]
    parts = [words[start : start + step] for start in range(0, experts, step)]
    escapes = rare = 0
    for part in parts:
        codes = _choose_codes(_split_blocks(part, count, device))
        escapes = max(escapes, int(codes.escaped.sum(1).max()))
        rare = max(rare, int(codes.rare.sum(1).max()))
    listed = 1 + 3 * -(-escapes // 32)
    tail = -(-4 * (listed + rare) // _LINE) * _LINE // 4
    if rare > _MOST_RARE or count * count_block_bytes(tail) >= 2 * elements:
        return None
    packed = torch.empty((experts, count, count_block_bytes(tail)), dtype=torch.uint8)
    for number, part in enumerate(parts):
        some = _pack_blocks(_split_blocks(part, count, device), tail, listed)
        packed[number * step : number * step + len(part)] = some.view(len(part), count, -1)
    return PackedExperts(packed, elements, tail, listed)


def _split_blocks(words: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """int16 [experts, elements] -> int32 [experts * count, SIZE] on `device`."""
    missing = count * SIZE - words.shape[1]
    some = words.to(device)
    # Padding repeats the last weight, whose exponent is an ordinary one.
    padded = torch.cat([some, some[:, -1:].expand(-1, missing)], dim=1) if missing else some
    return padded.reshape(-1, SIZE).int() & 0xFFFF


def _choose_codes(words: torch.Tensor) -> _Codes:
    """Choose the codes of each block, int32 [blocks, SIZE]."""
    exponent = (words >> 7) & 0xFF  # [blocks, SIZE]
    histogram = torch.zeros((len(exponent), 256), dtype=torch.int32, device=exponent.device)
    histogram.scatter_add_(1, exponent.long(), torch.ones_like(exponent))
    width = _COMMON + _OTHERS
    total = torch.nn.functional.pad(histogram.cumsum(1), (width, 0))  # [blocks, width + 256]
    top = (total[:, width:] - total[:, :256]).argmax(1)  # [blocks]: of those that leave out the fewest
    above = torch.arange(_OTHERS + 1, device=words.device)  # [9]
    last = top[:, None] - above + width  # [blocks, 9]
    above = (total.gather(1, last) - total.gather(1, last - _COMMON)).argmax(1)  # [blocks]
    below_top = top.int()[:, None] - exponent  # [blocks, SIZE]
    rare = (below_top < 0) | (below_top >= width)  # [blocks, SIZE]
    common = (below_top >= above[:, None]) & (below_top < above[:, None] + _COMMON)  # [blocks, SIZE]
    return _Codes(exponent, top.int(), above.int(), below_top, ~rare & ~common, rare)


def _pack_blocks(words: torch.Tensor, tail: int, listed: int) -> torch.Tensor:
    """int32 [blocks, SIZE] -> uint8 [blocks, count_block_bytes(tail)]."""
    codes = _choose_codes(words)
    count, device = len(words), words.device
    above = codes.above[:, None]  # [blocks, 1]
    two = torch.where(codes.escaped, _COMMON, torch.where(codes.rare, 0, codes.below_top - above))
    two = two.view(count, LANES, -1).mT  # [blocks, SIZE / 8, 8]
    planes = [_pack_bits(two, bit) for bit in range(2)]  # [blocks, SIZE / 8] each
    three = codes.below_top - _COMMON * (codes.below_top >= above).int()  # [blocks, SIZE]
    # The order in which the kernel counts: the lanes of a byte, then the next byte.
    three, escaped = (part.view(count, LANES, -1).mT.reshape(count, SIZE) for part in (three, codes.escaped))
    block, place, number = _number(escaped)
    others = torch.zeros((count, (listed - 1) // 3 * 32), dtype=torch.int32, device=device)
    others[block, number] = three[block, place]
    others = others.view(count, -1, 32)  # [blocks, groups, 32]
    last = torch.full((count, tail), _NO_PLACE, dtype=torch.int64, device=device)  # [blocks, tail]
    last[:, 0] = codes.top + (codes.above << 8)
    last[:, 1:listed] = torch.stack([_pack_bits(others, bit) for bit in range(3)], dim=2).flatten(1)
    block, place, number = _number(codes.rare)
    last[block, listed + number] = place + (codes.exponent[block, place].long() << 16)
    last = torch.where(last >= 1 << 31, last - (1 << 32), last).int().view(torch.uint8)  # [blocks, 4 * tail]
    low = ((words >> 8) & 0x80) | (words & 0x7F)  # [blocks, SIZE]
    return torch.cat([part.to(torch.uint8) for part in (low, *planes, last)], dim=1)


def _pack_bits(codes: torch.Tensor, bit: int) -> torch.Tensor:
    """Return one bit of `codes` [blocks, N, bits of a word] as words int64 [blocks, N], the lowest first."""
    lane = torch.arange(codes.shape[2], device=codes.device)
    return (((codes >> bit) & 1).long() << lane).sum(2)


def _number(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return block, place and number in its block of each chosen element of bool [blocks, SIZE]."""
    block, place = chosen.nonzero(as_tuple=True)
    first = torch.searchsorted(block, torch.arange(len(chosen), device=chosen.device))  # [blocks]
    return block, place, torch.arange(len(block), device=chosen.device) - first[block]
