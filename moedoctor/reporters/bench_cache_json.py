"""What `moedoctor bench --cache` measured, as a record and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import moedoctor
from moedoctor.bench.cache.replay import ReplayPoint, TraceFacts
from moedoctor.fixes.eviction import CacheStats
from moedoctor.json_value import Node, plain
from moedoctor.results import SCHEMA_VERSION

_VERDICTS = ("proved", "found", "absent", "failed", "skipped", "error")


@dataclass(frozen=True)
class CacheBench:
    """What `moedoctor bench --cache` measured."""

    trace: str
    """The file, or what a synthetic trace was made of."""
    facts: TraceFacts
    made: Mapping[str, Any]
    """How the trace was made."""
    scope: str
    batch: int | None
    """Sequences side by side; None for the trace's own calls."""
    points: tuple[ReplayPoint, ...]
    environment: Mapping[str, Any]
    speed: tuple[Mapping[str, Any], ...] = ()
    """Measured on a GPU: ``subject``, ``capacity``, ``tokens_per_second`` and more; empty where none was."""
    measured: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    """What was measured besides decode, by name."""
    limits: tuple[Mapping[str, Any], ...] = ()
    """What the cache is meant to reach: ``claim``, ``verdict``, ``measured``, ``limit``."""
    speed_note: str = ""
    """On what model and machine the speed was measured, or why it was not."""
    exit_code: int = 0


def to_dict(bench: CacheBench) -> dict[str, Any]:
    """The report as plain JSON values: the shape of every report, with `bench` in addition."""
    points = [
        {
            "policy": one.policy,
            "capacity": one.capacity,
            "share_resident": one.capacity / bench.facts.num_experts,
            "hit_rate": one.hit_rate,
            "hits": one.stats.hits,
            "misses": one.stats.misses,
            "wrong_calls": one.stats.wrong,
            "overflowing_calls": one.overflowing,
            "layer_calls": one.stats.calls,
            "misses_per_token": one.stats.misses / bench.facts.tokens,
            "hit_rate_by_layer": list(one.hit_rate_by_layer),
        }
        for one in bench.points
    ]
    document = {
        "schema_version": SCHEMA_VERSION,
        "moedoctor": moedoctor.__version__,
        "command": "bench",
        "environment": dict(bench.environment),
        "scenarios": [],
        "bench": {
            "cache": {
                "trace": {"source": bench.trace, **dataclasses.asdict(bench.facts), "made": dict(bench.made)},
                "scope": bench.scope,
                "batch": bench.batch,
                "replay_unit": "call",
                "points": points,
                "speed": [dict(row) for row in bench.speed],
                "measured": {name: [dict(row) for row in rows] for name, rows in bench.measured.items()},
                "limits": [dict(row) for row in bench.limits],
                "speed_note": bench.speed_note,
            }
        },
        "summary": {**dict.fromkeys(_VERDICTS, 0), "exit_code": bench.exit_code},
    }
    result: dict[str, Any] = plain(document)
    return result


def from_dict(document: Any) -> CacheBench:
    """The record that `to_dict` wrote. Raises ShapeError (a ValueError) that names what is wrong."""
    root = Node(document, ())
    cache = root["bench"]["cache"]
    trace = cache["trace"]
    counts = ("layers", "num_experts", "top_k", "tokens", "calls", "most_experts_a_call")
    shares = ("experts_a_call", "reuse", "experts_for_90")
    facts = TraceFacts(
        model=trace["model"].text(),
        **{name: trace[name].integer() for name in counts},
        **{name: trace[name].number() for name in shares},  # type: ignore[arg-type]
    )
    batch = cache["batch"]
    return CacheBench(
        trace=trace["source"].text(),
        facts=facts,
        made=trace["made"].mapping(),
        scope=cache["scope"].text(),
        batch=None if batch.value is None else batch.integer(minimum=1),
        points=tuple(_point(one) for one in cache["points"].elements()),
        environment=root["environment"].mapping(),
        speed=_rows(cache["speed"]),
        measured={name: _rows(cache["measured"][name]) for name in cache["measured"].mapping()},
        limits=_rows(cache["limits"]),
        speed_note=cache["speed_note"].text(),
        exit_code=root["summary"]["exit_code"].integer(),
    )


def _rows(node: Node) -> tuple[Mapping[str, Any], ...]:
    return tuple(row.mapping() for row in node.elements())


def is_cache_bench(document: Any) -> bool:
    """Whether a JSON report is one of `bench --cache`."""
    bench = document.get("bench") if isinstance(document, dict) else None
    return isinstance(bench, dict) and "cache" in bench


def _point(node: Node) -> ReplayPoint:
    counts = (node[name].integer() for name in ("layer_calls", "hits", "misses", "wrong_calls"))
    return ReplayPoint(
        policy=node["policy"].text(),
        capacity=node["capacity"].integer(minimum=1),
        stats=CacheStats(*counts),
        overflowing=node["overflowing_calls"].integer(),
        hit_rate_by_layer=tuple(one.number() for one in node["hit_rate_by_layer"].elements()),
    )
