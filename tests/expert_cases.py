"""One layer through our kernels, with routes that are awkward, held against the reference."""

from __future__ import annotations

import torch

from moedoctor.bench.backends.ours import _weights
from moedoctor.bench.moe_layer import expected_output, make_layer, make_problem
from moedoctor.kernels.expert_launch import run_experts
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.token_agreement import Bounds, agree


def assert_layer_is_right(
    quantization: str,
    activation: str,
    tokens: int,
    hidden: int,
    intermediate: int,
    *,
    device: str,
    bounds: Bounds,
) -> None:
    """Some slots are skipped, one token has the same expert K times and one none at all."""
    shape = LayerShape(hidden, intermediate, 8, 4, activation)
    layer = make_layer(shape, quantization, device=device)
    problem = make_problem(layer, tokens, "none", device=device)
    problem.topk_ids[0, 1] = -1
    if tokens > 2:
        problem.topk_ids[1] = -1
        problem.topk_ids[2] = 7
    output = run_experts(
        problem.x,
        _weights(layer.w13),
        _weights(layer.w2),
        problem.topk_weights,
        problem.topk_ids,
        activation=activation,
    )
    found = agree(output, expected_output(problem, "none"), bounds)
    assert found.right, (quantization, activation, tokens, found.reason)
    assert tokens <= 2 or not bool(output[1].count_nonzero())
    assert torch.isfinite(output).all()
