"""A kernel that waits and stamps its begin and end by the GPU's own clock."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def stamped_wait(stamps: tl.tensor, cycles: tl.tensor) -> None:
    """Wait for `cycles` of the SM's clock; `stamps` int64 [2] gets begin and end in nanoseconds.

    It waits for cycles and not for nanoseconds: %globaltimer may tick only once a microsecond, and a loop
    that ended with a tick would be measured too long by half a tick.
    """
    begin = globaltimer()
    first = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l,l", [begin], dtype=tl.int64, is_pure=False, pack=1
    )
    now = first
    while now - first < cycles:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l,l", [now], dtype=tl.int64, is_pure=False, pack=1
        )
    end = globaltimer()
    tl.store(stamps, begin)
    tl.store(stamps + 1, end)
