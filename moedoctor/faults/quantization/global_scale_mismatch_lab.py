"""What runs in the child for MD014: loaders that make one global scale of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from moedoctor.faults.quantization.tiny_checkpoint import projection, write_and_load
from moedoctor.fixes.moe.checkpoint_scales import folded, rescaled
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.moe import MoeWeights, forward
from moedoctor.reference.nvfp4 import Nvfp4, dequantize, quantize
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.quantization.global_scale_mismatch import GlobalScaleMismatchParameters

Loader = Callable[[Nvfp4, Nvfp4, Nvfp4], tuple[Nvfp4, Nvfp4]]
"""gate [E, I, H], up [E, I, H] and down [E, H, I] of a checkpoint -> w13 [E, 2I, H] and w2 [E, H, I]."""


def one_scale(kept: str) -> Loader:
    """A loader that keeps one of the two global scales and leaves the block scales as they are."""

    def load(gate: Nvfp4, up: Nvfp4, down: Nvfp4) -> tuple[Nvfp4, Nvfp4]:
        scale = gate.global_scale  # [E]
        if kept == "max":
            scale = torch.maximum(scale, up.global_scale)
        packed = torch.cat((gate.packed, up.packed), 1)  # [E, 2I, H/2]
        scales = torch.cat((gate.block_scales.view(torch.uint8), up.block_scales.view(torch.uint8)), 1)
        return Nvfp4(packed, scales.view(torch.float8_e4m3fn), scale), down

    return load


def rescale(gate: Nvfp4, up: Nvfp4, down: Nvfp4) -> tuple[Nvfp4, Nvfp4]:
    """The repair by block scales."""
    return rescaled(gate, up), down


def fold(gate: Nvfp4, up: Nvfp4, down: Nvfp4) -> tuple[Nvfp4, Nvfp4]:
    """The repair by the second weight's global scale."""
    return folded(gate, up, down)


def observe(parameters: GlobalScaleMismatchParameters, loaders: Mapping[str, Loader]) -> Observation:
    """The layer's output through each loader against the checkpoint's own values in float32."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(parameters.seed + 1)
        for expert in range(parameters.experts):
            prefix = f"model.layers.0.mlp.experts.{expert}"
            up = torch.randn(parameters.intermediate, parameters.hidden, generator=draw)  # [I, H]
            scale = float(tensors[f"{prefix}.gate_proj.weight_scale_2"]) * parameters.ratio
            # The up half fills its own range, as one that was quantised by itself does.
            quantised = quantize(up * (scale * 448 * 6 / float(up.abs().amax())), scale)
            tensors[f"{prefix}.up_proj.weight"] = quantised.packed
            tensors[f"{prefix}.up_proj.weight_scale"] = quantised.block_scales
            tensors[f"{prefix}.up_proj.weight_scale_2"] = quantised.global_scale.reshape(())

    loaded = write_and_load(
        change,
        scheme="nvfp4",
        hidden=parameters.hidden,
        intermediate=parameters.intermediate,
        experts=parameters.experts,
        seed=parameters.seed,
    )
    gate, up, down = (projection(loaded.tensors, name, parameters.experts) for name in ("gate", "up", "down"))
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]
    ids = torch.arange(parameters.tokens)[:, None] % parameters.experts  # [T, 1]
    shares = torch.ones(parameters.tokens, 1)  # [T, 1]
    own = torch.cat((dequantize(gate), dequantize(up)), 1)  # [E, 2I, H]
    expected = forward(x, MoeWeights(own, dequantize(down)), shares, ids)  # [T, H]
    ways = {}
    for name, loader in loaders.items():
        w13, w2 = loader(gate, up, down)
        got = forward(x, MoeWeights(w13, w2), shares, ids)  # [T, H]
        errors = (got - expected).norm(dim=1) / expected.norm(dim=1)  # [T]
        ways[name] = {
            "worst_token_error": round(float(errors.max()), 6),
            "mean_token_error": round(float(errors.mean()), 6),
        }
    return Observation({"lint": list(loaded.lint), "tokens": parameters.tokens, "ways": ways})
