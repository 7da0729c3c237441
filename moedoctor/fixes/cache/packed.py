"""bfloat16 experts in 72 % of their bytes, without loss, for a bus that is the bottleneck.

The exponents of a weight matrix differ little: of 8192 neighbouring weights all but some hundred lie within
eight powers of two. A block stores for each weight sign and mantissa in a byte and, in three bits, how far
its exponent is below the block's highest. The others are listed with their position and exponent, so that
all bits come out as they went in. `moedoctor.kernels.cache.transfer` unpacks them on their way to the slot.
(That exponents of trained weights hold few bits is the observation of DFloat11, arXiv 2504.11651, which
stores them in a Huffman code of some 2.6 bits; three bits need no search for where a code begins.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIZE = 8192
"""Elements a block."""
LANES = 8
"""Elements whose codes share a byte of each bit plane; they are `SIZE / LANES` apart."""
_BITS = 3
_CODES = 1 << _BITS
_STEP = 16
"""Listed weights a block are a multiple of this, which keeps every part aligned for wide loads."""
_MOST_RARE = 256
_NO_PLACE = 0xFFFF
_TOGETHER = 1 << 26
"""Elements packed at once: packing takes some 40 bytes for each."""


@dataclass(frozen=True)
class PackedExperts:
    """One tensor [E, ...] of bfloat16, packed."""

    blocks: torch.Tensor
    """uint8 [E, blocks, `block_bytes`] on the host"""
    elements: int
    """Of one expert."""
    rare: int
    """Weights that a block can list."""


def block_bytes(rare: int) -> int:
    """Signs and mantissas, bit planes, the rare ones' positions and exponents, and the highest exponent."""
    return SIZE + _BITS * SIZE // LANES + 3 * rare + 16


def pack(tensor: torch.Tensor, *, device: torch.device) -> PackedExperts | None:
    """Pack bfloat16 `tensor` [E, ...] on `device`. Return None for another type or if it does not fit.

    It does not fit if a block has too many weights outside of every eight powers of two, if the elements of
    an expert are not a multiple of 16, or if padding the last block takes more than packing gains.
    """
    experts, elements = tensor.shape[0], tensor[0].numel()
    count = -(-elements // SIZE)
    if tensor.dtype is not torch.bfloat16 or elements % 16 or count * block_bytes(0) >= 2 * elements:
        return None
    step = max(_TOGETHER // (count * SIZE), 1)
    words = tensor.contiguous().view(experts, elements).view(torch.int16)  # [E, elements]
    parts = [words[start : start + step] for start in range(0, experts, step)]
    most = max(int(_codes(_blocks(part, count, device))[2].sum(1).max()) for part in parts)
    rare = -(-most // _STEP) * _STEP
    if rare > _MOST_RARE or count * block_bytes(rare) >= 2 * elements:
        return None
    packed = torch.empty((experts, count, block_bytes(rare)), dtype=torch.uint8)
    for number, part in enumerate(parts):
        some = _pack_blocks(_blocks(part, count, device), rare)
        packed[number * step : number * step + len(part)] = some.view(len(part), count, -1)
    return PackedExperts(packed, elements, rare)


def _blocks(words: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """int16 [experts, elements] -> int32 [experts * count, SIZE] on `device`."""
    missing = count * SIZE - words.shape[1]
    some = words.to(device)
    # Padding repeats the last weight, whose exponent is an ordinary one.
    padded = torch.cat([some, some[:, -1:].expand(-1, missing)], dim=1) if missing else some
    return padded.reshape(-1, SIZE).int() & 0xFFFF


def _codes(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(exponents [blocks, SIZE], the highest with a code [blocks], which weights have none [blocks, SIZE])"""
    exponent = (words >> 7) & 0xFF  # [blocks, SIZE]
    highest = _best_window(exponent)  # [blocks]
    code = highest[:, None] - exponent  # [blocks, SIZE]
    return exponent, highest, (code < 0) | (code >= _CODES)


def _pack_blocks(words: torch.Tensor, most: int) -> torch.Tensor:
    """int32 [blocks, SIZE] -> uint8 [blocks, block_bytes(most)]."""
    count, device = len(words), words.device
    exponent, highest, rare = _codes(words)
    code = torch.where(rare, 0, highest[:, None] - exponent).view(count, LANES, -1)  # [blocks, 8, SIZE / 8]
    low = ((words >> 8) & 0x80) | (words & 0x7F)  # [blocks, SIZE]
    lane = torch.arange(LANES, dtype=torch.int32, device=device)[:, None]  # [8, 1]
    planes = [(((code >> bit) & 1) << lane).sum(1, dtype=torch.int32) for bit in range(_BITS)]
    positions = torch.full((count, most), _NO_PLACE, dtype=torch.int32, device=device)
    exponents = torch.zeros_like(positions)  # [blocks, most]
    block, place = rare.nonzero(as_tuple=True)  # [rare] each, by block
    first = torch.searchsorted(block, torch.arange(count, device=device))  # [blocks]
    number = torch.arange(len(block), device=device) - first[block]  # [rare]
    positions[block, number] = place.int()
    exponents[block, number] = exponent[block, place]
    pairs = torch.stack([positions & 0xFF, positions >> 8], dim=2).view(count, -1)  # [blocks, 2 * most]
    last = torch.zeros((count, 16), dtype=torch.int32, device=device)
    last[:, 0] = highest
    parts = [low, *planes, pairs, exponents, last]
    return torch.cat([part.to(torch.uint8) for part in parts], dim=1)


def _best_window(exponent: torch.Tensor) -> torch.Tensor:
    """The highest of the eight neighbouring exponents that hold most of each row; int32 [blocks]."""
    histogram = torch.zeros((len(exponent), 256), dtype=torch.int32, device=exponent.device)
    histogram.scatter_add_(1, exponent.long(), torch.ones_like(exponent))
    total = histogram.cumsum(1)  # [blocks, 256]
    below = torch.nn.functional.pad(total, (_CODES, 0))[:, :256]  # [blocks, 256]
    return (total - below).argmax(1).int()
