"""MD014 in the child: loaders that make one global scale of two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moedoctor.faults.quantization.checkpoint_lab import (
    Changes,
    list_expert_prefixes,
    select_sizes,
    stack_projection,
    write_and_load,
)
from moedoctor.faults.quantization.global_scale_mismatch import GlobalScaleMismatchParameters
from moedoctor.fixes.moe import checkpoint_scales
from moedoctor.reference.agreement import relative_error
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.reference.nvfp4 import Nvfp4, dequantize, quantize
from moedoctor.results import Case, Evidence

Loader = Callable[[Nvfp4, Nvfp4, Nvfp4], tuple[Nvfp4, Nvfp4]]
"""gate [E, I, H], up [E, I, H] and down [E, H, I] of a checkpoint -> w13 [E, 2I, H] and w2 [E, H, I]."""
_RATIO = 2.0
"""Between the global scales of the checkpoint that engines load: a factor of two rounds nothing."""


def use_one_scale(gate: Nvfp4, up: Nvfp4, down: Nvfp4, *, merged: str) -> tuple[Nvfp4, Nvfp4]:
    """Use one of the two global scales and leave the block scales as they are."""
    scale = gate.global_scale  # [E]
    if merged == "max":
        scale = torch.maximum(scale, up.global_scale)
    packed = torch.cat((gate.packed, up.packed), 1)  # [E, 2I, H/2]
    scales = torch.cat((gate.block_scales.view(torch.uint8), up.block_scales.view(torch.uint8)), 1)
    return Nvfp4(packed, scales.view(torch.float8_e4m3fn), scale), down


def model(case: Case, parameters: GlobalScaleMismatchParameters, release: object) -> Evidence:
    """Compare the layer's output through each loader with the checkpoint's own values in float32."""
    loaders: dict[str, Loader] = {
        "rescaled": lambda gate, up, down: (checkpoint_scales.rescale(gate, up), down),
        "folded": checkpoint_scales.fold,
    }
    if case.subject == "faulty":
        loaders = {parameters.merged: functools.partial(use_one_scale, merged=parameters.merged)}

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(parameters.seed + 1)
        for expert in range(parameters.experts):
            prefix = f"model.layers.0.mlp.experts.{expert}"
            up = torch.randn(parameters.intermediate, parameters.hidden, generator=draw)  # [I, H]
            scale = float(tensors[f"{prefix}.gate_proj.weight_scale_2"]) * parameters.ratio
            # The up half fills its own range, like a half that was quantized by itself.
            quantized = quantize(up * (scale * 448 * 6 / float(up.abs().amax())), scale)
            tensors[f"{prefix}.up_proj.weight"] = quantized.packed
            tensors[f"{prefix}.up_proj.weight_scale"] = quantized.block_scales
            tensors[f"{prefix}.up_proj.weight_scale_2"] = quantized.global_scale.reshape(())

    loaded = write_and_load(change, **select_sizes(parameters))
    gate, up, down = (
        stack_projection(loaded.tensors, name, parameters.experts) for name in ("gate", "up", "down")
    )
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]
    topk_ids = torch.arange(parameters.tokens)[:, None] % parameters.experts  # [T, 1]
    topk_weights = torch.ones(parameters.tokens, 1)  # [T, 1]
    w13 = torch.cat((dequantize(gate), dequantize(up)), 1)  # [E, 2I, H]
    expected = forward(x, MoeWeights(w13, dequantize(down)), topk_weights, topk_ids)  # [T, H]
    ways = {}
    for name, load in loaders.items():
        output = forward(x, MoeWeights(*load(gate, up, down)), topk_weights, topk_ids)  # [T, H]
        errors = relative_error(output, expected)  # [T]
        ways[name] = {
            "worst_token_error": round(float(errors.max()), 6),
            "mean_token_error": round(float(errors.mean()), 6),
        }
    return {"lint": loaded.lint, "tokens": parameters.tokens, "ways": ways}


def share_scale(tensors: Tensors, config: dict[str, Any]) -> None:
    """Make the reference: one global scale, the up half with block scales of half its range."""
    for prefix in list_expert_prefixes():
        scales = tensors[f"{prefix}.up_proj.weight_scale"]
        tensors[f"{prefix}.up_proj.weight_scale"] = (scales.float() / 2).to(scales.dtype)


def own_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """Write the same weights with a separate global scale for the up half."""
    share_scale(tensors, config)
    for prefix in list_expert_prefixes():
        scales = tensors[f"{prefix}.up_proj.weight_scale"]
        tensors[f"{prefix}.up_proj.weight_scale"] = (scales.float() * _RATIO).to(scales.dtype)
        tensors[f"{prefix}.up_proj.weight_scale_2"] = tensors[f"{prefix}.up_proj.weight_scale_2"] / _RATIO


def fold_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """Repair: use the gate's scale for both, and the ratio in the down projection's scale and input scale."""
    own_scales(tensors, config)
    for prefix in list_expert_prefixes():
        tensors[f"{prefix}.up_proj.weight_scale_2"] = tensors[f"{prefix}.gate_proj.weight_scale_2"].clone()
        for part, factor in (("weight_scale_2", 1 / _RATIO), ("input_scale", _RATIO)):
            tensors[f"{prefix}.down_proj.{part}"] = tensors[f"{prefix}.down_proj.{part}"] * factor


CHANGES = Changes(own_scales, fold_scales, share_scale)
engine = CHANGES.engine
