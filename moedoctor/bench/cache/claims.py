"""What is measured on a GPU for the claims about expert caches: policies, groups and cold loads.

The layer has the shape of Qwen3-30B-A3B in bfloat16: 128 experts, hidden size 2048, intermediate size 768.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moedoctor.bench.timing import Spread, compare_rounds
from moedoctor.fixes.eviction import CacheStats, replay, simulate
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import PrCache

if TYPE_CHECKING:
    from moedoctor.bench.cache.decode import Model

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
_GROUPS = (2, 4, 8)
_TOKENS = 1024
_BFLOAT16_UNIT = 2.0**-8
"""What rounding to bfloat16 changes at most. A group's result is rounded once, and so is the sum after it."""


def policy_speed(device: str, *, steps: int = 160, rounds: int = 5) -> dict[str, Any]:
    """Decode at batch 1 over the recorded trace, through the PR's cache under LFRU and under LRU in turn."""
    from moedoctor.reference.expert_cache import PrRule
    from moedoctor.trace.shipped import shipped_trace

    trace = shipped_trace()
    layers = len(trace.layers)
    host = _host_weights(trace.num_experts)
    ids = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, layers, 1, trace.top_k)[:steps]
    ids = ids.to(device)  # [steps, layers, 1, K]
    x = torch.randn(1, HIDDEN, device=device, dtype=torch.bfloat16)  # [1, H]
    shares = torch.full((1, trace.top_k), 1 / trace.top_k, device=device)  # [1, K]
    rows = []
    for slots in (8, 16):

        def decode(policy: str, slots: int = slots) -> float:
            caches = [PrCache(host, slots, device=device, policy=policy) for _ in range(layers)]
            torch.cuda.synchronize()
            began = time.perf_counter()
            for step in ids:
                for cache, one in zip(caches, step, strict=True):
                    moe_forward(x, cache.slots, cache.acquire(one), shares)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        decode("lru")  # compiles and warms up
        both = compare_rounds(
            {"lfru": lambda: decode("lfru"), "lru": lambda: decode("lru")}, baseline="lfru", rounds=rounds
        )
        calls = [trace.calls(layer)[:steps] for layer in range(layers)]
        counted = {
            policy: _total([replay(one, PrRule(trace.num_experts, slots, policy=policy)) for one in calls])
            for policy in ("lfru", "lru")
        }
        bound = _total(
            [simulate(one, num_experts=trace.num_experts, capacity=slots, policy="belady") for one in calls]
        )
        rows.append(
            {
                "slots": slots,
                **_spread("lru_over_lfru_time", both.ratios["lru"]),
                "lfru_tokens_per_second": steps / both.times["lfru"].median,
                "lru_tokens_per_second": steps / both.times["lru"].median,
                "lfru_hit_rate": counted["lfru"].hit_rate,
                "lru_hit_rate": counted["lru"].hit_rate,
                "belady_hit_rate": bound.hit_rate,
                "lfru_wrong": counted["lfru"].wrong / counted["lfru"].calls,
                "lru_wrong": counted["lru"].wrong / counted["lru"].calls,
            }
        )
    return {"layers": layers, "steps": steps, "rows": rows}


def upstream_groups(device: str, *, tokens: int = _TOKENS, model: Model | None = None) -> dict[str, Any]:
    """vLLM's `fused_experts` once a group of experts, all resident; shape and method of `our_groups`.

    A group after another adds its bfloat16 result to the sum. A row a number of groups: ``overhead`` and
    ``us`` of CUDA-graph replays, and both by the wall clock of eager calls. Raises UnavailableError without
    vLLM, RuntimeError where the sum of the groups is not the result of one call.
    """
    from moedoctor.bench.cache import groups as bench
    from moedoctor.upstream.moe_backends.modular_moe import fused_experts

    layer = bench.ResidentLayer.make(device, tokens=tokens, model=model)
    slots = len(layer.experts)

    def part_of(expert_map: torch.Tensor | None) -> torch.Tensor:
        w13, w2 = layer.weights["w13"], layer.weights["w2"]
        return fused_experts(layer.x, w13, w2, layer.shares, layer.slot_ids, expert_map)

    def grouped(maps: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(layer.x)  # [T, H]
        for one in maps:
            total += part_of(one)
        return total

    calls: dict[str, Callable[[], torch.Tensor]] = {"1": lambda: part_of(None)}
    for groups in _GROUPS:
        calls[str(groups)] = functools.partial(grouped, _expert_maps(slots, groups, device))
    whole = part_of(None)  # [T, H]
    differences = bench.checked_differences(calls, whole, 2 * max(_GROUPS) * _BFLOAT16_UNIT)
    methods = {"": bench.graph_rounds(calls), bench.EAGER: bench.eager_rounds(calls)}
    rows = [
        {
            "groups": groups,
            **{
                key: value
                for method, times in methods.items()
                for key, value in bench.added_columns(times, str(groups), groups, method).items()
            },
            "largest_difference": differences[str(groups)],
        }
        for groups in _GROUPS
    ]
    return {
        "kernel": "vLLM's fused_experts",
        "experts": slots,
        "tokens": tokens,
        **{f"one_call_us{method}": times.times["1"].median for method, times in methods.items()},
        "rows": rows,
    }


def our_groups(device: str, *, tokens: int = _TOKENS, model: Model | None = None) -> dict[str, Any]:
    """Our layer once a group of experts, all resident; 1024 tokens and 128 experts where nothing is said.

    CUDA-graph replays, and the wall clock of eager calls beside them.
    """
    from moedoctor.bench.cache.decode import Model
    from moedoctor.bench.cache.groups import group_cost

    model = model or Model(host_layers=1)
    found = group_cost(device, tokens=tokens, groups=_GROUPS, model=model, eager=True)
    return {"kernel": "our GroupedForward", "experts": model.experts, **found}


def cold_swap(device: str, *, rounds: int = 7) -> dict[str, Any]:
    """A layer of 32 experts through 16, 8 and 4 slots from empty: 1024 tokens, each expert loaded once."""
    host = _host_weights(32)
    x = torch.randn(_TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)  # [T, H]
    shares, ids = _routing(32, _TOKENS, device)
    total_bytes = sum(one.nbytes for one in host.values())
    pinned = pinned_bandwidth(device)
    rows = []
    for slots in (16, 8, 4):
        for way, run in (("PR 37190's blocking copies", _cold_pr), ("our host engine", _cold_ours)):
            run(host, slots, x, shares, ids)  # compiles and warms up
            spread = Spread.of([run(host, slots, x, shares, ids) for _ in range(rounds)])
            rows.append(
                {
                    "way": f"{way}, {32 // slots} groups",
                    **_spread("milliseconds", spread, 1e3),
                    "gigabytes_per_second": total_bytes / spread.median / 1e9,
                    "transfer_share": total_bytes / pinned / spread.median,
                }
            )
    return {"pinned_gigabytes_per_second": pinned / 1e9, "bytes": total_bytes, "rows": rows}


def pinned_bandwidth(device: str) -> float:
    """Bytes a second of asynchronous copies from pinned memory, the best of ten of 256 MB."""
    source = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return source.nbytes / best


def _cold_pr(
    host: Mapping[str, torch.Tensor], slots: int, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
) -> float:
    cache = PrCache(host, slots, device=str(x.device))
    parts = [torch.where(ids // slots == group, ids, -1) for group in range(32 // slots)]  # [T, K] each
    torch.cuda.synchronize()
    began = time.perf_counter()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
    for part in parts:
        slot_ids = torch.where(part >= 0, cache.acquire(ids, part[part >= 0]), -1)  # [T, K]
        moe_forward(x, cache.slots, slot_ids, shares, out=total)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _cold_ours(
    host: Mapping[str, torch.Tensor], slots: int, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor
) -> float:
    cache = ExpertCache(host, slots, device=x.device, engine="host")
    torch.cuda.synchronize()
    began = time.perf_counter()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)  # [T, H]
    for part in cache.groups(ids):
        moe_forward(x, part.weights, part.slot_ids, shares, out=total)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _spread(name: str, spread: Spread, factor: float = 1.0) -> dict[str, float]:
    return {
        name: spread.median * factor,
        f"{name}_p20": spread.p20 * factor,
        f"{name}_p80": spread.p80 * factor,
    }


def _total(stats: list[CacheStats]) -> CacheStats:
    return CacheStats(
        *(sum(getattr(one, key) for one in stats) for key in ("calls", "hits", "misses", "wrong"))
    )


def _host_weights(experts: int) -> dict[str, torch.Tensor]:
    """``w13`` [E, 2I, H] and ``w2`` [E, H, I], bfloat16, pinned."""
    shapes = {"w13": (experts, 2 * INTERMEDIATE, HIDDEN), "w2": (experts, HIDDEN, INTERMEDIATE)}
    return {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16, pin_memory=True) for name, shape in shapes.items()
    }


def _routing(experts: int, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares float32 [T, K], ids int32 [T, K])"""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))  # [T, E]
    shares, ids = logits.softmax(1).topk(TOP_K)  # [T, K] each
    return (shares / shares.sum(1, keepdim=True)).to(device), ids.int().to(device)


def _expert_maps(experts: int, groups: int, device: str) -> list[torch.Tensor]:
    """int32 [E] a group: the expert itself, or -1 for one of another group."""
    every = torch.arange(experts, dtype=torch.int32, device=device)  # [E]
    return [torch.where(every // (experts // groups) == one, every, -1) for one in range(groups)]
