"""MD012 in the child: attention over keys and values that went through an FP8 cache, in torch and in vLLM.

An FP8 cache alone moves the answers of an engine. So two engines with the same function go with the tested
engine: the reference has a cache in the model's own type, and the control has an FP8 cache with values that
fit into E4M3 at a scale of 1.0, which shows how far rounding alone moves the answers. The distance of two
engines is the total variation of their distributions of the next token (0: equal, 1: nothing in common), its
median over the prompts.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from moedoctor.faults.quantization.checkpoint_lab import Run, write_and_load, write_checkpoints
from moedoctor.faults.quantization.kv_scales_missing import KvScalesMissingParameters
from moedoctor.fixes.moe.checkpoint_scales import compute_kv_scale
from moedoctor.reference.agreement import relative_error
from moedoctor.reference.checkpoints import Change, Tensors
from moedoctor.reference.fp8 import E4M3_MAX, round_trip
from moedoctor.results import Case, Evidence
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, need_backend, run_engines

ATTENTION, TRITON = "FLASH_ATTN", "TRITON_ATTN"
"""FLASH_ATTN uses the scales in every release; TRITON_ATTN is said not to (vllm#34759)."""
_SCORE = 3.0
_SMALLEST = 2.0**-9
"""The smallest E4M3 number."""
_SPREAD = 65536.0
_PARALLEL = 6
_VOCAB, _PROMPTS, _LENGTH = 512, 32, 8
_PROBE = "moedoctor.upstream.engine.probes:read_kv_cache_scales"
_LAYER = "model.layers.0.self_attn"


def model(case: Case, parameters: KvScalesMissingParameters, release: object) -> Evidence:
    """Compare attention through an FP8 cache with attention without a cache, on one checkpoint.

    The cache has the scales that we compute, or scales of 1.0, as if the checkpoint ships none.
    """
    draw = torch.Generator().manual_seed(parameters.seed + 2)
    x = torch.randn(parameters.tokens, parameters.hidden, generator=draw)  # [T, H]

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        _declare(config)
        for part, name in (("keys", "k"), ("values", "v")):
            if parameters.part in (part, "both"):
                key = f"{_LAYER}.{name}_proj.weight"
                factor = parameters.size / float(_compute_first_head(tensors, x, name).abs().amax())
                tensors[key] = (tensors[key].float() * factor).bfloat16()

    loaded = write_and_load(
        change, hidden=parameters.hidden, intermediate=64, experts=2, seed=parameters.seed
    )
    query, keys, values = (
        _compute_first_head(loaded.tensors, x, name) for name in ("q", "k", "v")
    )  # [T, D] each
    # Scores do not depend on the size of the keys, as in a model that was trained with them.
    query = query * (_SCORE / float(keys.abs().amax()))  # [T, D]
    expected = compute_attention(query, keys, values)  # [T, D]

    def compute_with(k_scale: float, v_scale: float) -> torch.Tensor:
        return compute_attention(query, round_trip(keys, k_scale), round_trip(values, v_scale))  # [T, D]

    ours = compute_kv_scale(keys), compute_kv_scale(values)
    k_scale, v_scale = ours if case.subject == "fixed" else (1.0, 1.0)
    output, computed = compute_with(k_scale, v_scale), compute_with(*ours)  # [T, D] each
    steps = torch.stack((keys / k_scale, values / v_scale)).abs()  # [2, T, D]
    return {
        "lint": loaded.lint,
        "nonfinite_tokens": int((~output.isfinite().all(1)).sum()),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "saturated": round(float((steps > E4M3_MAX).float().mean()), 6),
        "lost": round(float((steps < _SMALLEST / 2).float().mean()), 6),
        "error": round(float(relative_error(output, expected).mean()), 6),
        "computed_error": round(float(relative_error(computed, expected).mean()), 6),
    }


def compute_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of one head in float32: [T, D] of [T, D] each."""
    return functional.scaled_dot_product_attention(query[None], keys[None], values[None], is_causal=True)[0]


def _compute_first_head(tensors: Tensors, x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the first head [T, 64] of the projection of `x` [T, H]."""
    weight = tensors[f"{_LAYER}.{name}_proj.weight"].float()  # [D, H]
    return x @ weight[:64].T


# --- Engines ------------------------------------------------------------------------------------------------


def _declare(config: dict[str, Any]) -> None:
    """Ask for an FP8 KV cache."""
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}


def _ship(tensors: Tensors, k_scale: float, v_scale: float) -> None:
    tensors[f"{_LAYER}.k_proj.k_scale"] = torch.tensor(k_scale)
    tensors[f"{_LAYER}.v_proj.v_scale"] = torch.tensor(v_scale)


def ship_unit_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """Make the control: scales of 1.0, which fit the keys and values of a generated checkpoint."""
    _declare(config)
    _ship(tensors, 1.0, 1.0)


def omit_kv_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """Damage: no scales, and values that are `_SPREAD` times as large.

    The output projection takes the factor back. It is a power of two, so the function stays the same.
    """
    _declare(config)
    for name, factor in (("v_proj", _SPREAD), ("o_proj", 1 / _SPREAD)):
        weight = tensors[f"{_LAYER}.{name}.weight"]
        tensors[f"{_LAYER}.{name}.weight"] = (weight.float() * factor).to(weight.dtype)


def calibrate_kv_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """Repair: scales of a calibration over every token of the vocabulary."""
    omit_kv_scales(tensors, config)
    x = tensors["model.embed_tokens.weight"].float()  # [V, H]
    x = x * x.square().mean(1, keepdim=True).rsqrt()  # [V, H]
    keys, values = (x @ tensors[f"{_LAYER}.{name}_proj.weight"].float().T for name in ("k", "v"))
    head = len(tensors[f"{_LAYER}.k_norm.weight"])
    keys = keys.unflatten(1, (-1, 2, head // 2))  # [V, heads, 2, D/2]
    keys = keys * keys.square().mean((2, 3), keepdim=True).rsqrt()  # [V, heads, 2, D/2]
    # Positions rotate pairs of a key's elements, which does not change the length of the pair.
    _ship(tensors, compute_kv_scale(keys.norm(dim=2)), compute_kv_scale(values))


def engine(case: Case, parameters: KvScalesMissingParameters, release: object) -> Evidence:
    return compare_engines(str(parameters.moe_backend), repaired=case.subject == "fixed")


def compare_engines(moe_backend: str, *, repaired: bool, run: Run | None = None) -> Evidence:
    """Compare vLLM on the checkpoint without scales, or with them, with the two controls.

    The repaired checkpoint is also given to TRITON_ATTN with controls of its own, for the claim about it.
    Raises UnavailableError if no engine can run.
    """
    if run is None:
        need_backend("nvfp4", moe_backend)
        run = functools.partial(run_engines, parallel=_PARALLEL)
    changes: Mapping[str, Change | None] = {
        "reference": None,
        "control": ship_unit_scales,
        "tested": calibrate_kv_scales if repaired else omit_kv_scales,
    }
    backends = (ATTENTION, TRITON) if repaired else (ATTENTION,)
    with write_checkpoints(changes, layers=1, vocab=_VOCAB) as folders:
        results = run(
            [
                _request(str(folder), label, moe_backend, attention_backend)
                for attention_backend in backends
                for label, folder in folders.items()
            ]
        )
    groups = [results[start : start + len(changes)] for start in range(0, len(results), len(changes))]
    first, *others = (_collect_evidence(*group) for group in zip(backends, groups, strict=True))
    return {**first, **({"triton_attn": others[0]} if others else {})}


def _request(folder: str, label: str, moe_backend: str, attention_backend: str) -> EngineRequest:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, _VOCAB, (_PROMPTS, _LENGTH), generator=draw).tolist()
    arguments = {
        "moe_backend": moe_backend,
        "attention_backend": attention_backend,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_logprobs": _VOCAB,
    }
    return EngineRequest(folder, prompts, arguments, max_tokens=1, logprobs=_VOCAB, probe=_PROBE, label=label)


def _collect_evidence(attention_backend: str, results: Sequence[EngineResult]) -> Evidence:
    """Return the figures of the engines `reference`, `control` and `tested`, in this order."""
    reference, control, tested = results
    distances = {
        "control": _measure_distances(reference, control),
        "tested": _measure_distances(reference, tested),
    }
    return {
        "vllm": tested.version,
        "moe_backend": tested.log.moe_backend,
        "attention_backend": attention_backend,
        "errors": {result.label: result.error.message for result in results if result.error is not None},
        "kv_cache": {result.label: result.probe for result in results},
        "prompts": len(distances["tested"]),
        **{
            f"{name}_distance": round(statistics.median(values), 4) if values else None
            for name, values in distances.items()
        },
    }


def _measure_distances(first: EngineResult, second: EngineResult) -> list[float]:
    """Return the distance of the distributions of the next token, for each prompt."""
    pairs = zip(first.logprobs or (), second.logprobs or (), strict=False)
    return [measure_total_variation(steps[0], other_steps[0]) for steps, other_steps in pairs]


def measure_total_variation(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return half the summed differences of two distributions (token -> logprob), or 1 if one holds NaN."""
    # The engine's process sends a value that is not finite as text.
    p, q = (
        {token: math.exp(float(value)) for token, value in logprobs.items()} for logprobs in (first, second)
    )
    distance = sum(abs(p.get(token, 0.0) - q.get(token, 0.0)) for token in p.keys() | q.keys()) / 2
    return distance if math.isfinite(distance) else 1.0
