"""A decode step through the MoE layers of a model, with one expert cache or another, and without.

Every variant runs the same forward, `moedoctor.fixes.moe_forward`, on the same weights and routes; the cache
is the only difference. Layers have slots of their own, while `host_layers` sets of host tensors serve all of
them in turn, which saves host memory and changes no transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moedoctor.faults.expert_cache_problem import PrCache
from moedoctor.fixes.expert_cache import ExpertCache, ExpertStore
from moedoctor.fixes.moe_forward import moe_forward
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
    def make(cls, model: Model, batch: int, steps: int, device: str) -> Inputs:
        """Zipf routes with drift, `batch` tokens a step."""
        settings = ZipfSettings(
            experts=model.experts,
            top_k=model.top_k,
            layers=model.layers,
            rows=steps * batch,
            streams=batch,
            skew=model.skew,
            drift=model.drift,
            seed=model.seed,
        )
        ids = torch.tensor(zipf_trace(settings).topk_ids, dtype=torch.int32)
        ids = ids.view(steps, batch, model.layers, model.top_k).transpose(1, 2).contiguous()
        draw = torch.Generator(device).manual_seed(model.seed)
        shares = torch.rand(batch, model.top_k, generator=draw, device=device)  # [T, K]
        x = torch.randn(batch, model.hidden, generator=draw, device=device).bfloat16()  # [T, H]
        return cls(ids.to(device), shares / shares.sum(1, keepdim=True), x)


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

    def __init__(self, name: str, layers: list[Layer], inputs: Inputs, *, captured: bool) -> None:
        self.name = name
        self._layers, self._inputs = layers, inputs
        self.out = torch.zeros(inputs.x.shape, dtype=torch.float32, device=inputs.x.device)  # [T, H]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._step = torch.zeros(1, dtype=torch.int64, device=inputs.x.device)
        if captured:
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

    def run(self, first: int, count: int) -> float:
        """Microseconds of a step, over `count` steps from `first` on."""
        self._step.fill_(first)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in range(first, first + count):
            if self._graph is None:
                self._forward(self._inputs.ids[step])
            else:
                self._graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / max(count, 1)


@dataclass
class Caches:
    """The caches of all layers of one variant, and their layers."""

    layers: list[Layer] = field(default_factory=list)
    caches: list[ExpertCache] = field(default_factory=list)

    def counts(self) -> tuple[int, int]:
        """(hits, misses) over all layers."""
        stats = [cache.stats for cache in self.caches]
        return sum(one.hits for one in stats), sum(one.misses for one in stats)


def cached(
    model: Model,
    stores: Sequence[ExpertStore],
    capacity: int,
    engine: str,
    device: str,
    *,
    overlap: bool = False,
) -> Caches:
    """Ours, in groups where a call may not fit; `overlap` as `ExpertCache.groups`."""
    made = Caches()
    for index in range(model.layers):
        cache = ExpertCache(stores[index % len(stores)], capacity, engine=engine, device=device)
        made.caches.append(cache)
        made.layers.append(_layer_of(cache, overlap))
    return made


def _layer_of(cache: ExpertCache, overlap: bool) -> Layer:
    def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
        for part in cache.groups(ids, overlap=overlap):
            moe_forward(x, part.weights, part.slot_ids, shares, out=out)

    return layer


def restated(model: Model, host: list[dict[str, torch.Tensor]], capacity: int, device: str) -> list[Layer]:
    """The provider of vllm-project/vllm#37190, restated: blocking copies, ids read by the host."""
    caches = [PrCache(host[index % len(host)], capacity, device=device) for index in range(model.layers)]

    def layer_of(cache: PrCache) -> Layer:
        def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
            slot_ids = cache.acquire(ids)
            moe_forward(x, cache.slots, slot_ids, shares, out=out)

        return layer

    return [layer_of(cache) for cache in caches]


def uncached(model: Model, weights: Sequence[Mapping[str, torch.Tensor]]) -> list[Layer]:
    """The forward alone, on `weights` [E, ...] that are on the device; ids are rows."""

    def layer_of(experts: Mapping[str, torch.Tensor]) -> Layer:
        def layer(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor) -> None:
            moe_forward(x, experts, ids, shares, out=out)

        return layer

    return [layer_of(weights[index % len(weights)]) for index in range(model.layers)]
