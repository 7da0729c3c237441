"""Decodes FP8 weights (E4M3) by integer operations, so that it works on GPUs without instructions for FP8.

For those, before 8.9, Triton compiles no kernel with a pointer to FP8, even if nothing is read there.

Shapes: N rows of a weight, W words of four codes or groups of eight in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.nvfp4_words import eighths, split_halves


@triton.jit
def decode_every_other(
    words: tl.tensor, first: tl.constexpr, half: tl.constexpr, wide: tl.constexpr
) -> tl.tensor:
    """Return [N, 2 * W]: every other value from number `first` on, 0 or 1, of uint32 `words` [N, W].

    Exact, as float16 if `half`, else bfloat16; float32 if `wide`. Exponent and mantissa move to where the
    result's type has them, which divides by 2**8 or 2**120 for subnormal numbers too. `wide` is for Triton's
    interpreter, which cannot multiply bfloat16. The code of NaN gives 480: weights are checked when they are
    loaded.
    """
    codes = words << 8 if first == 0 else words  # in the high byte of each half
    if half and not wide:
        values = split_halves(_as_float16(codes), wide, tl.float16) * 256.0
    else:
        moved = (codes & 0x80008000) | ((codes >> 4) & 0x07F007F0)
        values = split_halves(moved, wide) * 1.329227995784916e36  # 2**120
    return values


@triton.jit
def _as_float16(codes: tl.tensor) -> tl.tensor:
    """Return two values divided by 2**8, as float16 has them, of the codes in the high byte of each half."""
    return (codes & 0x80008000) | ((codes >> 1) & 0x3F803F80)


@triton.jit
def decode_bytes(weight: tl.tensor) -> tl.tensor:
    """Return `weight`, or if it is of uint8 what these codes mean, exactly, as float16."""
    if weight.dtype == tl.uint8:
        codes = weight.to(tl.uint16)
        halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)  # divided by 2**8
        halves |= ((codes & 0x7F) == 0x7F).to(tl.uint16) << 14  # NaN stays NaN
        weight = halves.to(tl.float16, bitcast=True) * 256.0
    return weight


@triton.jit
def split_words(words: tl.tensor) -> tl.tuple:
    """Return four [N, W]: each has one of every four neighbors of `words` [N, 4 * W], in their order."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def add_block(total: tl.tensor, low: tl.tensor, high: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Return float32 `total` [N, W] plus the sum of eight products, of weights divided by 2**8.

    `low` and `high` uint32 [N, W] have the codes of four weights each, `values` float32 [N, 8 * W] what the
    eight are multiplied by.
    """
    v0, v4, v2, v6, v1, v5, v3, v7 = eighths(values)
    total = _add_word(total, low, v0, v1, v2, v3)
    return _add_word(total, high, v4, v5, v6, v7)


@triton.jit
def _add_word(
    total: tl.tensor, word: tl.tensor, v0: tl.tensor, v1: tl.tensor, v2: tl.tensor, v3: tl.tensor
) -> tl.tensor:
    """Return `total` plus the four codes of `word` [N, W], lowest byte first, times four [N, W]."""
    even, odd = _as_float16(word << 8), _as_float16(word)
    total = tl.fma(_low_half(even), v0, total)
    total = tl.fma(_low_half(odd), v1, total)
    total = tl.fma(_low_half(even >> 16), v2, total)
    return tl.fma(_low_half(odd >> 16), v3, total)


@triton.jit
def _low_half(word: tl.tensor) -> tl.tensor:
    """Return float32 [N, W]: the low half of each uint32, read as float16."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
