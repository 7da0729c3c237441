"""Speed of the expert cache on a GPU: decode against the restated cache of vllm#37190.

`decode` measures in the calling process and returns plain figures. Times are of wall clocks around
synchronised runs, since the host takes part in some variants. A variant whose output is wrong is not timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moedoctor.bench.cache.decode import (
    Caches,
    Layer,
    Model,
    Restated,
    Steps,
    Variant,
    cached,
    uncached,
)
from moedoctor.bench.cache.run import CHECKED_STEPS, Host, Run, pr_wrong_steps
from moedoctor.bench.cache.traffic import add_bounds, optimum, pr_counts, traffic_of
from moedoctor.bench.timing import Comparison, Spread, compare_rounds

__all__ = ["VARIANTS", "Host", "decode", "spread_of"]

VARIANTS = (
    Variant("overlap", policy="aging", packed=True, overlap=True),
    Variant("device"),
    Variant("host", engine="host"),
    Variant("aging", policy="aging"),
    Variant("packed", policy="aging", packed=True),
)
"""The first has everything; those after it take it apart. In the order in which they are left out where
their slots do not fit into the GPU's memory beside one another."""
RESIDENT, UNCACHED, PR = "resident", "uncached", "pr37190"
_ROUNDS = 10


def decode(
    device: str,
    *,
    batch: int,
    capacity: int,
    host: Host | None = None,
    model: Model | None = None,
    rounds: int = _ROUNDS,
    seen: int | None = None,
    recorded: bool = False,
) -> list[dict[str, Any]]:
    """Decode with the restated cache and ours in turn, on the same trace: a row a variant.

    Ours are `VARIANTS`, as many as the memory holds at once; with as many slots as experts ``resident``,
    against the same forward without a cache. `seen`: tokens of the trace before those that are timed.
    `recorded`: the trace that ships with moedoctor, at batch 1, through the first variant alone.
    """
    if recorded and batch != 1:
        raise ValueError(f"batch must be 1 on the recorded trace, got {batch}")
    _release(device)  # what a measurement that failed has left
    model = model or Model()
    host = host or Host.make(model, device)
    run = Run.make(model, device, batch=batch, capacity=capacity, rounds=rounds, seen=seen, recorded=recorded)
    rows: list[dict[str, Any]] = []
    layers: dict[str, list[Layer]] = {}
    seeded: list[Caches | Restated] = []
    most = max(len(set(call)) for step in run.inputs.ids.flatten(2).tolist() for call in step)
    if most <= capacity:
        pr = Restated.make(model, host.weights, capacity, device)
        layers[PR] = pr.layers
        seeded.append(pr)
    else:
        reason = f"a call needs {most} experts: the PR raises an error"
        rows.append({"engine": PR, "batch": batch, "capacity": capacity, "reason": reason})
    caches: dict[str, Caches] = {}
    variants = (Variant(RESIDENT, "resident"),) if capacity >= model.experts else VARIANTS
    if recorded:
        variants = variants[:1]
    for number, variant in enumerate(variants):
        if number and not _room(model, capacity, device):
            reason = "no room on the GPU beside the others"
            rows.append({"engine": variant.name, "batch": batch, "capacity": capacity, "reason": reason})
            continue
        stores = host.packed if variant.packed else host.plain
        caches[variant.name] = one = cached(model, stores, capacity, variant, device)
        layers[variant.name] = one.layers
    if RESIDENT in caches:
        layers[UNCACHED] = uncached(model, [one.weights for one in caches[RESIDENT].caches])
    rows += _measured(run, host, device, layers, caches, seeded)
    del layers, caches, seeded
    _release(device)
    return rows


def _measured(
    run: Run,
    host: Host,
    device: str,
    layers: Mapping[str, list[Layer]],
    caches: Mapping[str, Caches],
    others: list[Caches | Restated],
) -> list[dict[str, Any]]:
    steps = {name: Steps(one, run.inputs, captured=name not in ("host", PR)) for name, one in layers.items()}
    for mine in (*caches.values(), *others):
        mine.seed(run.inputs.ids[: run.start - CHECKED_STEPS])
    right = _right(run, host.weights, device)
    wrong = [
        name
        for name, one in steps.items()
        if not all(
            _same(_after(one, step), right(step)) for step in range(run.start - CHECKED_STEPS, run.start)
        )
    ]
    before = {name: one.counts() for name, one in caches.items()}
    timed = {name: one for name, one in steps.items() if name not in wrong}
    if not timed:
        return [_row(name, run) | {"correct": False} for name in steps]
    base = next(name for name in (UNCACHED, PR, *timed) if name in timed)
    times = _in_turn(timed, base, run)
    best = optimum(run) if run.capacity < run.model.experts else 1.0
    rows = []
    for name, one in steps.items():
        row = _row(name, run)
        row["correct"] = name in timed and _same(one.out, right(run.last))
        if row["correct"]:
            row |= _figures(times, name, base, run.batch) | {"one_graph": one.captured}
        if run.capacity < run.model.experts:
            row |= _traffic(run, name, caches, before, host) | {"hit_rate_optimum": best}
        rows.append(row)
    add_bounds(rows, PR)
    return rows


def _row(name: str, run: Run) -> dict[str, Any]:
    return {"engine": name, "batch": run.batch, "capacity": run.capacity}


def _after(steps: Steps, step: int) -> torch.Tensor:
    steps.run(step, 1)
    return steps.out


def _in_turn(steps: Mapping[str, Steps], base: str, run: Run) -> Comparison:
    position = dict.fromkeys(steps, run.start)

    def measure(name: str) -> Callable[[], float]:
        def one() -> float:
            first = position[name]
            position[name] += run.each
            return steps[name].run(first, run.each)

        return one

    return compare_rounds({name: measure(name) for name in steps}, baseline=base, rounds=run.rounds)


def _figures(times: Comparison, name: str, base: str, batch: int) -> dict[str, Any]:
    spread = times.times[name]
    slow, fast = (batch * 1e6 / one for one in (spread.p80, spread.p20))
    row: dict[str, Any] = {
        "tokens_per_second": batch * 1e6 / spread.median,
        "tokens_per_second_p20": slow,
        "tokens_per_second_p80": fast,
        **spread_of("step_us", spread),
    }
    if name != base:
        ratio = times.ratios[name]
        row |= {"speedup": 1 / ratio.median, "speedup_p20": 1 / ratio.p80, "speedup_p80": 1 / ratio.p20}
        row["against"] = base
    return row


def _traffic(
    run: Run, name: str, caches: Mapping[str, Caches], before: Mapping[str, tuple[int, int]], host: Host
) -> dict[str, Any]:
    if name in caches:
        now, then = caches[name].counts(), before[name]
        moved = (now[0] - then[0], now[1] - then[1], caches[name].bytes_a_miss)
        return traffic_of(run, *moved, host.pinned_gb_s)
    pr = pr_counts(run)
    row = traffic_of(run, pr.hits, pr.misses, run.model.expert_bytes, host.pinned_gb_s)
    wrong, counted = pr_wrong_steps(run)
    return {"wrong_layer_calls": pr.wrong, "wrong_steps": wrong, "of_steps": counted} | row


def _right(run: Run, host: list[dict[str, torch.Tensor]], device: str) -> Callable[[int], torch.Tensor]:
    """The output of a step with every expert at hand."""
    full = [{name: one.to(device) for name, one in weights.items()} for weights in host]
    reference = Steps(uncached(run.model, full), run.inputs, captured=False)
    known: dict[int, torch.Tensor] = {}

    def at(step: int) -> torch.Tensor:
        if step not in known:
            known[step] = _after(reference, step).clone()
        return known[step]

    return at


def _same(out: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the order in which groups add up."""
    return bool((out - right).norm() <= 1e-5 * right.norm())


def _room(model: Model, capacity: int, device: str) -> bool:
    """Whether the slots of one more variant fit, and the experts of the reference after them."""
    if torch.device(device).type != "cuda":
        return True
    slots, reference = model.layers * capacity, model.host_layers * model.experts
    needed = (slots + reference) * model.expert_bytes + (4 << 30)
    free, _ = torch.cuda.mem_get_info(device)
    cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bool(needed <= free + cached_bytes)


def _release(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def spread_of(name: str, spread: Spread, offset: float = 0.0) -> dict[str, float]:
    """Median and percentiles as evidence tables read them."""
    return {
        name: spread.median + offset,
        f"{name}_p20": spread.p20 + offset,
        f"{name}_p80": spread.p80 + offset,
    }
