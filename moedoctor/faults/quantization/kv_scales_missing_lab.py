"""What runs in the child for MD012: attention over keys and values that went through an FP8 cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from moedoctor.faults.quantization.tiny_checkpoint import Loaded, write_and_load
from moedoctor.fixes.moe.checkpoint_scales import kv_scale
from moedoctor.reference.checkpoints import Tensors
from moedoctor.reference.fp8 import E4M3_MAX
from moedoctor.results import Observation

if TYPE_CHECKING:
    from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissingParameters

Scale = Callable[[torch.Tensor], float]
"""Keys or values [T, D] of a calibration run -> the scale of their cache."""
_SCORE = 3.0
_SMALLEST = 2.0**-9
"""The smallest E4M3 number."""


def one(values: torch.Tensor) -> float:
    """What is taken where the checkpoint has no scale."""
    return 1.0


def cached(values: torch.Tensor, scale: float) -> torch.Tensor:
    """`values` [T, D] after an E4M3 cache with `scale`: saturated, rounded, read back. float32 [T, D]."""
    steps = (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)  # [T, D]
    return steps.to(torch.float8_e4m3fn).float() * scale


def observe(parameters: KvScalesMissingParameters, scale: Scale) -> Observation:
    """Attention in a checkpoint that declares an FP8 KV cache, against the same without a cache."""
    loaded = _checkpoint(parameters)
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]
    query, keys, values = (_project(loaded, x, name) for name in ("q", "k", "v"))  # [T, D] each
    # Scores keep their size whatever that of the keys is, as in a model that was trained so.
    query = query * (_SCORE / float(keys.abs().amax()))  # [T, D]
    expected = attention(query, keys, values)  # [T, D]
    scales = (scale(keys), scale(values))
    got = attention(query, cached(keys, scales[0]), cached(values, scales[1]))  # [T, D]
    computed = attention(query, cached(keys, kv_scale(keys)), cached(values, kv_scale(values)))  # [T, D]
    both = torch.stack((keys / scales[0], values / scales[1])).abs()  # [2, T, D]
    return Observation(
        {
            "lint": list(loaded.lint),
            "nonfinite_tokens": int((~got.isfinite().all(1)).sum()),
            "k_scale": scales[0],
            "v_scale": scales[1],
            "saturated": round(float((both > E4M3_MAX).float().mean()), 6),
            "lost": round(float((both < _SMALLEST / 2).float().mean()), 6),
            "error": round(_error(got, expected), 6),
            "computed_error": round(_error(computed, expected), 6),
        }
    )


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of one head in float32: [T, D] of [T, D] each."""
    scores = query @ keys.T / math.sqrt(query.shape[1])  # [T, T]
    mask = torch.ones_like(scores).triu(1).bool()  # [T, T]
    weights = scores.masked_fill(mask, float("-inf")).softmax(-1)  # [T, T]
    return weights @ values


def _checkpoint(parameters: KvScalesMissingParameters) -> Loaded:
    """A checkpoint that asks for an FP8 KV cache, its key or value projection scaled to the size given."""
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        for part, name in (("keys", "k_proj"), ("values", "v_proj")):
            if parameters.part in (part, "both"):
                key = f"model.layers.0.self_attn.{name}.weight"
                largest = float((x @ tensors[key].float().T)[:, :64].abs().amax())
                tensors[key] = (tensors[key].float() * (parameters.size / largest)).bfloat16()

    return write_and_load(
        change, scheme="nvfp4", hidden=parameters.hidden, intermediate=64, experts=2, seed=parameters.seed
    )


def _project(loaded: Loaded, x: torch.Tensor, name: str) -> torch.Tensor:
    """The first head [T, 64] of the projection."""
    weight = loaded.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].float()  # [D, H]
    return x @ weight[:64].T


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean over tokens of how far one is off, in lengths of the right one."""
    errors: torch.Tensor = (got - expected).norm(dim=1) / expected.norm(dim=1)  # [T]
    return float(errors.nan_to_num(nan=math.inf).mean()) if bool(errors.isfinite().all()) else 0.0
