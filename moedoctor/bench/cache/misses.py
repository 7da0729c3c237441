"""How fast the expert cache moves experts where every access is a miss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from moedoctor.bench.cache.decode import Model
from moedoctor.bench.cache.run import Host
from moedoctor.bench.timing import Spread, compare_rounds
from moedoctor.fixes.expert_cache import ExpertCache

_PLAIN_BYTES = 1 << 28


def miss_bandwidth(
    device: str, *, model: Model | None = None, host: Host | None = None, rounds: int = 20
) -> list[dict[str, Any]]:
    """Bytes of experts a second where every access is a miss, in turn with a plain pinned copy of 256 MB.

    A row for ``pinned``, the copy, and for each way of ours; ``of_pinned`` is its share of the copy's rate.
    Raises RuntimeError where a slot does not hold what it should.
    """
    model = model or Model(host_layers=1)
    host = host or Host.make(model, device)
    weights = host.weights[0]
    on_gpu = torch.device(device).type == "cuda"
    plain = torch.empty(_PLAIN_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty_like(plain, device=device)
    batches = [
        torch.arange(start, start + model.top_k, dtype=torch.int32, device=device)[None]
        for start in range(0, model.experts, model.top_k)
    ]  # [1, K] each, no expert twice
    experts = model.expert_bytes * model.experts
    moved = {"device": experts, "packed": experts, "host": experts, "pinned": plain.nbytes}

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def run(name: str, cache: ExpertCache) -> Callable[[], float]:
        def measure() -> float:
            wait()
            start = time.perf_counter()
            for ids in batches:
                cache.acquire(ids)
            wait()
            return (time.perf_counter() - start) / moved[name]

        return measure

    def copy() -> float:
        wait()
        start = time.perf_counter()
        target.copy_(plain, non_blocking=True)
        wait()
        return (time.perf_counter() - start) / moved["pinned"]

    caches = {
        "device": ExpertCache(host.plain[0], model.top_k, engine="device", device=device),
        "packed": ExpertCache(host.packed[0], model.top_k, engine="device", device=device),
        "host": ExpertCache(host.plain[0], model.top_k, engine="host", device=device),
    }
    measures = {"pinned": copy} | {name: run(name, cache) for name, cache in caches.items()}
    for measure in measures.values():
        measure()
    for name, cache in caches.items():
        for ids in batches:
            held = cache.acquire(ids)
            chosen, slots = ids[0].long().cpu(), held.slot_ids[0].long()
            if not all(torch.equal(held.weights[key][slots].cpu(), weights[key][chosen]) for key in weights):
                raise RuntimeError(f"{name}: a slot differs from the host's expert")
    before = {name: cache.stats.hits for name, cache in caches.items()}
    times = compare_rounds(measures, baseline="pinned", rounds=rounds)
    if any(cache.stats.hits != before[name] for name, cache in caches.items()):
        raise RuntimeError("a call of the miss measurement hit, so the bytes that moved are unknown")
    rows: list[dict[str, Any]] = []
    for name in measures:
        row: dict[str, Any] = {"engine": name, "miss_gb_s": 1e-9 / times.times[name].median}
        if name in caches:
            ratio = times.ratios[name]
            share = Spread.of([1 / one for one in (ratio.median, ratio.p20, ratio.p80)])
            row |= {"of_pinned": share.median, "of_pinned_p20": share.p20, "of_pinned_p80": share.p80}
        rows.append(row)
    return rows
