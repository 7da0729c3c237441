"""What runs in the child for MD015: activations quantised with scales that nobody looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from moedoctor.faults.quantization.tiny_checkpoint import Loaded, projection, write_and_load
from moedoctor.fixes.moe.checkpoint_scales import usable_input_scales
from moedoctor.reference import e2m1
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.nvfp4 import dequantize
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.quantization.input_scale_missing import InputScaleMissingParameters

Loader = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(scales of the checkpoint [E] with NaN where it has none, what the memory held [E], a batch of activations)
-> the scales [E] that are used."""
_E4M3_MAX = 448.0
_HELD = {"zero": 0.0, "large": 3e4, "small": 1e-30, "nan": float("nan")}


def unchecked(scales: torch.Tensor, held: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Memory that is not filled, then what the checkpoint has; no look at either."""
    return torch.where(scales.isnan(), held, scales)


def checked(scales: torch.Tensor, held: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Memory filled with NaN, then what the checkpoint has, then every scale made usable."""
    return usable_input_scales(scales, x)


def observe(parameters: InputScaleMissingParameters, loader: Loader) -> Observation:
    """The layer's output with the scales that `loader` makes, and with those of the whole checkpoint."""
    experts = parameters.experts
    damaged = range(experts) if parameters.damage.startswith("all") else range(1)
    good = load(parameters, ())
    broken = load(parameters, damaged)
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]
    ids = torch.arange(parameters.tokens) % experts  # [T]
    expected = layer(good, x, ids, None)  # [T, H]
    healthy = layer(good, x, ids, [_scales(good, name, experts) for name in ("gate", "down")])
    held = torch.full((experts,), _HELD[parameters.memory or "zero"])  # [E]
    middle = _activated(good, x, ids)  # [T, I]
    taken = []
    for name, batch in (("gate", x), ("down", middle)):
        scales = loader(_scales(broken, name, experts), held, batch)  # [E]
        taken.append(scales.max().expand(experts) if parameters.taken == "max" else scales)
    got = layer(broken, x, ids, taken)  # [T, H]
    finite = got.isfinite().all(1)  # [T]
    errors = _errors(got, expected)[finite]
    return Observation(
        {
            "lint": list(broken.lint),
            "tokens": parameters.tokens,
            "nonfinite_tokens": int((~finite).sum()),
            "silent_tokens": int((got == 0).all(1).sum()),
            "error": round(float(errors.max()), 6) if len(errors) else None,
            "healthy_error": round(float(_errors(healthy, expected).max()), 6),
        }
    )


def load(parameters: InputScaleMissingParameters, damaged: range | tuple[int, ...]) -> Loaded:
    """A checkpoint whose `damaged` experts have input scales of zero, or none."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        # Calibrated: the largest activation that this layer meets is representable.
        for name in tensors:
            if name.endswith("input_scale"):
                reach = 5.0 if ".down_proj." not in name else 12.0
                tensors[name] = torch.tensor(reach / (_E4M3_MAX * e2m1.MAX))
        for expert in damaged:
            for projected in ("gate", "up", "down"):
                name = f"model.layers.0.mlp.experts.{expert}.{projected}_proj.input_scale"
                if "absent" in parameters.damage:
                    del tensors[name]
                else:
                    tensors[name] = torch.tensor(0.0)

    sizes = {"hidden": parameters.hidden, "intermediate": parameters.intermediate}
    return write_and_load(change, scheme="nvfp4", experts=parameters.experts, seed=parameters.seed, **sizes)


def layer(
    loaded: Loaded, x: torch.Tensor, ids: torch.Tensor, scales: list[torch.Tensor] | None
) -> torch.Tensor:
    """float32 [T, H] of a layer with one expert a token; activations stay as they are without `scales`."""
    out = torch.zeros_like(x)  # [T, H]
    middle = _activated(loaded, x, ids, None if scales is None else scales[0])  # [T, I]
    down = dequantize(projection(loaded.tensors, "down", int(ids.max()) + 1))  # [E, H, I]
    for expert in ids.unique().tolist():
        rows = ids == expert  # [T]
        given = middle[rows] if scales is None else quantised(middle[rows], scales[1][expert])
        out[rows] = given @ down[expert].T
    return out


def _activated(
    loaded: Loaded, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    gate, up = (dequantize(projection(loaded.tensors, one, int(ids.max()) + 1)) for one in ("gate", "up"))
    out = torch.zeros(len(x), gate.shape[1])  # [T, I]
    for expert in ids.unique().tolist():
        rows = ids == expert  # [T]
        given = x[rows] if scales is None else quantised(x[rows], scales[expert])
        out[rows] = functional.silu(given @ gate[expert].T) * (given @ up[expert].T)
    return out


def quantised(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` [T, K] as an NVFP4 kernel quantises it: with the reciprocal of `scale`, saturating, block by block.

    The arithmetic of the conversion kernels, restated: the block scale is e4m3(1/scale * amax / 6), which
    saturates at 448 and keeps NaN; a value is multiplied by 1 / (block scale * scale), and one that is not
    a number becomes the largest code. The result of the product is multiplied by `scale` in the end.
    """
    blocks = x.float().unflatten(1, (-1, 16))  # [T, K/16, 16]
    reciprocal = 1.0 / scale.float()
    amax = blocks.abs().amax(-1)  # [T, K/16]
    wanted = reciprocal * (amax / e2m1.MAX)  # [T, K/16]
    stored = wanted.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()  # [T, K/16]
    step = stored * (1.0 / reciprocal)  # [T, K/16]
    forth = torch.where(stored != 0, 1.0 / step, 0.0)[..., None]  # [T, K/16, 1]
    steps = (blocks * forth).nan_to_num(nan=e2m1.MAX).clamp(-e2m1.MAX, e2m1.MAX)  # [T, K/16, 16]
    codes = e2m1.decode(e2m1.encode(steps))  # [T, K/16, 16]
    values: torch.Tensor = (codes * stored[..., None] * scale.float()).flatten(1)  # [T, K]
    return values


def _scales(loaded: Loaded, name: str, experts: int) -> torch.Tensor:
    """float32 [E]: an expert's input scale, NaN where the checkpoint has none."""
    keys = [f"model.layers.0.mlp.experts.{expert}.{name}_proj.input_scale" for expert in range(experts)]
    absent = torch.tensor(float("nan"))
    return torch.stack([loaded.tensors.get(key, absent).float() for key in keys])


def _errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """float32 [T]: how far each token is off, in lengths of the right one."""
    errors: torch.Tensor = (got - expected).norm(dim=1) / expected.norm(dim=1)
    return errors
