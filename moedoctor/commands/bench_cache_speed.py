"""What `moedoctor bench --cache --speed` measures on the GPU, in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUBJECTS = {
    "overlap": "ours: aging, packed, hits computed during copies",
    "packed": "ours: aging, packed",
    "aging": "ours: aging",
    "device": "ours: device engine",
    "host": "ours: host engine",
    "resident": "ours, all resident",
    "uncached": "no cache",
    "pr37190": "PR 37190, restated",
    "pinned": "a pinned copy",
}
"""Variants of `moedoctor.bench.expert_cache.decode` and `expert_cache_misses`, in words."""

Rows = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Speed:
    """Everything that was measured, as rows of tables."""

    decode: Rows
    measured: Mapping[str, Rows]
    """What is measured once, by name: ``recorded``, ``misses``, ``groups``, ``replays``."""
    limits: Rows
    """What it was meant to reach, and the verdict."""
    note: str


def measure_speed(batch: int, capacities: Sequence[int], gpu: str) -> Speed:
    """Decode through the restated cache of the PR and ours, at each capacity; at batch 1 the rest too."""
    from moedoctor.bench.expert_cache import Host, decode
    from moedoctor.bench.expert_cache_decode import Model
    from moedoctor.bench.expert_cache_groups import group_cost
    from moedoctor.bench.expert_cache_limits import MIN_SPEEDUP, judge
    from moedoctor.bench.expert_cache_misses import miss_bandwidth
    from moedoctor.bench.replay_speed import replay_speed

    device, model = "cuda:0", Model()
    host = Host.make(model, device)
    rows: list[dict[str, Any]] = []
    for capacity in (one for one in capacities if one <= model.experts):
        rows += decode(device, batch=batch, capacity=capacity, host=host, model=model)
        print(f"moedoctor: {capacity} slots: measured", file=sys.stderr)
    measured: dict[str, list[dict[str, Any]]] = {}
    if batch == 1:
        measured["recorded"] = [
            row
            for capacity in capacities
            if capacity in MIN_SPEEDUP
            for row in decode(device, batch=1, capacity=capacity, host=host, model=model, recorded=True)
        ]
        measured["misses"] = miss_bandwidth(device)
        measured["groups"] = group_cost(device)["rows"]
        measured["replays"] = replay_speed()
    limits = judge(rows, **measured)
    note = (
        f"Speed: decode at batch {batch} through {model.layers} MoE layers of the shape of Qwen3-30B-A3B in "
        f"bfloat16, without attention; random weights, Zipf routing with drift; {gpu}. bus_us is what the "
        "bytes of the misses take at the rate of a pinned copy, speedup_bound the ratio if nothing else took "
        "time; recorded is the trace that ships with moedoctor."
    )
    return Speed(
        tuple(map(_in_words, rows)),
        {name: tuple(map(_in_words, some)) for name, some in measured.items()},
        tuple(one.row() for one in limits),
        note,
    )


def _in_words(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "engine" not in row:
        return row
    rest = {key: value for key, value in row.items() if key != "engine"}
    return {"subject": SUBJECTS.get(row["engine"], row["engine"]), **rest}
