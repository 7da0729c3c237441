"""MD015 in the child: activations that are quantized with scales that nobody checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from moedoctor.faults.quantization.checkpoint_lab import (
    Changes,
    Loaded,
    select_sizes,
    stack_projection,
    write_and_load,
)
from moedoctor.faults.quantization.input_scale_missing import InputScaleMissingParameters
from moedoctor.fixes.moe.checkpoint_scales import repair_input_scales
from moedoctor.reference import e2m1
from moedoctor.reference.agreement import relative_error
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.fp8 import E4M3_MAX
from moedoctor.reference.nvfp4 import dequantize
from moedoctor.results import Case, Evidence

_MEMORY = {"zero": 0.0, "large": 3e4, "small": 1e-30, "nan": float("nan")}


def model(case: Case, parameters: InputScaleMissingParameters, release: object) -> Evidence:
    """Compare the layer's output with the loaded scales, and with those of the whole checkpoint."""
    experts = parameters.experts
    good = _make_checkpoint(parameters, ())
    damaged = _make_checkpoint(parameters, range(experts if parameters.damage.startswith("all") else 1))
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]
    ids = torch.arange(parameters.tokens) % experts  # [T]
    expected = _compute_layer(good, x, ids)  # [T, H]
    good_scales = [_read_scales(good, name, experts) for name in ("gate", "down")]  # [E] each
    healthy = _compute_layer(good, x, ids, good_scales)  # [T, H]
    memory = torch.full((experts,), _MEMORY[parameters.memory or "zero"])  # [E]
    used = []
    for name, batch in (("gate", x), ("down", _compute_activations(good, x, ids))):
        scales = _read_scales(damaged, name, experts)  # [E]
        if case.subject == "faulty":  # loads them into memory that is not filled, and checks neither
            scales = torch.where(scales.isnan(), memory, scales)
        else:  # loads them into memory filled with NaN, and makes every scale usable
            scales = repair_input_scales(scales, batch)
        used.append(scales.max().expand(experts) if parameters.taken == "max" else scales)
    output = _compute_layer(damaged, x, ids, used)  # [T, H]
    finite = output.isfinite().all(1)  # [T]
    errors = relative_error(output, expected)[finite]  # [finite tokens]
    return {
        "lint": damaged.lint,
        "tokens": parameters.tokens,
        "nonfinite_tokens": int((~finite).sum()),
        "silent_tokens": int((output == 0).all(1).sum()),
        "error": round(float(errors.max()), 6) if len(errors) else None,
        "healthy_error": round(float(relative_error(healthy, expected).max()), 6),
    }


def _make_checkpoint(parameters: InputScaleMissingParameters, damaged: Sequence[int]) -> Loaded:
    """Make a checkpoint whose `damaged` experts have input scales of zero, or none."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        # Calibrated: the largest activation of this layer is representable.
        for name in tensors:
            if name.endswith("input_scale"):
                largest = 5.0 if ".down_proj." not in name else 12.0
                tensors[name] = torch.tensor(largest / (E4M3_MAX * e2m1.MAX))
        for expert in damaged:
            for projected in ("gate", "up", "down"):
                name = f"model.layers.0.mlp.experts.{expert}.{projected}_proj.input_scale"
                if "absent" in parameters.damage:
                    del tensors[name]
                else:
                    tensors[name] = torch.tensor(0.0)

    return write_and_load(change, **select_sizes(parameters))


def _compute_layer(
    loaded: Loaded, x: torch.Tensor, ids: torch.Tensor, scales: Sequence[torch.Tensor | None] = (None, None)
) -> torch.Tensor:
    """Compute float32 [T, H] with one expert a token; without `scales` activations are not quantized."""
    middle = _compute_activations(loaded, x, ids, scales[0])  # [T, I]
    return _multiply(loaded, "down", middle, ids, scales[1])


def _compute_activations(
    loaded: Loaded, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    gate, up = (_multiply(loaded, name, x, ids, scales) for name in ("gate", "up"))  # [T, I] each
    return functional.silu(gate) * up


def _multiply(
    loaded: Loaded, name: str, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Compute [T, N]: each row of `x` [T, K] through its expert, quantized with that expert's scale."""
    weight = dequantize(stack_projection(loaded.tensors, name, int(ids.max()) + 1))  # [E, N, K]
    out = torch.zeros(len(x), weight.shape[1])  # [T, N]
    for expert in ids.unique().tolist():
        rows = ids == expert  # [T]
        given = x[rows] if scales is None else quantize_like_kernel(x[rows], scales[expert])
        out[rows] = given @ weight[expert].T
    return out


def quantize_like_kernel(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize `x` [T, K] like an NVFP4 kernel: with the reciprocal of `scale`, saturating, block by block.

    The arithmetic of the conversion kernels, restated: the block scale is e4m3(1/scale * amax / 6), which
    saturates at 448 and keeps NaN. A value is multiplied by 1 / (block scale * scale), and NaN becomes the
    largest code. In the end, the result of the product is multiplied by `scale`.
    """
    blocks = x.float().unflatten(1, (-1, 16))  # [T, K/16, 16]
    reciprocal = 1.0 / scale.float()
    amax = blocks.abs().amax(-1)  # [T, K/16]
    exact = reciprocal * (amax / e2m1.MAX)  # [T, K/16]
    block_scale = exact.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()  # [T, K/16]
    step = block_scale * (1.0 / reciprocal)  # [T, K/16]
    factor = torch.where(block_scale != 0, 1.0 / step, 0.0)[..., None]  # [T, K/16, 1]
    steps = (blocks * factor).nan_to_num(nan=e2m1.MAX).clamp(-e2m1.MAX, e2m1.MAX)  # [T, K/16, 16]
    codes = e2m1.decode(e2m1.encode(steps))  # [T, K/16, 16]
    values: torch.Tensor = (codes * block_scale[..., None] * scale.float()).flatten(1)  # [T, K]
    return values


def _read_scales(loaded: Loaded, name: str, experts: int) -> torch.Tensor:
    """Return the experts' input scales, float32 [E], with NaN for each that the checkpoint lacks."""
    keys = [f"model.layers.0.mlp.experts.{expert}.{name}_proj.input_scale" for expert in range(experts)]
    absent = torch.tensor(float("nan"))
    return torch.stack([loaded.tensors.get(key, absent).float() for key in keys])


def clear_input_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in tensors:
        if name.endswith("input_scale"):
            tensors[name] = torch.tensor(0.0)


CHANGES = Changes(clear_input_scales)
engine = CHANGES.engine
