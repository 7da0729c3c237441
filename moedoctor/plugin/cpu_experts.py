"""Computes a part of the missing experts of short calls on the CPU, while others travel to their slots.

A call of few tokens first asks the workers of `HostWorkers` for some of its missing experts, goes through the
cache with the others, and adds the workers' sum to the result. `MOEDOCTOR_EXPERT_CACHE=N:cpu=SHARE` sets the
part of the missing experts, ``cpu=auto`` measures at start which part makes a step fastest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moedoctor.fixes.cache import host_workers
from moedoctor.fixes.cache.host_workers import MOST_EXPERTS, MOST_TOKENS, HostWorkers
from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.kernels.cache import WHOLE_SHARE
from moedoctor.plugin import hits_first
from moedoctor.plugin.expert_cache_layer import HostExperts
from moedoctor.plugin.expert_cache_options import CacheOptions
from moedoctor.results import UnavailableError

logger = logging.getLogger("vllm.moedoctor")

_SPARED = 2  # cores: with a worker on each core of a machine, all of them stalled for milliseconds
CANDIDATES = 0, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256
"""Shares that are timed, in parts of `WHOLE_SHARE`."""
_TIMED_LAYERS, _TIMED_STEPS = 4, 8
_MUCH, _LITTLE = 1.5, 0.97  # workers also take time from an engine's other threads
_MOST_ERROR = 0.25
_SIZES = 1, 1 / 8, 1 / 64  # of inputs
_BACKENDS = hits_first.TRITON, "MarlinExperts"
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_RUNNING: list[CpuExperts] = []  # of this process: workers of a second model would take the same cores


@dataclass(frozen=True)
class Choice:
    """The share of missing experts for calls of so many tokens; seconds of all timed layers' cache steps."""

    tokens: int
    share: int
    expected: float  # by the search among all shares
    measured: float  # measured again, in turn with `plain`
    plain: float  # without the CPU


class CpuExperts:
    """Asks the workers for the layers of one model, on one GPU."""

    def __init__(self, caches: Sequence[ExpertCache], workers: HostWorkers, device: torch.device) -> None:
        self._caches, self._workers = caches, workers
        # The stamp of the last request, and the number of experts that the last call asked for.
        self.stamps = torch.zeros(2, dtype=torch.int64, device=device)
        self.shares: dict[int, int] = {}  # number of tokens -> share in parts of `WHOLE_SHARE`
        self.captured = True  # the engine's steps are CUDA graphs
        self._is_open = False  # workers were asked, and nobody has waited for them
        self._has_gap = False  # a layer was captured that no call had compared
        self._graphs: set[int] = set()  # numbers of tokens of calls that were captured
        self.checked: set[int] = set()
        """Layers whose workers' sum was compared with the backend's."""

    def ask(
        self, number: int, x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor, share: int
    ) -> torch.Tensor:
        """Ask for a share of layer `number`'s missing experts; return the ids [T, K] that are left.

        `x` [T, H] is bfloat16. `add` must follow.
        """
        from moedoctor.kernels.cache.handover import launch_ask

        if self._is_open:  # a call broke off: its request must be answered before the next one is written
            self.add(torch.zeros_like(x))
        box = self._workers.device_box
        fields = (box.request, box.head, box.ids, box.weights, box.hidden)
        given = ids.contiguous(), topk_weights.contiguous(), x.contiguous()
        kept = launch_ask(self._caches[number].state, *given, self.stamps, fields, share, number)
        self._is_open = True
        return kept

    def add(self, out: torch.Tensor) -> None:
        """Wait for what was asked for, on the device, and add it to `out` [T, H]."""
        from moedoctor.kernels.cache.handover import launch_add

        box = self._workers.device_box
        launch_add(out, box.sums, box.answers, self.stamps)
        self._is_open = False

    def wrap(self, number: int, experts: HostExperts) -> Callable[..., torch.Tensor]:
        """Return the kernel's `apply` of layer `number`, which asks the workers before it computes."""
        inner = experts.kernel.apply

        def apply(
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            **given: Any,
        ) -> torch.Tensor:
            share = self.shares.get(len(topk_ids), 0)
            usual = topk_ids.numel() <= MOST_EXPERTS and _is_usual(hidden_states, given)
            if not share or not usual or experts.streams(len(topk_ids)):
                return inner(hidden_states, w1, w2, topk_weights, topk_ids, **given)  # type: ignore[no-any-return]

            def compute(
                x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, share: int
            ) -> torch.Tensor:
                kept = self.ask(number, x, weights, ids, share)
                result: torch.Tensor = inner(x, w1, w2, weights, kept, has_gaps=True, **given)  # [T, H]
                self.add(result)
                return result

            capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if number in self.checked and (capturing or len(topk_ids) not in self._graphs):
                if capturing:
                    self._graphs.add(len(topk_ids))
                return compute(hidden_states, topk_ids, topk_weights, share)
            # A call outside of the graph of its size is a prompt, whose first token the CPU would delay.
            if number not in self.checked and not capturing:
                x, ids, weights = _draw_call(hidden_states, topk_ids, topk_weights, experts.num_experts)

                def compute_both(size: float) -> tuple[torch.Tensor, torch.Tensor]:
                    experts.cache.seed(ids[:1, :0])  # every expert is missing, so all are the CPU's
                    # Rows of their own: the backend may write its next result to the same place.
                    ours = compute(x * size, ids, weights, WHOLE_SHARE)[0].float()  # [H]
                    return ours, inner(x * size, w1, w2, weights, ids, **given)[0].float()

                with keep_caches([experts.cache]):
                    self._compare(number, map(compute_both, _SIZES))
            elif capturing and not self._has_gap:
                self._has_gap = True
                logger.warning(
                    "moedoctor: expert_cache: cpu computes nothing of layer %d in CUDA graphs: no call "
                    "before the capture showed that its sum is the backend's",
                    number,
                )
            return inner(hidden_states, w1, w2, topk_weights, topk_ids, **given)  # type: ignore[no-any-return]

        return apply

    def _compare(self, number: int, rows: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Leave the CPU out from now on if none of its `rows` [H] of layer `number` is the backend's.

        A release may keep weights in a layout that the workers do not know. A backend with fixed scales for
        its inputs saturates if these are too large, so smaller ones are tried, too.
        """
        self.checked.add(number)
        for ours, theirs in rows:
            size, error = float(theirs.norm()), float((ours - theirs).norm())
            if error <= _MOST_ERROR * size:  # inputs that are quantized make some 4 %, other weights 100 %
                return
        self.shares = {}
        logger.warning(
            "moedoctor: expert_cache: cpu computes nothing: its output of layer %d differs from the "
            "backend's by %.2g where the norm is %.2g; at most %g of it was expected",
            number,
            error,
            size,
            _MOST_ERROR,
        )

    def time_step(self, tokens: int, share: int, top_k: int) -> float:
        """Return seconds of the cache steps of some layers: lookups, copies, and the workers beside them.

        The backend's own products are left out: they take as long for every share, or less. Routing is
        uniform. On a GPU each step is the replay of a CUDA graph if the engine's are.
        """
        device, caches = self.stamps.device, self._caches[:_TIMED_LAYERS]
        draw = torch.Generator().manual_seed(tokens)
        experts = caches[0].num_experts
        x = torch.zeros(tokens, self._workers.hidden_size, dtype=torch.bfloat16, device=device)  # [T, H]
        weights = torch.ones(tokens, top_k, device=device)  # [T, K]
        ids = torch.zeros(len(caches), tokens, top_k, dtype=torch.int32, device=device)  # [layers, T, K]

        def step() -> None:
            for number, cache in enumerate(caches):
                kept = self.ask(number, x, weights, ids[number], share) if share else ids[number]
                for _ in cache.groups(kept, overlap=True):
                    pass
                if share:
                    self.add(x)

        run: Callable[[], Any] = step
        wait: Callable[[], Any] = time.monotonic
        seconds = []
        with keep_caches(caches):  # else a second share would find the experts of the first one
            if device.type == "cuda":
                wait = torch.cuda.synchronize
                step()  # compiles the kernels, which a capture cannot
                wait()
            if device.type == "cuda" and self.captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
            for _ in range(1 + _TIMED_STEPS):
                ids.copy_(torch.rand(len(caches), tokens, experts, generator=draw).argsort(-1)[..., :top_k])
                wait()
                begin = time.perf_counter()
                run()
                wait()
                seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[1:])  # the first one warms up; another process may disturb some


def _draw_call(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a call of the same shapes and types: normal values, `experts` at random with equal weights.

    What an engine computes before it captures may be NaN, or padding without experts.
    """
    draw = torch.Generator().manual_seed(len(ids))
    drawn = torch.rand(len(ids), experts, generator=draw).argsort(-1)[:, : ids.shape[-1]]  # [T, K]
    values = torch.randn(x.shape, generator=draw)  # [T, H]
    return values.to(x), drawn.to(ids), torch.full_like(weights, 1 / ids.shape[-1])


def _is_usual(x: torch.Tensor, given: Mapping[str, Any]) -> bool:
    """Return True for a call that the workers can compute: silu, bfloat16, weights applied at the end."""
    activation = given.get("activation", "silu")
    name = getattr(activation, "value", activation)
    return name == "silu" and x.dtype is torch.bfloat16 and not given.get("apply_router_weight_on_input")


def choose_share(tokens: int, measure: Callable[[int, int], float]) -> Choice:
    """Return the fastest share for calls of `tokens`; `measure` (tokens, share) gives a step's seconds.

    The fastest is measured once more, in turn with the step without the CPU, and must win again by 3 %.
    """
    times: dict[int, float] = {}
    for share in CANDIDATES:
        times[share] = measure(tokens, share)
        if times[share] > _MUCH * min(times.values()):  # from here on the CPU is what a step waits for
            break
    best = min(times, key=times.__getitem__)
    if best == 0:
        return Choice(tokens, 0, times[0], times[0], times[0])
    again, plain = measure(tokens, best), measure(tokens, 0)
    if again > _LITTLE * plain:
        return Choice(tokens, 0, times[best], plain, plain)
    return Choice(tokens, best, times[best], again, plain)


def choose_cores(wanted: int | None, nodes: Iterable[int], allowed: Iterable[int]) -> list[int]:
    """Return the cores for workers: the last of those in NUMA `nodes` that this process may use.

    Raises UnavailableError if there are fewer than `wanted`, or none.
    """
    cores = sorted(allowed)
    local: set[int] = set()
    for node in nodes:
        try:
            local |= _read_list((_NODES / f"node{node}" / "cpulist").read_text(encoding="ascii"))
        except (OSError, ValueError):
            raise UnavailableError(f"there is no NUMA node {node}: see `lscpu`") from None
    cores = [core for core in cores if not local or core in local]
    count = max(len(cores) - _SPARED, 1) if wanted is None else wanted
    if count > len(cores):
        raise UnavailableError(f"workers={count}, and this process may use {len(cores)} cores of the nodes")
    return cores[-min(count, 64) :]


def _read_list(text: str) -> set[int]:
    """Read a list such as ``0-7,16-23``."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def find_gpu_nodes(device: torch.device) -> tuple[int, ...]:
    """Return the NUMA node of a GPU; empty if the machine names none."""
    if device.type != "cuda":
        return ()
    gpu = torch.cuda.get_device_properties(device)
    domain, bus, place = (int(getattr(gpu, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device"))
    folder = _PCI / f"{domain:04x}:{bus:02x}:{place:02x}.0"
    try:
        node = int((folder / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return ()
    return (node,) if node >= 0 else ()


def find_obstacle(layers: Sequence[HostExperts]) -> str | None:
    """Return why the CPU cannot compute experts of these layers, or None."""
    if _RUNNING:
        return "another model of this process has the workers"
    for layer in layers:
        if layer.limit is not None:
            return f"the activation is limited to {layer.limit}; expected no limit"
        if layer.cache.engine != "device":
            return f"the cache's engine is {layer.cache.engine}; expected device"
        if type(layer.kernel.fused_experts).__name__ not in _BACKENDS:
            return "the backend keeps experts in a layout of its own; expected --moe-backend triton or marlin"
        if layer.tensor_parallel > 1:
            return "workers of several processes would share cores; expected no tensor parallelism"
        if (problem := host_workers.find_problem(layer.store)) is not None:
            return problem
    return None


def start(layers: Sequence[HostExperts], options: CacheOptions, device: torch.device, captured: bool) -> str:
    """Let the CPU compute a part of `layers`; return a line for the log. Raises UnavailableError.

    `captured`: the engine's steps are CUDA graphs.
    """
    if (obstacle := find_obstacle(layers)) is not None:
        raise UnavailableError(obstacle)
    nodes = options.nodes or find_gpu_nodes(device)
    cores = choose_cores(options.workers, nodes, os.sched_getaffinity(0))
    level, cpu = _choose_level(layers, cores, device)
    cpu.captured = captured
    sizes = range(1, min(MOST_TOKENS, MOST_EXPERTS // layers[0].top_k) + 1)
    if options.cpu is None:
        timed = [
            size for size in sizes if size & (size - 1) == 0
        ]  # others take the share of the next smaller one
        choices = _choose_all(cpu, timed, layers[0].top_k)
        cpu.shares = {size: choices[size.bit_length() - 1].share for size in sizes}
        words = "; ".join(
            f"{choice.tokens} tokens: share {choice.share / WHOLE_SHARE:g}, "
            f"expected {choice.expected * 1e3:.2f} ms, measured {choice.measured * 1e3:.2f} ms, "
            f"{choice.plain * 1e3:.2f} ms without the CPU"
            for choice in choices
        )
    else:
        cpu.shares = dict.fromkeys(sizes, round(options.cpu * WHOLE_SHARE))
        words = f"share {options.cpu:g} for 1 to {sizes[-1]} tokens"
    for number, layer in enumerate(layers):
        layer.kernel.apply = cpu.wrap(number, layer)
    _RUNNING.append(cpu)
    return f"{len(cores)} CPU workers ({level}) on cores {cores[0]} to {cores[-1]}: {words}"


def _choose_level(
    layers: Sequence[HostExperts], cores: Sequence[int], device: torch.device
) -> tuple[str, CpuExperts]:
    """Start workers with the vector instructions that make a step fastest: not always the widest."""
    caches, stores = [layer.cache for layer in layers], [layer.store for layer in layers]

    def start_workers(level: str) -> CpuExperts:
        return CpuExperts(caches, HostWorkers(stores, cores, device, level=level), device)

    seconds = {}
    for level in host_workers.find_levels()[:-1]:
        cpu = start_workers(level)
        seconds[level] = cpu.time_step(1, WHOLE_SHARE // 2, layers[0].top_k)
        cpu._workers.stop()
    best = min(seconds, key=seconds.__getitem__, default="plain")
    return best, start_workers(best)


@contextlib.contextmanager
def keep_caches(caches: Sequence[ExpertCache]) -> Iterator[None]:
    """Leave `caches` as they were, but for the slot that an expert has."""
    held = [(cache, cache.resident(), [each.clone() for each in _list_counters(cache)]) for cache in caches]
    try:
        yield
    finally:
        for cache, experts, counters in held:
            cache.seed(torch.tensor([[expert for expert in experts if expert >= 0]], dtype=torch.int32))
            for now, before in zip(_list_counters(cache), counters, strict=True):
                now.copy_(before)


def _list_counters(cache: ExpertCache) -> tuple[torch.Tensor, ...]:
    state = cache.state
    return () if state is None else (state.uses, state.last, state.clock, state.counts)


def _choose_all(cpu: CpuExperts, sizes: Iterable[int], top_k: int) -> list[Choice]:
    """Time all shares."""
    return [
        choose_share(tokens, lambda tokens, share: cpu.time_step(tokens, share, top_k)) for tokens in sizes
    ]
