"""Speed of the expert cache on a GPU: decode against the restated cache of vllm#37190, and misses alone.

`decode` and `miss_bandwidth` measure in the calling process and return plain figures. Times are wall-clock
times around synchronised runs, since the host takes part in some variants. A variant whose output is wrong is
not timed.

Every variant runs the same forward, `moedoctor.fixes.moe.forward`, on the same weights and routes; the cache
is the only difference.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from moedoctor.bench.cache.model import PLAIN_BYTES, Host, Inputs, Model, trace_ids
from moedoctor.bench.timing import Comparison, compare_rounds, elapsed
from moedoctor.fixes.eviction import CacheStats, replay, simulate
from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import PrCache, PrRule

# E = experts, T = tokens, K = top_k, H = hidden size, I = intermediate size

Weights = Mapping[str, torch.Tensor]
Layer = Callable[[torch.Tensor], Iterable[tuple[Weights, torch.Tensor]]]
"""Takes ids [T, K]; gives the weights of one group of experts after another, and the rows in them [T, K]."""
Row = dict[str, Any]

RESIDENT, UNCACHED, PR = "resident", "uncached", "pr37190"
CHECKED_STEPS = 12
"""Steps before the timed ones whose results are compared."""
ROUNDS = 10
TOKENS_A_ROUND = 4
_SKIPPED_TOKENS = 910
"""Tokens of the trace before the first timed one: thousands would change the hit rates little. The PR's cache
loses experts at 32 slots and is timed only while it is right; from this token on it is right for long enough.
`pr_wrong_steps` counts how often it is wrong in a longer part of the trace."""
_COUNTED_TOKENS = 2000


@dataclass(frozen=True)
class Variant:
    """One way to use our cache."""

    name: str
    engine: str = "device"
    policy: str = "lfru"
    packed: bool = False
    """The host's tensors are packed."""
    overlap: bool = False
    """Hits are computed while misses are copied."""

    def __str__(self) -> str:
        """Return how the cache is made and called, in the words of its options."""
        options = ["packed"] * self.packed + ["overlap"] * self.overlap
        return " + ".join([self.policy, *options, f"engine {self.engine}"])


VARIANTS = (
    Variant("overlap", policy="aging", packed=True, overlap=True),
    Variant("device"),
    Variant("host", engine="host"),
    Variant("aging", policy="aging"),
    Variant("packed", policy="aging", packed=True),
)
"""The first has every option; the others switch options off. Later ones are left out first if the slots of
all do not fit into the GPU's memory together."""


class SeededPrCache(PrCache):
    """The cache of vllm-project/vllm#37190, restated, that can start in the middle of a trace."""

    def seed(self, calls: torch.Tensor) -> None:
        """Set the state that `calls`, int [calls, T, K], leave behind, by bookkeeping."""
        for call in calls.flatten(1).tolist():
            self.rule.step(sorted(set(call)))
        for slot, expert in enumerate(self.rule.expert_of):
            for name, buffer in self.slots.items():
                if expert >= 0:
                    buffer[slot].copy_(self._host[name][expert])
        self._mapping.copy_(torch.tensor(self.rule.slot_of, dtype=torch.int32))


def _ours(cache: ExpertCache, overlap: bool, ids: torch.Tensor) -> Iterator[tuple[Weights, torch.Tensor]]:
    """Our cache, in groups for a call that may not fit."""
    for part in cache.groups(ids, overlap=overlap):
        yield part.weights, part.slot_ids


def _restated(cache: PrCache, ids: torch.Tensor) -> Iterator[tuple[Weights, torch.Tensor]]:
    """The PR's provider: blocking copies, ids read by the host."""
    yield cache.slots, cache.acquire(ids)


def _uncached(experts: Weights, ids: torch.Tensor) -> Iterator[tuple[Weights, torch.Tensor]]:
    """The forward alone, on `experts` [E, ...] that are on the device."""
    yield experts, ids


class Steps:
    """All layers of a model, computed in one way. A step is a token of each sequence through all of them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: Inputs,
        *,
        captured: bool,
        caches: Sequence[ExpertCache | SeededPrCache] = (),
        bytes_a_miss: int = 0,
    ) -> None:
        """`captured`: on a GPU, a step becomes one CUDA graph. `bytes_a_miss`: on the bus, for one expert."""
        self.caches, self.bytes_a_miss = caches, bytes_a_miss
        self._layers, self._inputs = layers, inputs
        self.out = torch.zeros(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)  # [T, H]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._step = torch.zeros(1, dtype=torch.int64, device=inputs.x.device)
        if captured and inputs.x.is_cuda:
            self._capture()

    def _forward(self, ids: torch.Tensor) -> None:
        """`ids` int32 [layers, T, K]."""
        self.out.zero_()
        for layer, routed in zip(self._layers, ids, strict=True):
            for weights, rows in layer(routed):
                moe_forward(self._inputs.x, weights, rows, self._inputs.topk_weights, out=self.out)

    def _captured_step(self) -> None:
        self._forward(self._inputs.ids.index_select(0, self._step)[0])
        self._step.add_(1)

    def _capture(self) -> None:
        self._forward(self._inputs.ids[0])  # compiles, outside the capture
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._forward(self._inputs.ids[0])  # raises if torch synchronises
            self._graph = torch.cuda.CUDAGraph()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(self._graph):
            self._captured_step()
        torch.cuda.synchronize()

    @property
    def captured(self) -> bool:
        """Whether a step is the replay of one CUDA graph, which cannot contain a host synchronisation."""
        return self._graph is not None

    def seed(self, calls: torch.Tensor) -> None:
        """Set the state that `calls`, int [calls, layers, T, K], leave behind, by bookkeeping."""
        for layer, cache in enumerate(self.caches):
            cache.seed(calls[:, layer])

    def counts(self) -> CacheStats:
        """Return the hits and misses of all layers of our caches."""
        return CacheStats.sum(cache.stats for cache in self.caches if isinstance(cache, ExpertCache))

    def run(self, first: int, count: int) -> float:
        """Return microseconds of a step, over `count` steps from `first` on."""
        self._step.fill_(first)

        def steps() -> None:
            for step in range(first, first + count):
                if self._graph is None:
                    self._forward(self._inputs.ids[step])
                else:
                    self._graph.replay()

        return elapsed(steps, self.out.device) * 1e6 / count

    def output(self, step: int) -> torch.Tensor:
        """Return float32 [T, H] after `step`; overwritten by the next one."""
        self.run(step, 1)
        return self.out


@dataclass(frozen=True)
class Run:
    """What is measured: the shape, the trace, and which part of it."""

    model: Model
    inputs: Inputs
    capacity: int
    batch: int
    start: int
    """Steps that shape the caches before the timed ones."""
    rounds: int
    each: int
    """Steps a round."""
    recorded: bool = False
    """The trace is the one that ships with moedoctor."""

    @classmethod
    def make(
        cls,
        model: Model,
        device: str,
        *,
        batch: int,
        capacity: int,
        rounds: int,
        skip: int | None,
        recorded: bool,
    ) -> Run:
        start = max((_SKIPPED_TOKENS if skip is None else skip) // batch, CHECKED_STEPS)
        each = max(TOKENS_A_ROUND // batch, 1)
        ids = trace_ids(model, batch, start + rounds * each, recorded=recorded)
        return cls(model, Inputs.make(model, ids, device), capacity, batch, start, rounds, each, recorded)

    @property
    def last(self) -> int:
        """The last step."""
        return self.start + self.rounds * self.each - 1

    @cached_property
    def calls(self) -> list[list[list[int]]]:
        """The ids that each layer needs in each step."""
        return _calls(self.inputs.ids)

    def row(self, name: str) -> Row:
        """Return the start of a row of the table."""
        return {"engine": name, "batch": self.batch, "capacity": self.capacity}

    def cached(self, stores: Sequence[ExpertStore], variant: Variant, device: str) -> Steps:
        """Return the model with our caches."""
        options = {"engine": variant.engine, "policy": variant.policy, "device": device}
        caches = [
            ExpertCache(stores[index % len(stores)], self.capacity, **options)  # type: ignore[arg-type]
            for index in range(self.model.layers)
        ]
        return Steps(
            [partial(_ours, cache, variant.overlap) for cache in caches],
            self.inputs,
            captured=variant.engine != "host",
            caches=caches,
            bytes_a_miss=stores[0].nbytes // stores[0].num_experts,
        )

    def restated(self, weights: Sequence[Weights], device: str) -> Steps:
        """Return the model with the PR's caches."""
        caches = [
            SeededPrCache(weights[index % len(weights)], self.capacity, device=device)
            for index in range(self.model.layers)
        ]
        layers = [partial(_restated, cache) for cache in caches]
        return Steps(layers, self.inputs, captured=False, caches=caches)

    def uncached(self, weights: Sequence[Weights], *, captured: bool) -> Steps:
        """Return the model with every expert at hand."""
        layers = [partial(_uncached, weights[index % len(weights)]) for index in range(self.model.layers)]
        return Steps(layers, self.inputs, captured=captured)


def decode(
    device: str,
    *,
    batch: int,
    capacity: int,
    host: Host | None = None,
    model: Model | None = None,
    rounds: int = ROUNDS,
    skip: int | None = None,
    recorded: bool = False,
) -> list[Row]:
    """Decode with the restated cache and ours in turn, on the same trace. Return a row for each variant.

    Ours are as many of `VARIANTS` as the memory holds at once. With as many slots as experts it is
    ``resident``, against the same forward without a cache. `skip`: tokens of the trace that run before the
    timed ones. `recorded`: use the trace that ships with moedoctor, at batch 1, with the first variant alone.
    """
    if recorded and batch != 1:
        raise ValueError(f"batch must be 1 on the recorded trace, got {batch}")
    _release(device)  # what a measurement that failed has left
    model = model or Model()
    host = host or Host.make(model, device)
    run = Run.make(model, device, batch=batch, capacity=capacity, rounds=rounds, skip=skip, recorded=recorded)
    rows: list[Row] = []
    subjects: dict[str, Steps] = {}
    most = max(len(set(call)) for layer in run.calls for call in layer)
    if most <= capacity:
        subjects[PR] = run.restated(host.weights, device)
    else:
        rows.append(run.row(PR) | {"reason": f"a call needs {most} experts: the PR raises an error"})
    variants = (Variant(RESIDENT, "resident"),) if capacity >= model.experts else VARIANTS
    for number, variant in enumerate(variants[:1] if recorded else variants):
        if number and not _room(model, capacity, device):
            rows.append(run.row(variant.name) | {"reason": "no room on the GPU beside the others"})
        else:
            stores = host.packed if variant.packed else host.plain
            subjects[variant.name] = run.cached(stores, variant, device)
    if RESIDENT in subjects:
        weights = [cache.weights for cache in subjects[RESIDENT].caches if isinstance(cache, ExpertCache)]
        subjects[UNCACHED] = run.uncached(weights, captured=True)
    rows += _measure(run, host, device, subjects)
    del subjects
    _release(device)
    return rows


def _measure(run: Run, host: Host, device: str, subjects: Mapping[str, Steps]) -> list[Row]:
    """Time those of `subjects` in turn that compute right, and return a row for each."""
    for subject in subjects.values():
        subject.seed(run.inputs.ids[: run.start - CHECKED_STEPS])
    resident = [{name: tensor.to(device) for name, tensor in layer.items()} for layer in host.weights]
    reference = run.uncached(resident, captured=False)
    right = functools.cache(lambda step: reference.output(step).clone())
    checked = range(run.start - CHECKED_STEPS, run.start)
    timed = {
        name: subject
        for name, subject in subjects.items()
        if all(_same(subject.output(step), right(step)) for step in checked)
    }
    if not timed:
        return [run.row(name) | {"correct": False} for name in subjects]
    before = {name: subject.counts() for name, subject in subjects.items()}
    base = next(name for name in (UNCACHED, PR, *timed) if name in timed)
    position = dict.fromkeys(timed, run.start)

    def measure(name: str) -> float:
        first = position[name]
        position[name] += run.each
        return timed[name].run(first, run.each)

    times = compare_rounds({name: partial(measure, name) for name in timed}, baseline=base, rounds=run.rounds)
    full = run.capacity >= run.model.experts
    best = 1.0 if full else optimum(run)
    rows = []
    for name, subject in subjects.items():
        row = run.row(name)
        row["correct"] = name in timed and _same(subject.out, right(run.last))
        if row["correct"]:
            row |= _figures(times, name, base, run.batch) | {"one_graph": subject.captured}
        if not full and name == PR:
            row |= _pr_traffic(run, host)
        elif not full:
            then, now = before[name], subject.counts()
            row |= _bus(run, host, now.hits - then.hits, now.misses - then.misses, subject.bytes_a_miss)
        if not full:
            row["hit_rate_optimum"] = best
        rows.append(row)
    _add_bounds(rows)
    return rows


def _figures(times: Comparison, name: str, base: str, batch: int) -> Row:
    spread = times.times[name]
    row: Row = spread.rate(batch * 1e6).row("tokens_per_second") | spread.row("step_us")
    if name != base:
        row |= times.ratios[name].rate().row("speedup") | {"against": base}
    return row


def _pr_traffic(run: Run, host: Host) -> Row:
    stats = []
    for calls in run.calls:
        rule = PrRule(run.model.experts, run.capacity)
        replay(calls[: run.start], rule)
        stats.append(replay(calls[run.start :], rule))
    total = CacheStats.sum(stats)
    wrong, counted = pr_wrong_steps(run)
    row = {"wrong_layer_calls": total.wrong, "wrong_steps": wrong, "of_steps": counted}
    return row | _bus(run, host, total.hits, total.misses, run.model.expert_bytes)


def _bus(run: Run, host: Host, hits: int, misses: int, bytes_a_miss: int) -> Row:
    """Return hit rate, gigabytes a step, and the time that they take at the rate of a pinned copy."""
    if not hits + misses:
        return {}
    steps = run.rounds * run.each
    gigabytes = misses * bytes_a_miss / steps * 1e-9
    row = {
        "hit_rate": hits / (hits + misses),
        "misses_a_layer": misses / (steps * run.model.layers),
        "gigabytes_a_step": gigabytes,
    }
    return row if host.pinned_gb_s is None else row | {"bus_us": gigabytes / host.pinned_gb_s * 1e6}


def _add_bounds(rows: list[Row]) -> None:
    """Add what the bus allows: the step if only its bytes took time, and the ratio to the PR's step."""
    pr = next((row for row in rows if row["engine"] == PR and "step_us" in row), None)
    for row in rows:
        if "bus_us" in row and "step_us" in row:
            row["bus_share"] = row["bus_us"] / row["step_us"]
            if pr is not None and row is not pr and row["bus_us"]:
                row["speedup_bound"] = pr["step_us"] / row["bus_us"]


def optimum(run: Run) -> float:
    """Return Belady's hit rate over the whole trace, from empty caches."""
    experts, capacity = run.model.experts, run.capacity
    return CacheStats.sum(
        simulate(calls, num_experts=experts, capacity=capacity, policy="belady") for calls in run.calls
    ).hit_rate


def pr_wrong_steps(run: Run) -> tuple[int, int]:
    """Return (steps in which the PR's rule loses an expert of some layer, steps), from empty caches.

    Over the first 2000 tokens of the trace, or as many as are timed if these are more. The timed steps are
    chosen so that the rule is right there, and do not show how often it is.
    """
    steps = max(_COUNTED_TOKENS // run.batch, run.last + 1)
    wrong = [False] * steps
    for calls in _calls(trace_ids(run.model, run.batch, steps, recorded=run.recorded)):
        rule = PrRule(run.model.experts, run.capacity)
        for step, call in enumerate(calls):
            wrong[step] |= replay((call,), rule).wrong > 0
    return sum(wrong), steps


def _calls(ids: torch.Tensor) -> list[list[list[int]]]:
    """Return the ids [steps, layers, T, K] of each call, by layer and step."""
    calls: list[list[list[int]]] = ids.transpose(0, 1).flatten(2).tolist()
    return calls


def _same(out: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether they are equal except for the order in which groups add up."""
    return bool((out - right).norm() <= 1e-5 * right.norm())


def miss_bandwidth(
    device: str, *, model: Model | None = None, host: Host | None = None, rounds: int = 20
) -> list[Row]:
    """Measure bytes of experts a second if every access is a miss, in turn with a pinned copy of 256 MB.

    A row for ``pinned``, the copy, and for each way of ours; ``of_pinned`` is its share of the copy's rate.
    Raises RuntimeError if a slot does not hold what it should.
    """
    model = model or Model(host_layers=1)
    host = host or Host.make(model, device)
    plain = torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    target = torch.empty_like(plain, device=device)
    batches = [
        torch.arange(start, start + model.top_k, dtype=torch.int32, device=device)[None]
        for start in range(0, model.experts, model.top_k)
    ]  # [1, K] each, no expert twice
    caches = {
        "device": ExpertCache(host.plain[0], model.top_k, engine="device", device=device),
        "packed": ExpertCache(host.packed[0], model.top_k, engine="device", device=device),
        "host": ExpertCache(host.plain[0], model.top_k, engine="host", device=device),
    }

    def load_all(cache: ExpertCache) -> None:
        for ids in batches:
            cache.acquire(ids)

    def seconds_a_byte(call: Callable[[], object], moved: int) -> float:
        return elapsed(call, device) / moved

    measures = {
        "pinned": partial(seconds_a_byte, lambda: target.copy_(plain, non_blocking=True), plain.nbytes)
    }
    for name, cache in caches.items():
        measures[name] = partial(seconds_a_byte, partial(load_all, cache), model.expert_bytes * model.experts)
    for measure in measures.values():
        measure()
    for name, cache in caches.items():
        for ids in batches:
            held = cache.acquire(ids)
            chosen, slots = ids[0].long().cpu(), held.slot_ids[0].long()  # [K] each
            for key, tensor in host.weights[0].items():
                if not torch.equal(held.weights[key][slots].cpu(), tensor[chosen]):
                    raise RuntimeError(f"{name}: a slot differs from the host's expert")
    before = {name: cache.stats.hits for name, cache in caches.items()}
    times = compare_rounds(measures, baseline="pinned", rounds=rounds)
    if any(cache.stats.hits != before[name] for name, cache in caches.items()):
        raise RuntimeError("a call of the miss measurement hit, so the bytes that moved are unknown")
    rows: list[Row] = []
    for name, spread in times.times.items():
        row: Row = {"engine": name, "miss_gb_s": 1e-9 / spread.median}
        rows.append(row | (times.ratios[name].rate().row("of_pinned") if name in caches else {}))
    return rows


def _room(model: Model, capacity: int, device: str) -> bool:
    """Return whether the slots of one more variant fit, and the experts of the reference after them."""
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
