"""Runs the kernels of an MoE layer in Triton's interpreter, on the CPU; a script for `test_expert_product`.

Triton decides at import whether it interprets, so this needs a process of its own.
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, about exp

from expert_cases import assert_decoding_is_exact, assert_layer_is_right, assert_plan_is_whole  # noqa: E402

from moedoctor.kernels.moe.expert_launch import Tile  # noqa: E402
from moedoctor.reference.agreement import Bounds  # noqa: E402

# The interpreter cuts off where the GPU rounds to bfloat16, three times, so norms come out 0.8 % low.
BOUNDS = Bounds(cosine=0.9998, norm=0.02, element=0.03, matched=0.99, worst=0.1)

if __name__ == "__main__":
    for case in sys.argv[1:]:
        if case == "decoding":
            assert_decoding_is_exact("cpu", Tile(64, 64, 128, 4, 2))
            continue
        if case.startswith("plan,"):
            _, block_m, skipped, tokens = case.split(",")
            assert_plan_is_whole("cpu", int(block_m), float(skipped), int(tokens), 5)
            continue
        quantization, activation, tokens, hidden, intermediate = case.split(",")
        assert_layer_is_right(
            quantization, activation, int(tokens), int(hidden), int(intermediate), device="cpu", bounds=BOUNDS
        )
    print("agreed")
