"""The engine tier of MD012: vLLM with an FP8 KV cache that has scales, or none, for values that leave E4M3.

An FP8 cache alone moves the answers of a model. So two engines go with the one that is tested: the same
function with a cache in the model's own type, which is what answers are compared with, and with an FP8 cache
and values that fit into E4M3 at a scale of 1.0, which tells how far rounding alone moves them. What is
compared is the whole distribution of the next token: the share of probability that lies elsewhere (total
variation), 0 for the same and 1 for nothing in common, and its median over the prompts.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moedoctor.faults.quantization.checkpoint_engine import Run
from moedoctor.fixes.moe.checkpoint_scales import kv_scale
from moedoctor.interfaces import Judgement
from moedoctor.reference.checkpoints import Change, Tensors, write_qwen3_moe
from moedoctor.results import CaseVerdict, Evidence, Observation
from moedoctor.upstream.engine.engine import EngineRequest, EngineResult, run_engines
from moedoctor.upstream.engine.offload_engine import need_engine

ATTENTION, TRITON = "FLASH_ATTN", "TRITON_ATTN"
"""The first uses the scales in every release; the second is said not to (vllm#34759)."""
WORSE = 2.5
"""Answers that move so many times as far as those of the control have lost more than rounding."""
FLOOR = 0.1
"""A distance below it is none, however little the control moves."""
BLUNT = 0.35
"""Where rounding alone moves answers so far, nothing can be told."""
_SPREAD = 65536.0
_PARALLEL = 6
_VOCAB, _PROMPTS, _LENGTH = 512, 32, 8
_PROBE = "moedoctor.upstream.engine.probes:kv_cache_scales"
_ATTENTION = "model.layers.0.self_attn"


def in_range(tensors: Tensors, config: dict[str, Any]) -> None:
    """An FP8 KV cache with the scales 1.0, which fit the keys and values of a generated checkpoint."""
    _declare(config)
    _ship(tensors, 1.0, 1.0)


def no_kv_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """MD012: an FP8 KV cache without scales, and values that are `_SPREAD` times as large.

    The output projection takes the factor, a power of two, back: it is the same function.
    """
    _declare(config)
    for name, factor in (("v_proj", _SPREAD), ("o_proj", 1 / _SPREAD)):
        weight = tensors[f"{_ATTENTION}.{name}.weight"]
        tensors[f"{_ATTENTION}.{name}.weight"] = (weight.float() * factor).to(weight.dtype)


def kv_scales(tensors: Tensors, config: dict[str, Any]) -> None:
    """The repair: scales of a calibration over every token of the vocabulary."""
    no_kv_scales(tensors, config)
    x = tensors["model.embed_tokens.weight"].float()  # [V, H]
    x = x * x.square().mean(1, keepdim=True).rsqrt()  # [V, H]
    keys, values = (x @ tensors[f"{_ATTENTION}.{name}_proj.weight"].float().T for name in ("k", "v"))
    head = len(tensors[f"{_ATTENTION}.k_norm.weight"])
    keys = keys.unflatten(1, (-1, 2, head // 2))  # [V, heads, 2, D/2]
    keys = keys * keys.square().mean((2, 3), keepdim=True).rsqrt()  # [V, heads, 2, D/2]
    # Positions turn pairs of a key's elements, which keeps the length of the pair.
    _ship(tensors, kv_scale(keys.norm(dim=2)), kv_scale(values))


def _declare(config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}


def _ship(tensors: Tensors, k_scale: float, v_scale: float) -> None:
    tensors[f"{_ATTENTION}.k_proj.k_scale"] = torch.tensor(k_scale)
    tensors[f"{_ATTENTION}.v_proj.v_scale"] = torch.tensor(v_scale)


def observe(moe_backend: str, repaired: bool, run: Run | None = None) -> Observation:
    """vLLM on the checkpoint without scales or with them, beside the two controls. Runs in the child.

    The repaired one is also given to TRITON_ATTN with controls of its own, for the claim about it. Raises
    UnavailableError where no engine can run.
    """
    if run is None:
        need_engine()
        run = functools.partial(run_engines, parallel=_PARALLEL)
    changes: Mapping[str, Change | None] = {
        "reference": None,
        "control": in_range,
        "tested": kv_scales if repaired else no_kv_scales,
    }
    backends = (ATTENTION, TRITON) if repaired else (ATTENTION,)
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folders = {
            label: write_qwen3_moe(Path(name) / label, scheme="nvfp4", layers=1, vocab=_VOCAB, change=change)
            for label, change in changes.items()
        }
        results = iter(
            run(
                [
                    _request(str(folder), label, moe_backend, attention)
                    for attention in backends
                    for label, folder in folders.items()
                ]
            )
        )
        first, *others = (
            _evidence(attention, {label: next(results) for label in changes}) for attention in backends
        )
    return Observation({**first, **({"triton_attn": others[0]} if others else {})})


def _request(folder: str, label: str, moe_backend: str, attention: str) -> EngineRequest:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, _VOCAB, (_PROMPTS, _LENGTH), generator=draw).tolist()
    arguments = {
        "moe_backend": moe_backend,
        "attention_backend": attention,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_logprobs": _VOCAB,
    }
    return EngineRequest(folder, prompts, arguments, max_tokens=1, logprobs=_VOCAB, probe=_PROBE, label=label)


def _evidence(attention: str, results: Mapping[str, EngineResult]) -> Evidence:
    tested, reference = results["tested"], results["reference"]
    distances = {name: _distances(reference, results[name]) for name in ("control", "tested")}
    return {
        "vllm": tested.version,
        "moe_backend": tested.log.moe_backend,
        "attention_backend": attention,
        "errors": {name: one.error.message for name, one in results.items() if one.error is not None},
        "kv_cache": {name: one.probe for name, one in results.items()},
        "prompts": len(distances["tested"]),
        **{
            f"{name}_distance": round(statistics.median(one), 4) if one else None
            for name, one in distances.items()
        },
    }


def _distances(first: EngineResult, second: EngineResult) -> list[float]:
    """For each prompt the total variation of the two distributions of the next token."""
    pairs = zip(first.logprobs or (), second.logprobs or (), strict=False)
    return [total_variation(one[0], two[0]) for one, two in pairs]


def total_variation(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Half the sum of the differences of two distributions, of token -> logprob; 1 where one is NaN."""
    # What is not finite comes back from the engine's process as text.
    one, two = ({key: math.exp(float(value)) for key, value in each.items()} for each in (first, second))
    distance = sum(abs(one.get(key, 0.0) - two.get(key, 0.0)) for key in one.keys() | two.keys()) / 2
    return distance if math.isfinite(distance) else 1.0


def judge(seen: Evidence) -> Judgement:
    """The verdict on what `observe` gave: an engine that stops, or another cache than was meant, is none."""
    why = doubt(seen)
    if why is not None:
        return Judgement(CaseVerdict.ERROR, "nothing to judge", why)
    distance, control = seen["tested_distance"], seen["control_distance"]
    scales = seen["kv_cache"]["tested"][0]
    figure = (
        f"{distance:.0%} of the probability is moved, {control:.0%} by an FP8 cache alone; scales "
        f"{scales['k_scale']:.4g} and {scales['v_scale']:.4g}"
    )
    worse = distance > max(FLOOR, WORSE * control)
    return Judgement(CaseVerdict.REPRODUCED if worse else CaseVerdict.CLEAN, figure)


def doubt(seen: Evidence) -> str | None:
    """Why the figures decide nothing."""
    for name, message in seen["errors"].items():
        return f"the {name} engine failed: {message}"
    for name in ("reference", "control", "tested"):
        types = {str(one["dtype"]) for one in seen["kv_cache"][name] or ()}
        if not types or any(one.startswith("fp8") == (name == "reference") for one in types):
            return f"the {name} engine has a KV cache of {', '.join(sorted(types)) or 'no known type'}"
    if seen["tested_distance"] is None or seen["control_distance"] is None:
        return "no logprobs came back"
    if seen["control_distance"] > BLUNT:
        return f"an FP8 cache alone moves {seen['control_distance']:.0%} of the probability"
    return None
