"""NVFP4 weights as 32-bit words from which two weights at a time are decoded, and the decoding.

A group is 64 neighboring weights of a row: four blocks of 16, in eight words, and one word of scales. Word
w holds weights 2w and 2w + 1 of each block, in its low and in its high half. Bits of a half, bit 15 first, by
the block whose code they belong to (s: its sign): ``0s 2 2 2 3s 3 1s 0 0 0 2s 3 3 1 1 1``. The three bits of
block 2 that are no sign are those of the other half's weight.

So a shift or a rotation and a mask (two of each for block 3) leave two codes at the places where bfloat16 has
its sign, the lowest two bits of its exponent and the first of its mantissa. Read as bfloat16 that is the
value times 2**-126, for subnormal numbers too. No division of 16 bits has four blocks that each need one
shift: of codes at these places at most three fit beside each other.

A scale is a byte with 5 bits of exponent and 3 of mantissa, without sign, zero or subnormal numbers, so that
a shift and an addition decode it: that gives the scale times 2**118. The sign of a scale is moved to its
codes; the codes of a zero scale are made zero.

A code times a scale has 6 significant bits, so it is exact in bfloat16.

Shapes: E experts, N rows and K columns of a weight, G = ceil(K / 64) groups of a row, W = 8 * G words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

REMAINING_SCALE = tl.constexpr(2.0**8)
"""The factor by which decoded weights are too small: 2**126 / 2**118."""


def pack_words(packed: torch.Tensor, block_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 (words [E, N, 8 * G], scales [E, N, G]) of a checkpoint's weight, with G = ceil(K / 64).

    `packed` is uint8 [E, N, K / 2] with the first of two codes in the low nibble, `block_scales` is E4M3
    [E, N, K / 16]. The last group is filled up with zeros.

    Example: in a row of 96 weights (G = 2), weight 70 is number 6 of block 0 in group 1. So its code is in
    the low half of word 8 + 3 = 11, in bits 15 (sign) and 8 to 6, and its scale is the lowest byte of word 1
    of the scales.
    """
    experts, height, blocks = block_scales.shape
    groups = (blocks + 3) // 4
    words = torch.empty((experts, height, groups * 8), dtype=torch.int32, device=packed.device)
    scales = torch.empty((experts, height, groups), dtype=torch.int32, device=packed.device)
    for expert in range(experts):  # one at a time, as the intermediate values are four times as large
        words[expert], scales[expert] = _pack_expert(packed[expert], block_scales[expert], groups)
    return words, scales


def _pack_expert(
    packed: torch.Tensor, block_scales: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    missing = groups * 4 - block_scales.shape[-1]
    padded = torch.nn.functional.pad(block_scales.view(torch.uint8), (0, missing))  # [N, G * 4]
    scale = padded.view(torch.float8_e4m3fn).float()  # [N, G * 4]
    bits = scale.abs().view(torch.int32) >> 20  # 8 bits of exponent, 3 of mantissa
    exponent_3 = torch.where(scale == 0, 96, torch.where(scale.isnan(), 255, bits - 848)).to(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [N, K]
    codes = torch.nn.functional.pad(codes, (0, missing * 16)).unflatten(-1, (-1, 16))  # [N, G * 4, 16]
    codes = torch.where((scale < 0)[..., None], codes ^ 8, codes)
    codes = torch.where((scale == 0)[..., None], 0, codes).unflatten(-2, (-1, 4)).long()  # [N, G, 4, 16]
    half = (codes >> 3 << 15) | ((codes & 7) << 6)  # [N, G, 4, 16], as bfloat16
    two = half[..., 0::2] | (half[..., 1::2] << 16)  # [N, G, 4, 8]
    first, second, third, fourth = two.unbind(-2)  # [N, G, 8] each
    # What `_codes` does, backwards.
    words = first | (second >> 6) | (third >> 10) | (third << 22) & 0xFFFFFFFF
    words |= ((fourth & 0x81808180) >> 4) | ((fourth & 0x00400040) << 4)
    return words.int().flatten(-2), exponent_3.view(torch.int32)


@triton.jit
def decode_block(words: tl.tensor, scales: tl.tensor, block: tl.constexpr, wide: tl.constexpr) -> tl.tensor:
    """Return bfloat16 [N, 16 * G], weights divided by REMAINING_SCALE: of each group the 16 of one block.

    `words` is uint32 [N, 8 * G], `scales` uint32 [N, G]; `wide` is for Triton's interpreter, which cannot
    multiply bfloat16.
    """
    twice = ((scales >> (8 * block)) & 255) * 0x00100010 + 0x70007000  # [N, G], the scale twice
    repeated = tl.broadcast_to(twice[:, :, None], (scales.shape[0], scales.shape[1], 8))
    scale = split_halves(tl.reshape(repeated, (words.shape[0], words.shape[1])), wide)
    # One instruction for two weights, as they are neighbors.
    return (split_halves(_codes(words, block), wide) * scale).to(tl.bfloat16)


@triton.jit
def add_block(
    total: tl.tensor, words: tl.tensor, scales: tl.tensor, block: tl.constexpr, values: tl.tensor
) -> tl.tensor:
    """Return float32 `total` [N, 2 * G] plus weights, divided by REMAINING_SCALE, times `values`.

    Of each group the 16 weights of one block, every sum of eight neighbors. `words` as `decode_block`,
    `scales` uint32 [N, 2 * G] with each word twice, `values` float32 [N, 16 * G] or [1, 16 * G]. A sum is
    scaled, which takes fewer instructions than scaling eight weights.
    """
    rows: tl.constexpr = words.shape[0]
    codes = eighths(split_halves(_codes(words, block), True))
    values = eighths(values)
    sums = codes[0] * tl.broadcast_to(values[0], (rows, scales.shape[1]))  # [N, 2 * G]
    # In the order of `eighths`. In the order of places ptxas takes fewer registers, and loads come later.
    for place in tl.static_range(1, 8):
        sums = tl.fma(codes[place], tl.broadcast_to(values[place], (rows, scales.shape[1])), sums)
    bits = ((scales >> (8 * block)) & 255) * 0x00100000 + 0x70000000  # [N, 2 * G]
    return tl.fma(sums, bits.to(tl.float32, bitcast=True), total)


@triton.jit
def eighths(values: tl.tensor) -> tl.tuple:
    """Return eight [N, W]: each has one of every eight neighbors of `values` [N, 8 * W].

    Their places are 0, 4, 2, 6, 1, 5, 3, 7.
    """
    even, odd = tl.split(tl.reshape(values, (values.shape[0], values.shape[1] // 8, 2, 2, 2)))
    first, second = tl.split(even)
    third, fourth = tl.split(odd)
    return tl.split(first) + tl.split(second) + tl.split(third) + tl.split(fourth)


@triton.jit
def _codes(words: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return [N, W]: two codes of one block in each of `words`, as bfloat16 has them."""
    if block == 0:
        codes = words & 0x81C081C0
    elif block == 1:
        codes = (words << 6) & 0x81C081C0
    elif block == 2:
        codes = ((words << 10) | (words >> 22)) & 0x81C081C0  # a rotation is one instruction
    else:
        codes = ((words << 4) & 0x81808180) | ((words >> 4) & 0x00400040)
    return codes


@triton.jit
def split_halves(words: tl.tensor, wide: tl.constexpr, dtype: tl.constexpr = tl.bfloat16) -> tl.tensor:
    """Return [N, 2 * W]: the halves of uint32 [N, W] read as `dtype`, the low one first.

    As float32 if `wide`, which is for bfloat16 alone.
    """
    if wide:
        low = (words << 16).to(tl.float32, bitcast=True)  # [N, W]
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)  # [N, W]
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)  # [N, W]
        high = (words >> 16).to(tl.uint16).to(dtype, bitcast=True)  # [N, W]
    return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1] * 2))
