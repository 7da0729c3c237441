"""Tiles of vLLM's Triton kernel for experts: those of its rule, those of its file, and faster ones.

vLLM has a file for a number of experts, an intermediate size, a GPU and a type of weights, with tiles for
some numbers of tokens. Where it has none it warns "Using default MoE config" and takes a rule. For a child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from moedoctor.bench.timing import Check, choose_launches, compare_cold, time_cold
from moedoctor.models.layer_shape import LayerShape
from moedoctor.upstream.moe_backends.backends import call as call_vllm
from moedoctor.upstream.moe_backends.backends import load
from moedoctor.upstream.releases.installed import FUSED_MOE, import_vllm_module

Tiles = Mapping[str, int]
"""vLLM's names (``BLOCK_SIZE_M``, ``num_warps``, …) -> sizes."""

QUANTIZATIONS = ("bf16", "fp8", "fp8-block")
_CHOICES: Mapping[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "GROUP_SIZE_M": (1, 16, 32),
}
_BLOCK = 128
"""Weights that share a scale with ``fp8-block``: a tile may not be longer."""
_GAIN = 0.98
"""A tile is faster if it takes less than this share of the time of the best one before; below is noise."""
_SWEEPS, _ROUNDS = 3, 15


def tune_tiles(
    call: Callable[[], object], shape: LayerShape, quantization: str, tokens: int, device: str, check: Check
) -> dict[str, Any]:
    """Return the tiles of vLLM's rule and file and the fastest found, with microseconds of a call.

    `call` computes the layer with `tokens` tokens, and `check` raises if its result is wrong. ``ratio`` is
    the time with the rule over that with the tiles found, ``file_ratio`` over that with vLLM's file, from
    calls in turn with a cold L2 cache. Tiles that do not compile, do not fit or are wrong are passed over.
    """
    module = load("fused_moe")
    override = import_vllm_module(FUSED_MOE).override_config
    dtype = None if quantization == "bf16" else "fp8_w8a8"
    block = [_BLOCK, _BLOCK] if quantization == "fp8-block" else None
    sizes = {"E": shape.experts, "N": shape.intermediate, "K": shape.hidden, "topk": shape.top_k}
    rule = dict(
        call_vllm(
            module.get_default_config, M=tokens, **sizes, dtype=dtype, block_shape=block, is_marlin=False
        )
    )
    files = module.get_moe_configs(shape.experts, shape.intermediate, dtype, *(block or (None, None)))
    passed_over: list[str] = []

    def take_tiles(tiles: Tiles) -> Callable[[], object]:
        def run() -> object:
            failure: Exception | None = None
            with override(dict(tiles)):  # after an error in it, vLLM would go on with these tiles
                try:
                    return call()
                except Exception as error:
                    failure = error
            raise failure

        return run

    launches = choose_launches(time_cold(take_tiles(rule), device, launches=1, rounds=3).median, most=20)

    def time_tiles(tiles: Tiles) -> float:
        try:
            return time_cold(take_tiles(tiles), device, launches=launches, rounds=3, check=check).median
        except Exception as error:
            if "CUDA error" in str(error):  # the context is lost
                raise
            passed_over.append(type(error).__name__)
            return math.inf

    choices = {
        name: tuple(value for value in values if not block or "BLOCK_SIZE" not in name or value <= _BLOCK)
        for name, values in _CHOICES.items()
    }
    found, tried = search_tiles(rule, time_tiles, choices)
    calls = {"rule": take_tiles(rule), "found": take_tiles(found)}
    if files:
        calls["file"] = take_tiles(files[min(files, key=lambda count: abs(int(count) - tokens))])
    times = compare_cold(calls, device, baseline="rule", launches=launches, rounds=_ROUNDS)
    facts: dict[str, Any] = {
        "file_name": module.get_config_file_name(shape.experts, shape.intermediate, dtype, block),
        "rule": rule,
        "found": dict(found),
        "tried": tried,
        "passed_over": len(passed_over),
    }
    for name, spread in times.times.items():
        facts |= spread.to_row(f"{name}_us", digits=3)
    for name, spread in times.ratios.items():
        ratio = {"found": "ratio", "file": "file_ratio"}[name]
        facts |= {ratio: 1 / spread.median, f"{ratio}_p20": 1 / spread.p80, f"{ratio}_p80": 1 / spread.p20}
    return facts


def search_tiles(
    start: Tiles, time_tiles: Callable[[Tiles], float], choices: Mapping[str, tuple[int, ...]]
) -> tuple[Tiles, int]:
    """Walk from `start` to faster neighbors, one size at a time; return the last and how many were timed.

    A size goes to the next one of `choices` on either side. Raises what `time_tiles` raises.
    """
    best, known = dict(start), {tuple(start.items()): time_tiles(start)}

    def ask(tiles: dict[str, int]) -> float:
        key = tuple(tiles.items())
        if key not in known:
            known[key] = time_tiles(tiles)
        return known[key]

    for _ in range(_SWEEPS):
        before = best
        for name, values in choices.items():
            if name not in best:
                continue
            for beside in (
                max((value for value in values if value < best[name]), default=None),
                min((value for value in values if value > best[name]), default=None),
            ):
                if beside is not None and ask(best | {name: beside}) < _GAIN * ask(best):
                    best = best | {name: beside}
                    break
        if best == before:
            break
    return best, len(known)
