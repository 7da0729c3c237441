"""Decodes FP8 weights (E4M3) by integer operations, so that it works on GPUs without instructions for FP8."""

from __future__ import annotations

import triton
import triton.language as tl

from moedoctor.kernels.moe.nvfp4_words import eighths

_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 code, moved, power, zero;
    mov.b32 power, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    cvt.u32.u16 code, $1;
    prmt.b32 code, code, 0, 0x1404;
    shr.u32 moved, code, 4;
    and.b32 code, code, 0x80008000;
    lop3.b32 code, moved, 0x07f007f0, code, 0xea;
    fma.rn.bf16x2 $0, code, power, zero;
}""")
"""Two codes -> their two values. Each code goes to the high byte of a half; 0xea is (a & b) | c; 0x7b80 is
2**120 (in float16, 0x5c00 is 2**8); adding -0 keeps the sign of a zero."""
_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 code, moved, power, zero;
    mov.b32 power, 0x5c005c00;
    mov.b32 zero, 0x80008000;
    cvt.u32.u16 code, $1;
    prmt.b32 code, code, 0, 0x1404;
    shr.u32 moved, code, 1;
    and.b32 code, code, 0x80008000;
    lop3.b32 code, moved, 0x3f803f80, code, 0xea;
    fma.rn.f16x2 $0, code, power, zero;
}""")


@triton.jit
def decode_e4m3(codes: tl.tensor, half: tl.constexpr, wide: tl.constexpr) -> tl.tensor:
    """Return the values of uint8 `codes`: exact, as float16 if `half`, else bfloat16; float32 if `wide`.

    Exponent and mantissa move to the places where the result's type has them, which divides by 2**8 or
    2**120 for subnormal numbers too. `wide` is for Triton's interpreter, which cannot multiply bfloat16. The
    code of NaN gives 480: weights are checked when they are loaded.
    """
    if wide:
        bits = codes.to(tl.uint16)
        sign = (bits & 0x80) << 8
        places = (sign | ((bits & 0x7F) << 4)).to(tl.uint32) << 16
        values = places.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    elif half:
        # Written as instructions for two codes, because Triton takes one at a time.
        values = tl.inline_asm_elementwise(
            _TO_FLOAT16, "=r,h", [codes], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        values = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return values


@triton.jit
def split_words(words: tl.tensor) -> tl.tuple:
    """Return four [N, W]: each has one of every four neighbours of `words` [N, 4 * W], in their order."""
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
    v = eighths(values)
    total = _add_word(total, low, v[0], v[1], v[2], v[3])
    return _add_word(total, high, v[4], v[5], v[6], v[7])


@triton.jit
def _add_word(
    total: tl.tensor, word: tl.tensor, v0: tl.tensor, v1: tl.tensor, v2: tl.tensor, v3: tl.tensor
) -> tl.tensor:
    """Return `total` plus the four codes of `word` [N, W], lowest byte first, times four [N, W]."""
    even, odd = word << 8, word  # codes in the high byte of each half
    even = (even & 0x80008000) | ((even >> 1) & 0x3F803F80)
    odd = (odd & 0x80008000) | ((odd >> 1) & 0x3F803F80)
    total = tl.fma(_low_half(even), v0, total)
    total = tl.fma(_low_half(odd), v1, total)
    total = tl.fma(_low_half(even >> 16), v2, total)
    return tl.fma(_low_half(odd >> 16), v3, total)


@triton.jit
def _low_half(word: tl.tensor) -> tl.tensor:
    """Return float32 [N, W]: the low half of each uint32, read as float16."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
