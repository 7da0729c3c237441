"""Capsules of small layers, and outputs of them with kernel-like noise, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from moedoctor.diagnose.capsule.computation import Computation
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.moe_layer import make_layer, make_problem
from moedoctor.trace.capsule import Capsule, make_whole_capsule

SCHEMES = (
    ("nvfp4", "none"),
    ("nvfp4", "nvfp4"),
    ("fp8", "none"),
    ("fp8", "fp8"),
    ("fp8", "fp8_block"),
    ("bf16", "none"),
)
"""Quantization of weights and of activations."""


def make_capsule(
    quantization: str = "nvfp4",
    activations: str = "none",
    *,
    activation: str = "silu",
    tokens: int = 8,
    seed: int = 0,
    halves: bool = False,
    unusual: bool = False,
) -> Capsule:
    """Return a capsule whose output is right.

    `halves`: w1 and w3 have scales of their own. `unusual`: a duplicate id, an id of -1 and large values.
    """
    draw = torch.Generator().manual_seed(seed)
    shape = LayerShape(hidden=256, intermediate=128, experts=8, top_k=3, activation=activation)
    layer = make_layer(shape, "fp8-block" if activations == "fp8_block" else quantization, seed=seed)
    problem = make_problem(layer, tokens, activations, seed=seed)
    if unusual:
        ids = problem.topk_ids.clone()  # [T, K]
        ids[0, 1], ids[1, 2] = ids[0, 0], -1
        problem = replace(problem, topk_ids=ids, x=(problem.x * 8).to(problem.x.dtype))
    capsule = make_whole_capsule(problem, problem.x, activations, layer="model.layers.0.mlp.experts")
    if halves and quantization != "bf16" and shape.gated and capsule.record.block is None:
        ratio = 2.0 ** torch.randint(-1, 2, (shape.experts, 2), generator=draw).float()  # [E, 2]
        scale = capsule.tensors["w13_scale"][:, None] * ratio  # [E, 2]
        capsule = Capsule(capsule.record, {**capsule.tensors, "w13_scale": scale})
    return with_output(capsule, computation(capsule).compute_contributions().sum(1))


def computation(capsule: Capsule) -> Computation:
    """Return how the capsule's call is computed."""
    from moedoctor.diagnose.capsule.replay import make_computation

    return make_computation(capsule)


def with_output(capsule: Capsule, output: torch.Tensor) -> Capsule:
    """Return the capsule with another output [T, H]."""
    return Capsule(capsule.record, {**capsule.tensors, "output": output.bfloat16()})


def noisy(output: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return `output` [T, H] as a kernel gives it: the order of sums and bfloat16 move each element."""
    draw = torch.Generator().manual_seed(seed)
    unit = output.norm(dim=1, keepdim=True) / output.shape[1] ** 0.5  # [T, 1]
    own = output * torch.randn(output.shape, generator=draw)  # [T, H]
    shared = unit * torch.randn(output.shape, generator=draw)  # [T, H]
    changed: torch.Tensor = output + 2.0**-10 * (own + shared)  # [T, H]
    return changed.bfloat16()
