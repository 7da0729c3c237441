"""The Triton kernels of routing against the reference, compiled on a GPU, and cases for the interpreter."""

from itertools import product
from typing import Any

import pytest
import torch

from tests.interpreted import needs_triton

pytestmark = needs_triton
POLICIES = ("zero", "finite")
_SOFTMAX, _SIGMOID = {"scoring": "softmax"}, {"scoring": "sigmoid"}
_SCALED = {"routed_scaling_factor": 2.5}
_ONE = {"num_groups": 1, "topk_groups": 1}
_THREE, _FOUR = {"num_groups": 3, "topk_groups": 2}, {"num_groups": 4, "topk_groups": 2}
INTERPRETED: list[tuple[str, int, int, str, tuple[int, ...], dict[str, Any]]] = [
    # One row a program, so that a row cannot hide what another row lacks.
    ("topk_softmax", 12, 3, "bfloat16", (1, 8, 2, 1), {}),
    ("topk_softmax", 16, 9, "float16", (16, 16, 1, 1), {"renormalize": True, "strided": True}),
    ("topk_softmax", 64, 8, "bfloat16", (32, 8, 8, 1), {}),
    # The kernel of any type and scoring.
    ("topk_softmax", 12, 3, "float32", (16, 8, 2, 1), {"renormalize": True}),
    ("topk_sigmoid", 12, 12, "bfloat16", (32, 16, 1, 1), {"strided": True}),
    ("topk_softmax", 16, 4, "bfloat16", (32, 8, 2, 1), {"bias": True}),
    ("topk_sigmoid", 12, 4, "float64", (32, 8, 2, 1), {"bias": True, "renormalize": True}),
    # One group and no bias: only the scaling factor excludes the half-precision kernel.
    ("grouped_topk", 8, 2, "bfloat16", (32, 8, 1, 1), _SOFTMAX | _SCALED | _ONE),
    ("grouped_topk", 12, 4, "bfloat16", (32, 8, 2, 1), _SIGMOID | _THREE | {"bias": True}),
    ("grouped_topk", 9, 5, "float32", (16, 16, 1, 1), _SOFTMAX | _THREE | {"bias": True}),
    ("grouped_topk", 16, 4, "float32", (32, 8, 2, 1), _SOFTMAX | _FOUR | _SCALED),
]
"""Function, experts, top-k, type, shape of the launch, options."""
SHAPES = {8: (2, 8), 60: (4,), 64: (6,), 128: (8, 20), 160: (6,), 256: (8,), 384: (8, 33), 512: (10, 16)}
"""Experts -> top-k, compiled on a GPU."""


GROUPS = ((8, 2, 4, 2), (8, 3, 8, 4), (60, 4, 3, 2), (64, 6, 8, 3), (128, 8, 16, 4))
GROUPS += ((160, 6, 8, 3), (256, 8, 8, 4), (384, 8, 1, 1), (512, 10, 64, 9))
"""Experts, top-k, groups and how many of them are chosen, compiled on a GPU."""


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("experts", "top_k", "options"),
    [
        *((experts, top_k, {}) for experts, each in SHAPES.items() for top_k in each),
        *((experts, top_k, {"num_groups": n, "topk_groups": best}) for experts, top_k, n, best in GROUPS),
    ],
)
def test_compiled(experts: int, top_k: int, options: dict[str, int], dtype: str, policy: str) -> None:
    from kernel_calls import assert_kernel_agrees

    for scoring, bias in product(("softmax", "sigmoid"), (False, True)):
        name = "grouped_topk" if options else f"topk_{scoring}"
        grouped = options | _SCALED | {"scoring": scoring} if options else {}
        drawn = {"bias": bias, "ordinary": 2000, "seed": experts + top_k, "renormalize": bias}
        shape = experts, top_k, getattr(torch, dtype)
        assert_kernel_agrees(name, *shape, device="cuda", nan_policy=policy, **drawn, **grouped)
