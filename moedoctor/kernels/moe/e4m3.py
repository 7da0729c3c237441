"""Decodes FP8 weights (E4M3) by integer operations, so that it works on GPUs without instructions for FP8."""

from __future__ import annotations

import triton
import triton.language as tl

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
