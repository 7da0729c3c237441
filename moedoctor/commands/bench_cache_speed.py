"""What `moedoctor bench --cache --speed` measures on the GPU, in this process."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moedoctor.bench.cache.speed import Host, Model

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
"""Variants of `moedoctor.bench.cache.speed.decode` and `expert_cache_misses`, in words."""

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
    complete: bool
    """False where it was interrupted or a part failed; `note` says which."""


def measure_speed(
    batch: int, capacities: Sequence[int], gpu: str, *, device: str = "cuda:0", model: Model | None = None
) -> Speed:
    """Decode through the restated cache of the PR and ours, at each capacity; at batch 1 the rest too.

    A part that fails leaves the others alone. After KeyboardInterrupt, which SIGTERM raises too, what is
    finished is given.
    """
    from moedoctor.bench.cache.limits import judge
    from moedoctor.bench.cache.speed import Host, Model

    model = model or Model()
    found: dict[str, list[dict[str, Any]]] = {}
    missing: list[str] = []
    try:
        host = Host.make(model, device)
        for name, part, measure in _parts(batch, capacities, device, model, host):
            began = time.monotonic()
            found.setdefault(name, [])
            missing.append(part)
            try:
                found[name] += measure()
                missing.pop()
            except Exception as error:
                if _was_interrupted(error):
                    raise KeyboardInterrupt from error
                traceback.print_exc()
                said = (str(error).splitlines() or [""])[0]
                missing[-1] += f" ({type(error).__name__}: {said})"
            print(f"moedoctor: {part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    except KeyboardInterrupt:
        missing.append("whatever comes next: interrupted")
    rows = found.pop("decode", [])
    limits = judge(rows, **found)
    note = (
        f"Speed: decode at batch {batch} through {model.layers} MoE layers of the shape of Qwen3-30B-A3B in "
        f"bfloat16, without attention; random weights, Zipf routing with drift; {gpu}. bus_us is what the "
        "bytes of the misses take at the rate of a pinned copy, speedup_bound the ratio if nothing else took "
        "time; recorded is the trace that ships with moedoctor. The steps that are timed lie where "
        "the PR's cache computes right, if it does at all; wrong_steps counts, by bookkeeping from empty "
        "caches, those of a longer part of the trace in which it computes with a wrong expert."
    )
    if missing:
        note += f" NOT MEASURED: {'; '.join(missing)}."
    return Speed(
        tuple(map(_in_words, rows)),
        {name: tuple(map(_in_words, some)) for name, some in found.items()},
        tuple(one.row() for one in limits),
        note,
        not missing,
    )


def _parts(
    batch: int, capacities: Sequence[int], device: str, model: Model, host: Host
) -> Iterator[tuple[str, str, Callable[[], list[dict[str, Any]]]]]:
    """(table, what is measured, the measurement that gives its rows), in the order of measurement."""
    from moedoctor.bench.cache.groups import group_cost
    from moedoctor.bench.cache.limits import MIN_SPEEDUP
    from moedoctor.bench.cache.replay import replay_speed
    from moedoctor.bench.cache.speed import decode, miss_bandwidth

    def decoded(capacity: int, **options: bool) -> Callable[[], list[dict[str, Any]]]:
        return lambda: decode(device, batch=batch, capacity=capacity, host=host, model=model, **options)

    for capacity in capacities:
        if capacity <= model.experts:
            yield "decode", f"decode with {capacity} slots", decoded(capacity)
    if batch != 1:
        return
    for capacity in capacities:
        if capacity in MIN_SPEEDUP:
            yield "recorded", f"the recorded trace with {capacity} slots", decoded(capacity, recorded=True)
    one_layer = replace(model, host_layers=1)
    yield "misses", "misses", lambda: miss_bandwidth(device, model=one_layer, host=host)
    yield "groups", "groups", lambda: group_cost(device, model=one_layer)["rows"]
    yield "replays", "replays", replay_speed


def _was_interrupted(error: BaseException) -> bool:
    """Whether `error` came up while a KeyboardInterrupt left, as the end of a broken capture does."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, KeyboardInterrupt):
        inner = inner.__context__
    return inner is not None


def _in_words(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "engine" not in row:
        return row
    rest = {key: value for key, value in row.items() if key != "engine"}
    return {"subject": SUBJECTS.get(row["engine"], row["engine"]), **rest}
