"""Decodes FP8 weights (E4M3) by integer operations, so that it works on GPUs without instructions for FP8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(codes: tl.tensor, half: tl.constexpr, wide: tl.constexpr) -> tl.tensor:
    """Return the values of uint8 `codes`: exact, as float16 if `half`, else bfloat16; float32 if `wide`.

    Exponent and mantissa move to the places where the result's type has them, which divides by 2**8 or
    2**120 for subnormal numbers too. `wide` is for Triton's interpreter, which cannot multiply bfloat16. The
    code of NaN gives 480: weights are checked when they are loaded.
    """
    bits = codes.to(tl.uint16)
    sign = (bits & 0x80) << 8
    if wide:
        places = (sign | ((bits & 0x7F) << 4)).to(tl.uint32) << 16
        values = places.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    elif half:
        values = (sign | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    else:
        power = tl.full((), 1.329227995784916e36, tl.bfloat16)
        values = (sign | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * power
    return values
