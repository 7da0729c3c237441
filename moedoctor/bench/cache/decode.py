"""A decode step through the MoE layers of a model, with one expert cache or another, and without.

Every variant runs the same forward, `moedoctor.fixes.moe.forward`, on the same weights and routes; the cache
is the only difference. Layers have slots of their own, while `host_layers` sets of host tensors serve all of
them in turn, which saves host memory and changes no transfer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.moe.forward import moe_forward
from moedoctor.reference.expert_cache import PrCache
from moedoctor.trace.shipped import shipped_trace
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(x [T, H], ids [T, K], shares [T, K], out float32 [T, H], which it adds to)."""


@dataclass(frozen=True)
class Model:
    """The shape that is measured; by default Qwen3-30B-A3B's."""

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    inner: int = 768
    host_layers: int = 4
    skew: float = 1.0
    """Of the Zipf distribution that routes."""
    drift: float = 0.1
    seed: int = 0

    @property
    def expert_bytes(self) -> int:
        """Of one expert's two matrices in bfloat16."""
        return 2 * 3 * self.hidden * self.inner


@dataclass(frozen=True)
class Inputs:
    """Routes and activations of a number of steps, on the device."""

    ids: torch.Tensor
    """int32 [steps, layers, T, K]"""
    shares: torch.Tensor
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
        """The trace that ships with moedoctor, a token a step. Its layers come again further on in the text.

        Raises ValueError for a model of another shape, or where the trace is too short.
        """
        return cls._with(model, recorded_ids(model, steps), device)

    @classmethod
    def _with(cls, model: Model, ids: torch.Tensor, device: str) -> Inputs:
        batch = ids.shape[2]
        draw = torch.Generator(device).manual_seed(model.seed)
        shares = torch.rand(batch, model.top_k, generator=draw, device=device)  # [T, K]
        x = torch.randn(batch, model.hidden, generator=draw, device=device).bfloat16()  # [T, H]
        return cls(ids.to(device).contiguous(), shares / shares.sum(1, keepdim=True), x)


def zipf_ids(model: Model, batch: int, steps: int) -> torch.Tensor:
    """int32 [steps, layers, T, K] on the CPU; fewer steps of one sequence are the start of more."""
    rows = steps * batch
    shape = {"experts": model.experts, "top_k": model.top_k, "layers": model.layers, "rows": rows}
    settings = ZipfSettings(**shape, streams=batch, skew=model.skew, drift=model.drift, seed=model.seed)
    ids = torch.tensor(zipf_trace(settings).topk_ids, dtype=torch.int32)
    return ids.view(steps, batch, model.layers, model.top_k).transpose(1, 2).contiguous()


def recorded_ids(model: Model, steps: int) -> torch.Tensor:
    """int32 [steps, layers, 1, K] on the CPU, as `Inputs.recorded` has them. Raises ValueError as it does."""
    trace = shipped_trace()
    known, repeats = len(trace.layers), -(-model.layers // len(trace.layers))
    if (model.experts, model.top_k) != (trace.num_experts, trace.top_k) or steps > trace.rows:
        raise ValueError(
            f"the trace has {trace.rows} tokens of {trace.num_experts} experts, top-{trace.top_k}"
        )
    every = torch.tensor(list(trace.topk_ids), dtype=torch.int32).view(-1, known, 1, model.top_k)
    apart = (trace.rows - steps) // max(repeats - 1, 1)
    parts = [every[start * apart : start * apart + steps] for start in range(repeats)]
    return torch.cat(parts, dim=1)[:, : model.layers]


def host_weights(model: Model, device: str) -> list[dict[str, torch.Tensor]]:
    """`host_layers` layers of random bfloat16 experts in pinned memory; drawn on `device`."""
    layers = []
    for layer in range(model.host_layers):
        draw = torch.Generator(device).manual_seed(model.seed + layer)
        weights = {}
        for name, rows, columns in (
            ("w13", 2 * model.inner, model.hidden),
            ("w2", model.hidden, model.inner),
        ):
            values = torch.randn(model.experts, rows, columns, generator=draw, device=device) / columns**0.5
            pinned = torch.empty(
                values.shape, dtype=torch.bfloat16, pin_memory=torch.device(device).type == "cuda"
            )
            weights[name] = pinned.copy_(values)  # [E, rows, columns]
        layers.append(weights)
    return layers


class Steps:
    """One variant: a step is one token of each sequence through all layers."""

    def __init__(self, layers: list[Layer], inputs: Inputs, *, captured: bool) -> None:
        """`captured`: where there is a GPU, a step becomes one CUDA graph."""
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
            layer(self._inputs.x, routed, self._inputs.shares, self.out)

    def _captured_step(self) -> None:
        self._forward(self._inputs.ids.index_select(0, self._step)[0])
        self._step.add_(1)

    def _capture(self) -> None:
        self._forward(self._inputs.ids[0])  # compiles, outside the capture
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._forward(self._inputs.ids[0])  # raises where torch synchronises
            self._graph = torch.cuda.CUDAGraph()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(self._graph):
            self._captured_step()
        torch.cuda.synchronize()

    @property
    def captured(self) -> bool:
        """Whether a step is the replay of one CUDA graph, which no host synchronisation can be part of."""
        return self._graph is not None

    def _wait(self) -> None:
        if self.out.is_cuda:
            torch.cuda.synchronize()

    def run(self, first: int, count: int) -> float:
        """Microseconds of a step, over `count` steps from `first` on."""
        self._step.fill_(first)
        self._wait()
        start = time.perf_counter()
        for step in range(first, first + count):
            if self._graph is None:
                self._forward(self._inputs.ids[step])
            else:
                self._graph.replay()
        self._wait()
        return (time.perf_counter() - start) * 1e6 / max(count, 1)


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
        """How the cache is made and called, in the words of its options."""
        options = ["packed"] * self.packed + ["overlap"] * self.overlap
        return " + ".join([self.policy, *options, f"engine {self.engine}"])


@dataclass
class Caches:
    """The caches of all layers of one variant, and their layers."""

    caches: list[ExpertCache]
    layers: list[Layer]
    bytes_a_miss: int
    """What the bus carries for one expert."""

    def seed(self, calls: torch.Tensor) -> None:
        """The state that `calls` int [calls, layers, T, K] leave behind, by bookkeeping."""
        for layer, cache in enumerate(self.caches):
            cache.seed(calls[:, layer])

    def counts(self) -> tuple[int, int]:
        """(hits, misses) over all layers."""
        stats = [cache.stats for cache in self.caches]
        return sum(one.hits for one in stats), sum(one.misses for one in stats)


def cached(
    model: Model, stores: Sequence[ExpertStore], capacity: int, variant: Variant, device: str
) -> Caches:
    """Ours, in groups where a call may not fit."""
    caches = [
        ExpertCache(
            stores[index % len(stores)],
            capacity,
            engine=variant.engine,
            policy=variant.policy,
            device=device,
        )
        for index in range(model.layers)
    ]
    layers = [_layer_of(cache, variant.overlap) for cache in caches]
    return Caches(caches, layers, stores[0].nbytes // stores[0].num_experts)


def _layer_of(cache: ExpertCache, overlap: bool) -> Layer:
    def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
        for part in cache.groups(ids, overlap=overlap):
            moe_forward(x, part.weights, part.slot_ids, shares, out=out)

    return layer


class SeededPrCache(PrCache):
    """The PR's cache, restated, that can start in the middle of a trace."""

    def seed(self, calls: list[list[int]]) -> None:
        """The state that `calls` leave behind, by bookkeeping."""
        for call in calls:
            self.rule.step(sorted(set(call)))
        for slot, expert in enumerate(self.rule.expert_of):
            for name, buffer in self.slots.items():
                if expert >= 0:
                    buffer[slot].copy_(self._host[name][expert])
        self._mapping.copy_(torch.tensor(self.rule.slot_of, dtype=torch.int32))


@dataclass
class Restated:
    """The provider of vllm-project/vllm#37190, restated: blocking copies, ids read by the host."""

    caches: list[SeededPrCache]
    layers: list[Layer]

    @classmethod
    def make(cls, model: Model, host: list[dict[str, torch.Tensor]], capacity: int, device: str) -> Restated:
        caches = [
            SeededPrCache(host[index % len(host)], capacity, device=device) for index in range(model.layers)
        ]

        def layer_of(cache: PrCache) -> Layer:
            def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
                slot_ids = cache.acquire(ids)
                moe_forward(x, cache.slots, slot_ids, shares, out=out)

            return layer

        return cls(caches, [layer_of(cache) for cache in caches])

    def seed(self, calls: torch.Tensor) -> None:
        """As `Caches.seed`."""
        for layer, cache in enumerate(self.caches):
            cache.seed(calls[:, layer].flatten(1).tolist())


def uncached(model: Model, weights: Sequence[Mapping[str, torch.Tensor]]) -> list[Layer]:
    """The forward alone, on `weights` [E, ...] that are on the device; ids are rows."""

    def layer_of(experts: Mapping[str, torch.Tensor]) -> Layer:
        def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
            moe_forward(x, experts, ids, shares, out=out)

        return layer

    return [layer_of(weights[index % len(weights)]) for index in range(model.layers)]
