"""What runs in the child for MD017: a kernel that reads the up half first, and loaders that forget that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moedoctor.bench.moe.parity import bounds_of
from moedoctor.fixes.moe.weight_layout import up_first
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.agreement import agree
from moedoctor.reference.moe import Weight, expert_weight
from moedoctor.reference.moe_layer import expected_output, make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.quantization.gate_up_order import GateUpOrderParameters

Loader = Callable[[Weight], Weight]
"""w13 as the checkpoint has it -> w13 as it is handed to the kernel."""


def forgetful_loader(mistake: str) -> Loader:
    """A loader that leaves out the exchange, or exchanges only the values or only their scales."""

    def load(w13: Weight) -> Weight:
        if mistake == "not_swapped" or not isinstance(w13, Nvfp4):
            return w13
        swapped = up_first(w13)
        assert isinstance(swapped, Nvfp4)
        if mistake == "only_values":
            return replace(swapped, block_scales=w13.block_scales)
        return replace(swapped, packed=w13.packed)

    return load


def observe(parameters: GateUpOrderParameters, device: str, loader: Loader) -> Observation:
    """Run the kernel on what `loader` makes of a checkpoint's weight and compare with the reference."""
    shape = LayerShape(
        parameters.hidden,
        parameters.intermediate,
        parameters.experts,
        parameters.top_k,
        parameters.activation,
    )
    layer = make_layer(shape, parameters.quantization, seed=parameters.seed, device=device)
    problem = make_problem(layer, parameters.tokens, "none", seed=parameters.seed, device=device)
    output = up_first_kernel(
        problem.x, loader(layer.w13), layer.w2, problem.topk_weights, problem.topk_ids, parameters.activation
    )
    agreement = agree(output, expected_output(problem, "none"), bounds_of("none"))
    return Observation({"mistake": parameters.mistake, **agreement.evidence()})


def up_first_kernel(
    x: torch.Tensor,
    w13: Weight,
    w2: Weight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """float32 [T, H] by a kernel that takes rows [0, I) of `w13` as the up half, as FlashInfer's do."""
    total = torch.zeros(x.shape, device=x.device)  # [T, H]
    for token in range(len(x)):
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, slot])
            up, gate = (expert_weight(w13, expert) @ x[token].float()).chunk(2)  # [I] each
            opened = (
                functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
            )
            total[token] += topk_weights[token, slot] * (expert_weight(w2, expert) @ (opened * up))
    return total
