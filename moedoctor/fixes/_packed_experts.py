"""bfloat16 experts in three quarters of their bytes, without loss, for a bus that is the bottleneck.

The exponents of a weight matrix differ little: of 8192 neighbouring weights nearly all lie within 15 powers
of two. A block stores for each of them sign and mantissa in a byte and, in half a byte, how far its exponent
is below the block's highest; the few others are stored whole. `moedoctor.kernels.cache_unpack` puts the bits
together again on their way to the slot. (That exponents of trained weights hold few bits is the observation
of DFloat11, arXiv 2504.11651, which stores them in a Huffman code.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIZE = 8192
"""Elements a block."""
RARE = 15
"""Elements a block may store whole."""
BLOCK_BYTES = SIZE + SIZE // 2 + 4 * (RARE + 1)
"""Signs and mantissas, codes, the rare ones as position and bits, and the highest exponent."""
_CODES = 15
_NO_PLACE = 0xFFFF
_TOGETHER = 1 << 26
"""Elements packed at once: packing takes some 40 bytes for each."""


@dataclass(frozen=True)
class PackedExperts:
    """One tensor [E, ...] of bfloat16, packed."""

    blocks: torch.Tensor
    """uint8 [E, blocks, BLOCK_BYTES] on the host"""
    elements: int
    """Of one expert."""


def pack(tensor: torch.Tensor, *, device: torch.device) -> PackedExperts | None:
    """Pack bfloat16 `tensor` [E, ...], working on `device`; None where it is another type or does not fit.

    It does not fit where some block has more than `RARE` weights outside of every 15 powers of two, where an
    expert has no multiple of 16 elements, or where padding the last block takes more than packing gains.
    """
    experts, elements = tensor.shape[0], tensor[0].numel()
    count = -(-elements // SIZE)
    if tensor.dtype is not torch.bfloat16 or elements % 16 or count * BLOCK_BYTES >= 2 * elements:
        return None
    packed = torch.empty((experts, count, BLOCK_BYTES), dtype=torch.uint8)
    step = max(_TOGETHER // (count * SIZE), 1)
    words = tensor.contiguous().view(experts, elements).view(torch.int16)  # [E, elements]
    for start in range(0, experts, step):
        some = words[start : start + step].to(device)  # [experts, elements]
        missing = count * SIZE - elements
        # Padding repeats the last weight, whose exponent is an ordinary one.
        padded = torch.cat([some, some[:, -1:].expand(-1, missing)], dim=1) if missing else some
        blocks = _pack_blocks(padded.reshape(-1, SIZE))
        if blocks is None:
            return None
        packed[start : start + step] = blocks.view(-1, count, BLOCK_BYTES)
    return PackedExperts(packed, elements)


def _pack_blocks(words: torch.Tensor) -> torch.Tensor | None:
    """int16 [blocks, SIZE] -> uint8 [blocks, BLOCK_BYTES]; None where a block has too many rare weights."""
    wide = words.int() & 0xFFFF  # [blocks, SIZE]
    exponent = (wide >> 7) & 0xFF  # [blocks, SIZE]
    highest = _best_window(exponent)  # [blocks]
    code = highest[:, None] - exponent  # [blocks, SIZE]
    rare = (code < 0) | (code >= _CODES)  # [blocks, SIZE]
    most = int(rare.sum(1).max())
    if most > RARE:
        return None
    code = torch.where(rare, 0, code).to(torch.uint8)
    low = (((wide >> 8) & 0x80) | (wide & 0x7F)).to(torch.uint8)  # [blocks, SIZE]
    codes = code[:, 0::2] | (code[:, 1::2] << 4)  # [blocks, SIZE / 2]
    tail = torch.full((len(words), RARE + 1), _NO_PLACE, dtype=torch.int32, device=words.device)
    tail[:, RARE] = highest
    block, place = rare.nonzero(as_tuple=True)  # [rare] each, by block
    if most:
        first = torch.searchsorted(block, torch.arange(len(words), device=words.device))  # [blocks]
        number = torch.arange(len(block), device=words.device) - first[block]  # [rare]
        tail[block, number] = (words[block, place].int() << 16) | place.int()
    return torch.cat([low, codes, tail.view(torch.uint8)], dim=1)


def _best_window(exponent: torch.Tensor) -> torch.Tensor:
    """The highest of the 15 neighbouring exponents that hold most of each row; int32 [blocks]."""
    histogram = torch.zeros((len(exponent), 256), dtype=torch.int32, device=exponent.device)
    histogram.scatter_add_(1, exponent.long(), torch.ones_like(exponent))
    total = histogram.cumsum(1)  # [blocks, 256]
    below = torch.nn.functional.pad(total, (_CODES, 0))[:, :256]  # [blocks, 256]
    return (total - below).argmax(1).int()
