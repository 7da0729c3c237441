"""The Triton kernels against the reference: interpreted on any machine, compiled on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.interpreted import needs_triton, run_check

pytestmark = needs_triton
HALF = ("bfloat16", "float16")
POLICIES = ("zero", "finite")


def _case(name: str, experts: int, top_k: int, dtype: str, shape: tuple[int, ...], **options: Any) -> str:
    bias = options.pop("bias", False)
    return json.dumps(
        {
            "name": name,
            "experts": experts,
            "top_k": top_k,
            "dtype": dtype,
            "shape": shape,
            "bias": bias,
            "options": options,
        }
    )


def _interpret(*cases: str) -> None:
    run_check("kernel_calls.py", *cases)


@pytest.mark.parametrize("policy", POLICIES)
def test_half_softmax_interpreted(policy: str) -> None:
    _interpret(
        # One row per program, so that a row cannot hide what another row lacks.
        _case("topk_softmax", 12, 7, "bfloat16", (1, 8, 2, 1), nan_policy=policy),
        _case("topk_softmax", 12, 3, "bfloat16", (2, 8, 2, 1), nan_policy=policy),
        _case(
            "topk_softmax",
            16,
            9,
            "float16",
            (16, 16, 1, 1),
            nan_policy=policy,
            renormalize=True,
            strided=True,
        ),
        _case("topk_softmax", 64, 8, "bfloat16", (32, 8, 8, 1), nan_policy=policy),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_topk_interpreted(policy: str) -> None:
    _interpret(
        _case("topk_softmax", 12, 3, "float32", (16, 8, 2, 1), nan_policy=policy, renormalize=True),
        _case("topk_sigmoid", 12, 12, "bfloat16", (32, 16, 1, 1), nan_policy=policy, strided=True),
        _case("topk_softmax", 16, 4, "bfloat16", (32, 8, 2, 1), nan_policy=policy, bias=True),
        _case(
            "topk_sigmoid", 12, 4, "float64", (32, 8, 2, 1), nan_policy=policy, bias=True, renormalize=True
        ),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_grouped_topk_interpreted(policy: str) -> None:
    single = {"num_groups": 1, "topk_groups": 1, "nan_policy": policy}
    three = {"num_groups": 3, "topk_groups": 2, "nan_policy": policy}
    four = {"num_groups": 4, "topk_groups": 2, "nan_policy": policy}
    _interpret(
        # One group and no bias: only the scaling factor excludes the half-precision kernel.
        _case(
            "grouped_topk",
            8,
            2,
            "bfloat16",
            (32, 8, 1, 1),
            scoring="softmax",
            routed_scaling_factor=2.5,
            **single,
        ),
        _case("grouped_topk", 12, 4, "bfloat16", (32, 8, 2, 1), bias=True, scoring="sigmoid", **three),
        _case("grouped_topk", 9, 5, "float32", (16, 16, 1, 1), bias=True, scoring="softmax", **three),
        _case(
            "grouped_topk",
            16,
            4,
            "float32",
            (32, 8, 2, 1),
            scoring="softmax",
            routed_scaling_factor=2.5,
            **four,
        ),
    )


def test_group_edges_interpreted() -> None:
    _interpret("group edges")


def test_clean_rows_are_routed_once() -> None:
    _interpret("clean rows once")


def test_inf_ranks_by_logit_under_finite() -> None:
    _interpret("inf ranks by logit")


def test_the_kernels_sort_every_arrangement() -> None:
    """A sorting network that sorts all sequences of zeros and ones sorts everything."""
    _interpret("sorts every arrangement")


# --- On a GPU --------------------------------------------------------------------------------------------

SHAPES = [
    (8, 2),
    (8, 8),
    (60, 4),
    (64, 6),
    (128, 8),
    (128, 20),
    (160, 6),
    (256, 8),
    (384, 8),
    (384, 33),
    (512, 10),
    (512, 16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_compiled(experts: int, top_k: int, dtype: str, policy: str) -> None:
    from kernel_calls import assert_kernel_agrees

    for name in ("topk_softmax", "topk_sigmoid"):
        for bias in (False, True):
            assert_kernel_agrees(
                name,
                experts,
                top_k,
                getattr(torch, dtype),
                device="cuda",
                bias=bias,
                ordinary=2000,
                seed=experts + top_k,
                nan_policy=policy,
                renormalize=bias,
            )


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "best"),
    [
        (8, 2, 4, 2),
        (8, 3, 8, 4),
        (60, 4, 3, 2),
        (64, 6, 8, 3),
        (128, 8, 16, 4),
        (160, 6, 8, 3),
        (256, 8, 8, 4),
        (384, 8, 1, 1),
        (512, 10, 64, 9),
    ],
)
def test_grouped_compiled(experts: int, top_k: int, groups: int, best: int, dtype: str, policy: str) -> None:
    from kernel_calls import assert_kernel_agrees

    for scoring in ("softmax", "sigmoid"):
        for bias in (False, True):
            assert_kernel_agrees(
                "grouped_topk",
                experts,
                top_k,
                getattr(torch, dtype),
                device="cuda",
                bias=bias,
                ordinary=2000,
                seed=experts,
                nan_policy=policy,
                renormalize=bias,
                num_groups=groups,
                topk_groups=best,
                scoring=scoring,
                routed_scaling_factor=2.5,
            )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 3, 1024, 1027, 8192])
def test_public_functions_on_a_gpu(tokens: int) -> None:
    from routing_cases import Call, assert_agrees

    from moedoctor.fixes import routing

    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    for name in ("topk_softmax", "topk_sigmoid"):
        for strided in (x.cuda(), x.t().contiguous().cuda().t()):
            weights, ids = getattr(routing, name)(strided, 8, renormalize=True)
            assert weights.is_cuda
            assert ids.is_cuda
            assert_agrees(weights.cpu(), ids.cpu(), Call(name, x, 8, {"renormalize": True}))
    with pytest.raises(ValueError, match=r"bias must be on the device of logits, cuda:0, got cpu"):
        routing.topk_softmax(x.cuda(), 8, bias=torch.zeros(128))
