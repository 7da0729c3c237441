"""Capsules of small layers, and outputs of them with kernel-like noise, for tests."""

from __future__ import annotations

import torch

from moedoctor.diagnose.capsule.computation import Computation
from moedoctor.models.layer_shape import LayerShape
from moedoctor.reference.fp8 import Fp8
from moedoctor.reference.moe import Weight
from moedoctor.reference.moe_layer import make_layer, make_problem
from moedoctor.reference.nvfp4 import Nvfp4
from moedoctor.trace.capsule import Capsule, Record

SCHEMES = (("nvfp4", "none"), ("nvfp4", "nvfp4"), ("fp8", "none"), ("fp8", "fp8"), ("bf16", "none"))
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
    problem = make_problem(make_layer(shape, quantization, seed=seed), tokens, activations, seed=seed)
    ids, x = problem.topk_ids.clone(), problem.x
    if unusual:
        ids[0, 1], ids[1, 2] = ids[0, 0], -1
        x = (x * 8).to(x.dtype)
    tensors = {
        "x": x,
        "topk_ids": ids,
        "topk_weights": problem.topk_weights,
        "expert_ids": torch.arange(shape.experts, dtype=torch.int32),
        **_tensors("w13", problem.layer.w13),
        **_tensors("w2", problem.layer.w2),
    }
    if activations != "none":
        tensors["input_scale"] = torch.tensor(problem.layer.input_scale)
        tensors["intermediate_scale"] = torch.tensor(problem.layer.intermediate_scale)
    if halves and quantization != "bf16" and shape.gated:
        ratio = 2.0 ** torch.randint(-1, 2, (shape.experts, 2), generator=draw).float()  # [E, 2]
        tensors["w13_scale"] = tensors["w13_scale"][:, None] * ratio
    record = Record(
        layer="model.layers.0.mlp.experts",
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        experts=shape.experts,
        top_k=shape.top_k,
        activation=activation,
        quantization=quantization,
        activations=activations,
        call_tokens=tokens,
    )
    capsule = Capsule(record, {**tensors, "output": torch.zeros_like(x)})
    return with_output(capsule, computation(capsule).contributions().sum(1))


def computation(capsule: Capsule) -> Computation:
    """Return how the capsule's call is computed."""
    from moedoctor.diagnose.capsule.replay import computation_of

    return computation_of(capsule)


def with_output(capsule: Capsule, output: torch.Tensor) -> Capsule:
    """Return the capsule with another output [T, H]."""
    return Capsule(capsule.record, {**capsule.tensors, "output": output.bfloat16()})


def noisy(output: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return `output` [T, H] as a kernel gives it: the order of sums and bfloat16 move each element."""
    draw = torch.Generator().manual_seed(seed)
    unit = output.norm(dim=1, keepdim=True) / output.shape[1] ** 0.5  # [T, 1]
    own = output * torch.randn(output.shape, generator=draw)  # [T, H]
    shared = unit * torch.randn(output.shape, generator=draw)  # [T, H]
    return (output + 2.0**-10 * (own + shared)).bfloat16()


def _tensors(name: str, weight: Weight) -> dict[str, torch.Tensor]:
    if isinstance(weight, Nvfp4):
        return {
            name: weight.packed,
            f"{name}_block_scales": weight.block_scales,
            f"{name}_scale": weight.global_scale,
        }
    if isinstance(weight, Fp8):
        return {name: weight.values, f"{name}_scale": weight.scale}
    return {name: weight}
