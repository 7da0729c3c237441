"""Speed of the expert cache on a GPU: decode against the restated cache of vllm#37190, misses, groups.

Each function measures in the calling process and returns plain figures. Times are of wall clocks around
synchronised runs where the host takes part, and of CUDA-graph replays elsewhere. A variant whose output is
wrong is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moedoctor.bench.expert_cache_decode import (
    Caches,
    Inputs,
    Model,
    Steps,
    cached,
    host_weights,
    restated,
    uncached,
)
from moedoctor.bench.timing import Comparison, Spread, compare_rounds, compare_times
from moedoctor.fixes.eviction import simulate
from moedoctor.fixes.expert_cache import ExpertStore
from moedoctor.fixes.moe_forward import group_bound, moe_forward

CAPACITIES = (16, 32, 64, 128)
BATCHES = (1, 8)
_ROUNDS, _TOKENS_A_ROUND = 10, 4
_CHECKED_STEPS = 12


@dataclass(frozen=True)
class Host:
    """What several measurements share: host weights, and their stores as they are and packed."""

    weights: list[dict[str, torch.Tensor]]
    plain: list[ExpertStore]
    packed: list[ExpertStore]

    @classmethod
    def make(cls, model: Model, device: str) -> Host:
        weights = host_weights(model, device)
        return cls(
            weights, [ExpertStore(one) for one in weights], [ExpertStore(one, packed=True) for one in weights]
        )


def decode(
    device: str,
    *,
    batch: int,
    capacity: int,
    host: Host | None = None,
    model: Model | None = None,
    rounds: int = _ROUNDS,
    warm: int | None = None,
) -> list[dict[str, Any]]:
    """Decode with the restated cache and ours in turn, on the same trace: a row a variant.

    Ours are ``device``, ``packed`` (the same on packed host tensors, hits computed during copies) and
    ``host``; with as many slots as
    experts ``resident``, against the same forward without a cache.
    """
    model = model or Model()
    host = host or Host.make(model, device)
    warm, each = _warm_steps(batch, capacity) if warm is None else warm, _steps_a_round(batch)
    inputs = Inputs.make(model, batch, warm + rounds * each, device)
    full = capacity >= model.experts
    caches: dict[str, Caches] = {}
    for name in ("resident",) if full else ("device", "packed", "host"):
        stores = host.packed if name == "packed" else host.plain
        engine = "device" if name == "packed" else name
        caches[name] = cached(model, stores, capacity, engine, device, overlap=name == "packed")
    layers = {name: one.layers for name, one in caches.items()}
    if full:
        layers["uncached"] = uncached(model, [one.weights for one in caches["resident"].caches])
    rows: list[dict[str, Any]] = []
    most = max(len(call) for call in _needed(inputs))
    if most <= capacity:
        layers["pr37190"] = restated(model, host.weights, capacity, device)
    else:
        reason = f"a call needs {most} experts: the PR raises an error"
        rows.append({"engine": "pr37190", "batch": batch, "capacity": capacity, "reason": reason})
    steps = {
        name: Steps(name, one, inputs, captured=name not in ("host", "pr37190"))
        for name, one in layers.items()
    }
    right, wrong = _right(model, inputs, host.weights, device), []
    for name, variant in steps.items():
        checked = range(max(warm - _CHECKED_STEPS, 0), warm)
        variant.run(0, checked.start)
        for step in checked:
            variant.run(step, 1)
            if not _same(variant.out, right(step)):
                wrong.append(name)
                break
    before = {name: one.counts() for name, one in caches.items()}
    timed = {name: one for name, one in steps.items() if name not in wrong}
    base = next(name for name in ("uncached", "pr37190", *timed) if name in timed)
    times = _in_turn(timed, base, warm, rounds, each)
    last = warm + rounds * each - 1
    for name, variant in steps.items():
        row: dict[str, Any] = {"engine": name, "batch": batch, "capacity": capacity}
        row["correct"] = name in timed and _same(variant.out, right(last))
        if row["correct"]:
            row |= _figures(times, name, base, batch) | {"one_graph": variant.captured}
            if name in caches and not full:
                step_us = times.times[name].median
                row |= _traffic(caches[name].counts(), before[name], model, step_us, rounds * each)
        rows.append(row)
    return rows


def expected(device: str, *, batch: int, capacity: int, model: Model | None = None) -> dict[str, Any]:
    """Hit rates of every policy on the trace of `decode`, from bookkeeping alone, warm steps included."""
    model = model or Model()
    steps = _warm_steps(batch, capacity) + _ROUNDS * _steps_a_round(batch)
    inputs = Inputs.make(model, batch, steps, device)
    by_layer = inputs.ids.transpose(0, 1).flatten(2).tolist()
    row: dict[str, Any] = {"batch": batch, "capacity": capacity}
    for policy in ("lru", "lfu", "lfru", "belady"):
        stats = [
            simulate(calls, num_experts=model.experts, capacity=capacity, policy=policy) for calls in by_layer
        ]
        accesses = sum(one.accesses for one in stats)
        row[f"hit_rate_{policy}"] = sum(one.hits for one in stats) / accesses
    return row


def group_cost(device: str, *, tokens: int = 1024, groups: Sequence[int] = (2, 4, 8)) -> dict[str, Any]:
    """What computing a call in groups adds, with every expert resident: `groups` calls against one."""
    model = Model(host_layers=1)
    weights = {name: one.to(device) for name, one in host_weights(model, device)[0].items()}
    draw = torch.Generator(device).manual_seed(0)
    scores = torch.rand(tokens, model.experts, generator=draw, device=device)  # [T, E]
    ids = scores.topk(model.top_k, dim=1).indices.int()  # [T, K]
    shares = torch.rand(tokens, model.top_k, generator=draw, device=device)  # [T, K]
    x = torch.randn(tokens, model.hidden, generator=draw, device=device).bfloat16()  # [T, H]
    group_of = torch.randperm(model.experts, generator=draw, device=device).int()  # [E]

    def call(count: int) -> torch.Tensor:
        if count == 1:
            return moe_forward(x, weights, ids, shares)
        out = torch.zeros(x.shape, dtype=torch.float32, device=device)  # [T, H]
        group = group_of[ids] % count  # [T, K]
        for index in range(count):
            moe_forward(x, weights, torch.where(group == index, ids, -1), shares, out=out)
        return out

    whole = call(1)
    calls = {str(count): (lambda count=count: call(count)) for count in (1, *groups)}
    times = compare_times(calls, baseline="1", launches=4)
    rows = []
    for count in groups:
        difference = float((call(count) - whole).abs().max() / whole.abs().max())
        rows.append(
            {
                "groups": count,
                **_spread("overhead", times.ratios[str(count)], offset=-1),
                **_spread("us", times.times[str(count)]),
                "largest_difference": difference,
            }
        )
    return {
        "tokens": tokens,
        "one_call_us": times.times["1"].median,
        "bound": group_bound(model.top_k),
        "rows": rows,
    }


def _warm_steps(batch: int, capacity: int) -> int:
    """Until a cache is in its usual state: the larger, the more experts must have been seen."""
    return max(min(100 * capacity // 64, 100) // batch, _CHECKED_STEPS)


def _steps_a_round(batch: int) -> int:
    return max(_TOKENS_A_ROUND // batch, 1)


def _in_turn(steps: Mapping[str, Steps], base: str, warm: int, rounds: int, each: int) -> Comparison:
    position = dict.fromkeys(steps, warm)

    def measure(name: str) -> Callable[[], float]:
        def one() -> float:
            first = position[name]
            position[name] += each
            return steps[name].run(first, each)

        return one

    return compare_rounds({name: measure(name) for name in steps}, baseline=base, rounds=rounds)


def _figures(times: Comparison, name: str, base: str, batch: int) -> dict[str, Any]:
    spread = times.times[name]
    row: dict[str, Any] = {"tokens_per_second": batch * 1e6 / spread.median, **_spread("step_us", spread)}
    if name != base:
        speedup = Spread.of([1 / one for one in _values(times.ratios[name])])
        row |= _spread("speedup", speedup) | {"against": base}
    return row


def _traffic(
    after: tuple[int, int], before: tuple[int, int], model: Model, step_us: float, steps: int
) -> dict[str, Any]:
    hits, misses = after[0] - before[0], after[1] - before[1]
    return {
        "hit_rate": hits / max(hits + misses, 1),
        "misses_a_call": misses / (steps * model.layers),
        "expert_gb_s": misses / steps * model.expert_bytes / step_us * 1e-3,
    }


def _right(
    model: Model, inputs: Inputs, host: list[dict[str, torch.Tensor]], device: str
) -> Callable[[int], torch.Tensor]:
    """The output of a step with every expert at hand."""
    full = [{name: one.to(device) for name, one in weights.items()} for weights in host]
    reference = Steps("right", uncached(model, full), inputs, captured=False)

    def at(step: int) -> torch.Tensor:
        reference.run(step, 1)
        return reference.out

    return at


def _same(out: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the order in which groups add up."""
    return bool((out - right).norm() <= 1e-5 * right.norm())


def _needed(inputs: Inputs) -> list[set[int]]:
    return [set(call) for step in inputs.ids.flatten(2).tolist() for call in step]


def _values(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.p20, spread.p80


def _spread(name: str, spread: Spread, offset: float = 0.0) -> dict[str, float]:
    return {
        name: spread.median + offset,
        f"{name}_p20": spread.p20 + offset,
        f"{name}_p80": spread.p80 + offset,
    }
