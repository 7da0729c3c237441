"""The cost of computing a call in groups of experts and of loading them: the claims about vllm#37190.

`compare_upstream_groups` computes vLLM's layer in groups with every expert resident, `measure_cold_swap`
loads every expert, and `compare_policies` decodes through the PR's cache. By default a layer has the shape of
Qwen3-30B-A3B in bfloat16: 128 experts, hidden size 2048, intermediate size 768.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.bench.cache.model import Model, list_recorded_ids, make_host_weights, measure_pinned_bandwidth
from moedoctor.bench.cache.replay import load_shipped_trace
from moedoctor.bench.timing import Comparison, Spread, compare_rounds, compare_times, measure_seconds
from moedoctor.fixes.eviction import CacheStats, replay, simulate
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import PrCache, PrRule

Calls = Mapping[str, Callable[[], torch.Tensor]]
"""Ways to compute one layer, [T, H], by name; ``1`` computes it in one call."""
EAGER = "_eager_wall_clock"
"""Ends the names of figures that contain the host's launches, which CUDA-graph replays leave out."""
_GROUPS = (2, 4, 8)
_TOKENS = 1024
_BFLOAT16_UNIT = 2.0**-8
"""The most that rounding to bfloat16 changes. A group's result is rounded once, as is the sum after it."""
_EAGER_CALLS, _EAGER_ROUNDS = 10, 9


@dataclass(frozen=True)
class ResidentLayer:
    """One layer with every expert resident, and the inputs of a call of it."""

    weights: dict[str, torch.Tensor]
    """bfloat16 ``w13`` [slots, 2I, H] and ``w2`` [slots, H, I]"""
    experts: torch.Tensor
    """int32 [slots]: the expert in each slot, in random order."""
    ids: torch.Tensor
    """int32 [T, K]"""
    slot_ids: torch.Tensor
    """int32 [T, K]: the slots of `ids`."""
    topk_weights: torch.Tensor
    """float32 [T, K]"""
    x: torch.Tensor
    """bfloat16 [T, H]"""

    @classmethod
    def make(cls, device: str, *, tokens: int, model: Model | None = None) -> ResidentLayer:
        """Random weights, routes and activations; the same ones for the same arguments."""
        model = model or Model()
        weights = {name: tensor.to(device) for name, tensor in make_host_weights(model, device)[0].items()}
        draw = torch.Generator(device).manual_seed(0)
        experts = torch.randperm(model.experts, generator=draw, device=device).int()  # [slots]
        slot_of = experts.argsort().int()  # [E]
        scores = torch.rand(tokens, model.experts, generator=draw, device=device)  # [T, E]
        ids = scores.topk(model.top_k, dim=1).indices.int()  # [T, K]
        topk_weights = torch.rand(tokens, model.top_k, generator=draw, device=device)  # [T, K]
        x = torch.randn(tokens, model.hidden_size, generator=draw, device=device).bfloat16()  # [T, H]
        return cls(weights, experts, ids, slot_of[ids.long()], topk_weights, x)


def compare_upstream_groups(
    device: str, *, tokens: int = _TOKENS, model: Model | None = None
) -> dict[str, Any]:
    """Compare vLLM's `fused_experts` once a group of experts, all resident, with one call of all.

    A group after another adds its bfloat16 result to the sum. CUDA-graph replays are timed in turn, and calls
    without a graph by the wall clock, in columns that end in `EAGER`. Raises UnavailableError without vLLM,
    RuntimeError if the sum of the groups is not the result of one call.
    """
    from moedoctor.upstream.moe_backends.modular_moe import call_fused_experts

    layer = ResidentLayer.make(device, tokens=tokens, model=model)
    slots = len(layer.experts)

    def compute_part(expert_map: torch.Tensor | None) -> torch.Tensor:
        w13, w2 = layer.weights["w13"], layer.weights["w2"]
        return call_fused_experts(layer.x, w13, w2, layer.topk_weights, layer.slot_ids, expert_map)

    def sum_groups(maps: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(layer.x)  # [T, H]
        for expert_map in maps:
            total += compute_part(expert_map)
        return total

    calls: dict[str, Callable[[], torch.Tensor]] = {"1": lambda: compute_part(None)}
    for count in _GROUPS:
        calls[str(count)] = functools.partial(sum_groups, _make_expert_maps(slots, count, device))
    facts = {"kernel": "vLLM's fused_experts", "experts": slots, "tokens": tokens}
    return facts | _compare(calls, device)


def _compare(calls: Calls, device: str) -> dict[str, Any]:
    """Check and time `calls`.

    ``overhead`` is a share of one call's time of the same round. ``us_a_further_group`` is what each group
    after the first adds, in microseconds, from the two medians; it does not depend on how long one call is.
    """
    differences = _check_differences(calls, 2 * max(_GROUPS) * _BFLOAT16_UNIT)
    methods = {"": compare_times(calls, baseline="1", launches=4), EAGER: _time_eagerly(calls, device)}
    rows = []
    for count in _GROUPS:
        name = str(count)
        row: dict[str, Any] = {"groups": count}
        for method, times in methods.items():
            row |= times.ratios[name].to_row(f"overhead{method}", offset=-1.0)
            row |= times.times[name].to_row(f"us{method}")
            further = (times.times[name].median - times.times["1"].median) / (count - 1)
            row[f"us_a_further_group{method}"] = further
        row["largest_difference"] = differences[name]
        rows.append(row)
    one_call_us = {f"one_call_us{method}": times.times["1"].median for method, times in methods.items()}
    return {**one_call_us, "rows": rows}


def _check_differences(calls: Calls, limit: float) -> dict[str, float]:
    """Return the largest difference of each call from ``1``, relative to the largest result.

    Raises RuntimeError if one is above `limit`: what computes something else is not timed.
    """
    whole = calls["1"]()  # [T, H]
    differences = {}
    for name, call in calls.items():
        differences[name] = difference = float((call() - whole).abs().max() / whole.abs().max())
        if not difference <= limit:
            raise RuntimeError(
                f"groups ({name}) differ from one call by {difference:.1e} of the largest result"
            )
    return differences


def _time_eagerly(calls: Calls, device: str) -> Comparison:
    """Time microseconds a call by the wall clock, launches by the host included, without a graph, in turn."""

    def time_call(call: Callable[[], torch.Tensor]) -> float:
        def run_calls() -> None:
            for _ in range(_EAGER_CALLS):
                call()

        return measure_seconds(run_calls, device) / _EAGER_CALLS * 1e6

    measures = {name: functools.partial(time_call, call) for name, call in calls.items()}
    return compare_rounds(measures, baseline="1", rounds=_EAGER_ROUNDS)


def _make_expert_maps(experts: int, groups: int, device: str) -> list[torch.Tensor]:
    """int32 [E] for each group: the expert itself, or -1 for an expert of another group."""
    every = torch.arange(experts, dtype=torch.int32, device=device)  # [E]
    return [torch.where(every // (experts // groups) == group, every, -1) for group in range(groups)]


def measure_cold_swap(device: str, *, rounds: int = 7) -> dict[str, Any]:
    """Run 1024 tokens through a layer of 32 experts with 16, 8 and 4 slots, each expert loaded once."""
    model = Model(experts=32)
    host = make_host_weights(model, device)[0]
    layer = ResidentLayer.make(device, tokens=_TOKENS, model=model)
    total_bytes = sum(tensor.nbytes for tensor in host.values())
    pinned = measure_pinned_bandwidth(device)

    def load_as_pr(slots: int) -> Callable[[torch.Tensor], None]:
        cache = PrCache(host, slots, device=device)
        parts = [
            torch.where(layer.ids // slots == group, layer.ids, -1) for group in range(model.experts // slots)
        ]  # [T, K] each

        def run(out: torch.Tensor) -> None:
            for part in parts:
                slot_ids = torch.where(part >= 0, cache.acquire(layer.ids, part[part >= 0]), -1)  # [T, K]
                moe_forward(layer.x, cache.slots, slot_ids, layer.topk_weights, out=out)

        return run

    def load_as_ours(slots: int) -> Callable[[torch.Tensor], None]:
        cache = ExpertCache(host, slots, device=device, engine="host")

        def run(out: torch.Tensor) -> None:
            for part in cache.groups(layer.ids):
                moe_forward(layer.x, part.weights, part.slot_ids, layer.topk_weights, out=out)

        return run

    def time_run(run: Callable[[torch.Tensor], None]) -> float:
        return measure_seconds(
            lambda: run(torch.zeros(layer.x.shape, device=device)), device
        )  # float32 [T, H]

    rows = []
    for slots in (16, 8, 4):
        for way, empty in (("PR 37190's blocking copies", load_as_pr), ("our host engine", load_as_ours)):
            time_run(empty(slots))  # compiles and warms up
            spread = Spread.summarize([time_run(empty(slots)) for _ in range(rounds)])
            rows.append(
                {
                    "way": f"{way}, {model.experts // slots} groups",
                    **spread.to_row("milliseconds", scale=1e3),
                    "gigabytes_per_second": total_bytes / spread.median / 1e9,
                    "transfer_share": total_bytes / pinned / spread.median,
                }
            )
    return {"pinned_gigabytes_per_second": pinned / 1e9, "bytes": total_bytes, "rows": rows}


def compare_policies(device: str, *, steps: int = 160, rounds: int = 5) -> dict[str, Any]:
    """Decode at batch 1 over the recorded trace, through the PR's cache under LFRU and under LRU in turn."""
    trace = load_shipped_trace()
    model = Model(layers=len(trace.layers), experts=trace.num_experts, top_k=trace.top_k)
    host = make_host_weights(model, device)[0]
    ids = list_recorded_ids(model, steps).to(device)  # [steps, layers, 1, K]
    calls = [trace.list_calls(layer)[:steps] for layer in range(model.layers)]
    x = torch.randn(1, model.hidden_size, device=device, dtype=torch.bfloat16)  # [1, H]
    topk_weights = torch.full((1, model.top_k), 1 / model.top_k, device=device)  # [1, K]

    def decode(policy: str, slots: int) -> float:
        caches = [PrCache(host, slots, device=device, policy=policy) for _ in range(model.layers)]

        def run() -> None:
            for step in ids:
                for cache, of_layer in zip(caches, step, strict=True):
                    moe_forward(x, cache.slots, cache.acquire(of_layer), topk_weights)

        return measure_seconds(run, device)

    rows = []
    for slots in (8, 16):
        decode("lru", slots)  # compiles and warms up
        measures = {policy: functools.partial(decode, policy, slots) for policy in ("lfru", "lru")}
        times = compare_rounds(measures, baseline="lfru", rounds=rounds)
        counted = {
            policy: CacheStats.sum(
                replay(layer, PrRule(model.experts, slots, policy=policy)) for layer in calls
            )
            for policy in measures
        }
        bound = CacheStats.sum(
            simulate(layer, num_experts=model.experts, capacity=slots, policy="belady") for layer in calls
        )
        rows.append(
            {
                "slots": slots,
                **times.ratios["lru"].to_row("lru_over_lfru_time"),
                **{f"{name}_tokens_per_second": steps / times.times[name].median for name in counted},
                **{f"{name}_hit_rate": stats.hit_rate for name, stats in counted.items()},
                "belady_hit_rate": bound.hit_rate,
                **{f"{name}_wrong": stats.wrong / stats.calls for name, stats in counted.items()},
            }
        )
    return {"layers": model.layers, "steps": steps, "rows": rows}
