"""NVFP4 weights as 32-bit words from which two weights at a time are decoded, and the decoding.

A group is 64 neighbouring weights of a row: four blocks of 16, in eight words, and one word of scales. Word
w holds weights 2w and 2w + 1 of each block, in its low and in its high half. Bits of a half, bit 15 first, by
the block whose code they belong to (s: its sign): ``0s 2s 3s 1s 3 3 3 0 0 0 1 1 1 2 2 2``.

So a shift and a mask (two of each for blocks 2 and 3) leave two codes at the places where bfloat16 has its
sign, the lowest two bits of its exponent and the first of its mantissa. Read as bfloat16 that is the value
times 2**-126, for subnormal numbers too.

A scale is a byte with 5 bits of exponent and 3 of mantissa, without sign, zero or subnormal numbers, so that
a shift and an addition decode it: that gives the scale times 2**118. The sign of a scale is moved to its
codes; the codes of a zero scale are made zero.

A code times a scale has 6 significant bits, so it is exact in bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

REMAINING_SCALE = tl.constexpr(2.0**8)
"""The factor by which decoded weights are too small: 2**126 / 2**118."""
_SHIFTS = ((15, 6), (12, 3), (14, 0), (13, 9))
"""Places in a half of a word of the sign and the other three bits of each block's codes."""


def pack_words(packed: torch.Tensor, block_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 (words [E, N, 8 * G], scales [E, N, G]) of a checkpoint's weight, with G = ceil(K / 64).

    `packed` is uint8 [E, N, K / 2] with the first of two codes in the low nibble, `block_scales` is E4M3
    [E, N, K / 16]. The last group is filled up with zeros.
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
    codes = torch.where((scale == 0)[..., None], 0, codes).unflatten(-2, (-1, 4)).int()  # [N, G, 4, 16]
    half = torch.zeros_like(codes[..., 0, :])  # [N, G, 16]
    for block, (sign, rest) in enumerate(_SHIFTS):
        code = codes[..., block, :]
        half |= ((code >> 3) << sign) | ((code & 7) << rest)
    words = half[..., 0::2] | (half[..., 1::2] << 16)  # [N, G, 8]
    return words.flatten(-2), exponent_3.view(torch.int32)


@triton.jit
def decode_block(words: tl.tensor, scales: tl.tensor, block: tl.constexpr, wide: tl.constexpr) -> tl.tensor:
    """Return bfloat16 [N, 16 * G], weights divided by REMAINING_SCALE: of each group the 16 of one block.

    `words` is uint32 [N, 8 * G], `scales` uint32 [N, G]; `wide` is for Triton's interpreter, which cannot
    multiply bfloat16.
    """
    return decode_values(words, scales, block, wide).to(tl.bfloat16)


@triton.jit
def decode_values(words: tl.tensor, scales: tl.tensor, block: tl.constexpr, wide: tl.constexpr) -> tl.tensor:
    """Return what `decode_block` does, as float32 if `wide`."""
    if block == 0:
        codes = words & 0x81C081C0
    elif block == 1:
        codes = (words << 3) & 0x81C081C0
    elif block == 2:
        codes = ((words << 6) & 0x01C001C0) | ((words << 1) & 0x80008000)
    else:
        codes = ((words >> 3) & 0x01C001C0) | ((words << 2) & 0x80008000)
    twice = ((scales >> (8 * block)) & 255) * 0x00100010 + 0x70007000  # [N, G], the scale twice
    repeated = tl.broadcast_to(twice[:, :, None], (scales.shape[0], scales.shape[1], 8))
    scale = _halves(tl.reshape(repeated, (words.shape[0], words.shape[1])), wide)
    # One instruction for two weights, as they are neighbours.
    return _halves(codes, wide) * scale


@triton.jit
def _halves(words: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Return bfloat16 [N, 2 * W] in uint32 [N, W], the low half first; as float32 if `wide`."""
    if wide:
        low = (words << 16).to(tl.float32, bitcast=True)  # [N, W]
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)  # [N, W]
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # [N, W]
        high = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # [N, W]
    return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1] * 2))
