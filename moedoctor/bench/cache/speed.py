"""Speed of the expert cache on a GPU: decode against the restated cache of vllm#37190, and misses alone.

`decode` and `miss_bandwidth` measure in the calling process and return plain figures. Times are wall-clock
times around synchronised runs, since the host takes part in some variants. A variant whose output is wrong is
not timed.

Every variant runs the same forward, `moedoctor.fixes.moe.forward`, on the same weights and routes; the cache
is the only difference. Layers have slots of their own, while `Model.host_layers` sets of host tensors serve
all of them in turn, which saves host memory and changes no transfer.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moedoctor.bench.timing import Comparison, Spread, compare_rounds
from moedoctor.fixes.eviction import CacheStats, replay, simulate
from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import PrCache, PrRule
from moedoctor.trace.format import shipped_trace
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

# E = experts, T = tokens, K = top_k, H = hidden size, I = intermediate size

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes x [T, H], ids [T, K], topk_weights [T, K] and out float32 [T, H], and adds its result to `out`."""
Row = dict[str, Any]

RESIDENT, UNCACHED, PR = "resident", "uncached", "pr37190"
CHECKED_STEPS = 12
"""Steps before the timed ones whose results are compared."""
_ROUNDS = 10
_TOKENS_A_ROUND = 4
_SKIPPED_TOKENS = 910
"""Tokens of the trace before the first timed one: thousands would change the hit rates little. The PR's cache
loses experts at 32 slots and is timed only while it is right; from this token on it is right for long enough.
`pr_wrong_steps` counts how often it is wrong in a longer part of the trace."""
_COUNTED_TOKENS = 2000
_PLAIN_BYTES = 1 << 28


@dataclass(frozen=True)
class Model:
    """The shape that is measured; by default Qwen3-30B-A3B's."""

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    hidden_size: int = 2048
    intermediate_size: int = 768
    host_layers: int = 4
    skew: float = 1.0
    """Of the Zipf distribution that routes."""
    drift: float = 0.1
    seed: int = 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's two matrices in bfloat16."""
        return 2 * 3 * self.hidden_size * self.intermediate_size


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


@dataclass(frozen=True)
class Host:
    """What several measurements share: host weights, their stores as they are and packed, the bus."""

    weights: list[dict[str, torch.Tensor]]
    plain: list[ExpertStore]
    packed: list[ExpertStore]
    pinned_gb_s: float | None
    """Of a plain pinned copy; None without a GPU."""

    @classmethod
    def make(cls, model: Model, device: str) -> Host:
        weights = host_weights(model, device)
        return cls(
            weights,
            [ExpertStore(layer) for layer in weights],
            [ExpertStore(layer, packed=True) for layer in weights],
            pinned_bandwidth(device) / 1e9 if torch.device(device).type == "cuda" else None,
        )


@dataclass(frozen=True)
class Inputs:
    """Routes and activations of a number of steps, on the device."""

    ids: torch.Tensor
    """int32 [steps, layers, T, K]"""
    topk_weights: torch.Tensor
    """float32 [T, K]"""
    x: torch.Tensor
    """bfloat16 [T, H]"""

    @classmethod
    @functools.lru_cache(maxsize=1)
    def make(cls, model: Model, batch: int, steps: int, device: str) -> Inputs:
        """Zipf routes with drift, `batch` tokens a step."""
        return cls._with(model, zipf_ids(model, batch, steps), device)

    @classmethod
    def recorded(cls, model: Model, steps: int, device: str) -> Inputs:
        """The trace that ships with moedoctor, one token a step. Raises ValueError as `recorded_ids`."""
        return cls._with(model, recorded_ids(model, steps), device)

    @classmethod
    def _with(cls, model: Model, ids: torch.Tensor, device: str) -> Inputs:
        batch = ids.shape[2]
        draw = torch.Generator(device).manual_seed(model.seed)
        topk_weights = torch.rand(batch, model.top_k, generator=draw, device=device)  # [T, K]
        x = torch.randn(batch, model.hidden_size, generator=draw, device=device).bfloat16()  # [T, H]
        return cls(ids.to(device).contiguous(), topk_weights / topk_weights.sum(1, keepdim=True), x)


def zipf_ids(model: Model, batch: int, steps: int) -> torch.Tensor:
    """int32 [steps, layers, T, K] on the CPU; fewer steps of one sequence are the start of more steps."""
    rows = steps * batch
    shape = {"experts": model.experts, "top_k": model.top_k, "layers": model.layers, "rows": rows}
    settings = ZipfSettings(**shape, streams=batch, skew=model.skew, drift=model.drift, seed=model.seed)
    ids = torch.tensor(zipf_trace(settings).topk_ids, dtype=torch.int32)
    return ids.view(steps, batch, model.layers, model.top_k).transpose(1, 2).contiguous()


def recorded_ids(model: Model, steps: int) -> torch.Tensor:
    """int32 [steps, layers, 1, K] on the CPU, of the trace that ships with moedoctor.

    A model with more layers gets the trace's layers again, from further on in the text. Raises ValueError for
    a model with other experts or top-k, or if the trace is too short.
    """
    trace = shipped_trace()
    layers, repeats = len(trace.layers), -(-model.layers // len(trace.layers))
    if (model.experts, model.top_k) != (trace.num_experts, trace.top_k) or steps > trace.rows:
        raise ValueError(
            f"the trace has {trace.rows} tokens of {trace.num_experts} experts, top-{trace.top_k}"
        )
    ids = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, layers, 1, model.top_k)
    apart = (trace.rows - steps) // max(repeats - 1, 1)
    parts = [ids[start * apart : start * apart + steps] for start in range(repeats)]
    return torch.cat(parts, dim=1)[:, : model.layers]


def host_weights(model: Model, device: str) -> list[dict[str, torch.Tensor]]:
    """`host_layers` layers of random bfloat16 experts in pinned memory; drawn on `device`."""
    pin = torch.device(device).type == "cuda"
    layers = []
    for layer in range(model.host_layers):
        draw = torch.Generator(device).manual_seed(model.seed + layer)
        weights = {}
        for name, rows, columns in (
            ("w13", 2 * model.intermediate_size, model.hidden_size),
            ("w2", model.hidden_size, model.intermediate_size),
        ):
            values = torch.randn(model.experts, rows, columns, generator=draw, device=device) / columns**0.5
            pinned = torch.empty(values.shape, dtype=torch.bfloat16, pin_memory=pin)
            weights[name] = pinned.copy_(values)  # [E, rows, columns]
        layers.append(weights)
    return layers


@dataclass
class Subject:
    """All layers of a model as they are computed in one way."""

    layers: list[Layer]
    caches: Sequence[Any] = ()
    """`ExpertCache` or `SeededPrCache` of each layer; empty without a cache."""
    bytes_a_miss: int = 0
    """Bytes that the bus carries for one expert."""

    def seed(self, calls: torch.Tensor) -> None:
        """Set the state that `calls`, int [calls, layers, T, K], leave behind, by bookkeeping."""
        for layer, cache in enumerate(self.caches):
            cache.seed(calls[:, layer])

    def counts(self) -> tuple[int, int]:
        """Return (hits, misses) over all layers of our caches."""
        stats = CacheStats.sum(cache.stats for cache in self.caches)
        return stats.hits, stats.misses


def cached(
    model: Model, stores: Sequence[ExpertStore], capacity: int, variant: Variant, device: str
) -> Subject:
    """Our cache, in groups for a call that may not fit."""
    options = {"engine": variant.engine, "policy": variant.policy, "device": device}
    caches = [
        ExpertCache(stores[index % len(stores)], capacity, **options)  # type: ignore[arg-type]
        for index in range(model.layers)
    ]

    def layer_of(cache: ExpertCache) -> Layer:
        def layer(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
            for part in cache.groups(ids, overlap=variant.overlap):
                moe_forward(x, part.weights, part.slot_ids, topk_weights, out=out)

        return layer

    return Subject(list(map(layer_of, caches)), caches, stores[0].nbytes // stores[0].num_experts)


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


def restated(
    model: Model, weights: Sequence[Mapping[str, torch.Tensor]], capacity: int, device: str
) -> Subject:
    """The PR's provider: blocking copies, ids read by the host."""
    caches = [
        SeededPrCache(weights[index % len(weights)], capacity, device=device) for index in range(model.layers)
    ]

    def layer_of(cache: PrCache) -> Layer:
        def layer(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
            slot_ids = cache.acquire(ids)  # [T, K]
            moe_forward(x, cache.slots, slot_ids, topk_weights, out=out)

        return layer

    return Subject(list(map(layer_of, caches)), caches, model.expert_bytes)


def uncached(model: Model, weights: Sequence[Mapping[str, torch.Tensor]]) -> Subject:
    """The forward alone, on `weights` [E, ...] that are on the device; ids are rows."""

    def layer_of(experts: Mapping[str, torch.Tensor]) -> Layer:
        def layer(x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
            moe_forward(x, experts, ids, topk_weights, out=out)

        return layer

    return Subject([layer_of(weights[index % len(weights)]) for index in range(model.layers)])


class Steps:
    """One subject at work: a step is one token of each sequence through all layers."""

    def __init__(self, layers: Sequence[Layer], inputs: Inputs, *, captured: bool) -> None:
        """`captured`: on a GPU, a step becomes one CUDA graph."""
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
            layer(self._inputs.x, routed, self._inputs.topk_weights, self.out)

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

    def run(self, first: int, count: int) -> float:
        """Microseconds of a step, over `count` steps from `first` on."""
        self._step.fill_(first)
        _wait(self.out)
        start = time.perf_counter()
        for step in range(first, first + count):
            if self._graph is None:
                self._forward(self._inputs.ids[step])
            else:
                self._graph.replay()
        _wait(self.out)
        return (time.perf_counter() - start) * 1e6 / max(count, 1)

    def output(self, step: int) -> torch.Tensor:
        """float32 [T, H] after `step`; overwritten by the next one."""
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
    calls: list[list[list[int]]] = field(init=False, repr=False)
    """The ids that each layer needs in each step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", _calls(self.inputs.ids))

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
        each = max(_TOKENS_A_ROUND // batch, 1)
        steps = start + rounds * each
        inputs = (
            Inputs.recorded(model, steps, device) if recorded else Inputs.make(model, batch, steps, device)
        )
        return cls(model, inputs, capacity, batch, start, rounds, each, recorded)

    @property
    def last(self) -> int:
        """The last step."""
        return self.start + self.rounds * self.each - 1

    def row(self, name: str) -> Row:
        """The start of a row of the table."""
        return {"engine": name, "batch": self.batch, "capacity": self.capacity}


def decode(
    device: str,
    *,
    batch: int,
    capacity: int,
    host: Host | None = None,
    model: Model | None = None,
    rounds: int = _ROUNDS,
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
    subjects: dict[str, Subject] = {}
    most = max(len(set(call)) for layer in run.calls for call in layer)
    if most <= capacity:
        subjects[PR] = restated(model, host.weights, capacity, device)
    else:
        rows.append(run.row(PR) | {"reason": f"a call needs {most} experts: the PR raises an error"})
    variants = (Variant(RESIDENT, "resident"),) if capacity >= model.experts else VARIANTS
    for number, variant in enumerate(variants[:1] if recorded else variants):
        if number and not _room(model, capacity, device):
            rows.append(run.row(variant.name) | {"reason": "no room on the GPU beside the others"})
        else:
            stores = host.packed if variant.packed else host.plain
            subjects[variant.name] = cached(model, stores, capacity, variant, device)
    if RESIDENT in subjects:
        subjects[UNCACHED] = uncached(model, [cache.weights for cache in subjects[RESIDENT].caches])
    rows += _measure(run, host, device, subjects)
    del subjects
    _release(device)
    return rows


def _measure(run: Run, host: Host, device: str, subjects: Mapping[str, Subject]) -> list[Row]:
    steps = {
        name: Steps(subject.layers, run.inputs, captured=name not in ("host", PR))
        for name, subject in subjects.items()
    }
    for subject in subjects.values():
        subject.seed(run.inputs.ids[: run.start - CHECKED_STEPS])
    right = _right(run, host.weights, device)
    checked = range(run.start - CHECKED_STEPS, run.start)
    timed = {
        name: variant
        for name, variant in steps.items()
        if all(_same(variant.output(step), right(step)) for step in checked)
    }
    if not timed:
        return [run.row(name) | {"correct": False} for name in steps]
    ours = {name: subject for name, subject in subjects.items() if name not in (PR, UNCACHED)}
    before = {name: subject.counts() for name, subject in ours.items()}
    base = next(name for name in (UNCACHED, PR, *timed) if name in timed)
    times = _in_turn(timed, base, run)
    full = run.capacity >= run.model.experts
    best = 1.0 if full else optimum(run)
    rows = []
    for name, variant in steps.items():
        row = run.row(name)
        row["correct"] = name in timed and _same(variant.out, right(run.last))
        if row["correct"]:
            row |= _figures(times, name, base, run.batch) | {"one_graph": variant.captured}
        if not full:
            row |= _pr_traffic(run, host) if name == PR else _traffic(run, host, ours[name], before[name])
            row["hit_rate_optimum"] = best
        rows.append(row)
    _add_bounds(rows)
    return rows


def _in_turn(steps: Mapping[str, Steps], base: str, run: Run) -> Comparison:
    position = dict.fromkeys(steps, run.start)

    def measure(name: str) -> float:
        first = position[name]
        position[name] += run.each
        return steps[name].run(first, run.each)

    measures = {name: functools.partial(measure, name) for name in steps}
    return compare_rounds(measures, baseline=base, rounds=run.rounds)


def _figures(times: Comparison, name: str, base: str, batch: int) -> Row:
    spread = times.times[name]
    row: Row = {
        "tokens_per_second": batch * 1e6 / spread.median,
        "tokens_per_second_p20": batch * 1e6 / spread.p80,
        "tokens_per_second_p80": batch * 1e6 / spread.p20,
        **spread_of("step_us", spread),
    }
    if name != base:
        ratio = times.ratios[name]
        row |= {"speedup": 1 / ratio.median, "speedup_p20": 1 / ratio.p80, "speedup_p80": 1 / ratio.p20}
        row["against"] = base
    return row


def _traffic(run: Run, host: Host, subject: Subject, before: tuple[int, int]) -> Row:
    hits, misses = (now - then for now, then in zip(subject.counts(), before, strict=True))
    return _bus(run, host, hits, misses, subject.bytes_a_miss)


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
    """Hit rate, gigabytes a step, and the time that they take at the rate of a pinned copy."""
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
    """Belady's hit rate over the whole trace, from empty caches."""
    experts, capacity = run.model.experts, run.capacity
    return CacheStats.sum(
        simulate(calls, num_experts=experts, capacity=capacity, policy="belady") for calls in run.calls
    ).hit_rate


def pr_wrong_steps(run: Run) -> tuple[int, int]:
    """(steps in which the PR's rule loses an expert of some layer, steps), by bookkeeping from empty caches.

    Over the first 2000 tokens of the trace, or as many as are timed if these are more. The timed steps are
    chosen so that the rule is right there, and do not show how often it is.
    """
    steps = max(_COUNTED_TOKENS // run.batch, run.last + 1)
    wrong = [False] * steps
    for calls in _counted_calls(run.model, run.batch, steps, run.recorded):
        rule = PrRule(run.model.experts, run.capacity)
        for step, call in enumerate(calls):
            wrong[step] |= replay((call,), rule).wrong > 0
    return sum(wrong), steps


@functools.lru_cache(maxsize=1)
def _counted_calls(model: Model, batch: int, steps: int, recorded: bool) -> list[list[list[int]]]:
    return _calls(recorded_ids(model, steps) if recorded else zipf_ids(model, batch, steps))


def _calls(ids: torch.Tensor) -> list[list[list[int]]]:
    """[steps, layers, T, K] -> the ids of each call, by layer and step."""
    calls: list[list[list[int]]] = ids.transpose(0, 1).flatten(2).tolist()
    return calls


def _right(run: Run, host: list[dict[str, torch.Tensor]], device: str) -> Callable[[int], torch.Tensor]:
    """Return a function that gives the output of a step with every expert at hand."""
    weights = [{name: tensor.to(device) for name, tensor in layer.items()} for layer in host]
    reference = Steps(uncached(run.model, weights).layers, run.inputs, captured=False)
    return functools.cache(lambda step: reference.output(step).clone())


def _same(out: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they are equal except for the order in which groups add up."""
    return bool((out - right).norm() <= 1e-5 * right.norm())


def miss_bandwidth(
    device: str, *, model: Model | None = None, host: Host | None = None, rounds: int = 20
) -> list[Row]:
    """Bytes of experts a second if every access is a miss, in turn with a plain pinned copy of 256 MB.

    A row for ``pinned``, the copy, and for each way of ours; ``of_pinned`` is its share of the copy's rate.
    Raises RuntimeError if a slot does not hold what it should.
    """
    model = model or Model(host_layers=1)
    host = host or Host.make(model, device)
    plain = torch.empty(_PLAIN_BYTES, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
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

    def copy() -> None:
        target.copy_(plain, non_blocking=True)

    def load_all(cache: ExpertCache) -> None:
        for ids in batches:
            cache.acquire(ids)

    def seconds_a_byte(call: Callable[[], None], moved: int) -> float:
        _wait(target)
        start = time.perf_counter()
        call()
        _wait(target)
        return (time.perf_counter() - start) / moved

    measures = {"pinned": functools.partial(seconds_a_byte, copy, plain.nbytes)} | {
        name: functools.partial(
            seconds_a_byte, functools.partial(load_all, cache), model.expert_bytes * model.experts
        )
        for name, cache in caches.items()
    }
    for measure in measures.values():
        measure()
    for name, cache in caches.items():
        for ids in batches:
            _check_slots(name, cache, ids, host.weights[0])
    before = {name: cache.stats.hits for name, cache in caches.items()}
    times = compare_rounds(measures, baseline="pinned", rounds=rounds)
    if any(cache.stats.hits != before[name] for name, cache in caches.items()):
        raise RuntimeError("a call of the miss measurement hit, so the bytes that moved are unknown")
    rows: list[Row] = []
    for name in measures:
        row: Row = {"engine": name, "miss_gb_s": 1e-9 / times.times[name].median}
        if name in caches:
            ratio = times.ratios[name]
            share = Spread.of([1 / ratio.median, 1 / ratio.p20, 1 / ratio.p80])
            row |= spread_of("of_pinned", share)
        rows.append(row)
    return rows


def _check_slots(
    name: str, cache: ExpertCache, ids: torch.Tensor, weights: Mapping[str, torch.Tensor]
) -> None:
    held = cache.acquire(ids)
    chosen, slots = ids[0].long().cpu(), held.slot_ids[0].long()
    if not all(torch.equal(held.weights[key][slots].cpu(), weights[key][chosen]) for key in weights):
        raise RuntimeError(f"{name}: a slot differs from the host's expert")


def pinned_bandwidth(device: str) -> float:
    """Bytes a second of asynchronous copies from pinned memory, the best of ten of 256 MB."""
    source = torch.empty(_PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return source.nbytes / best


def spread_of(name: str, spread: Spread, *, scale: float = 1.0, offset: float = 0.0) -> dict[str, float]:
    """Median and percentiles as evidence tables read them."""
    return {
        name: spread.median * scale + offset,
        f"{name}_p20": spread.p20 * scale + offset,
        f"{name}_p80": spread.p80 * scale + offset,
    }


def _wait(tensor: torch.Tensor) -> None:
    """Wait for the device that `tensor` is on."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


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
