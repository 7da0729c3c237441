"""What `moedoctor bench --cache` measured, as a record and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import moedoctor
from moedoctor.bench.cache.replay import ReplayPoint, TraceFacts
from moedoctor.results import SCHEMA_VERSION, ReportError, from_json, plain

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
    """Return the record that `to_dict` wrote. Raises ReportError that names what is wrong."""
    try:
        cache = document["bench"]["cache"]
        points = [
            {
                **point,
                "stats": {
                    "calls": point["layer_calls"],
                    "hits": point["hits"],
                    "misses": point["misses"],
                    "wrong": point["wrong_calls"],
                },
                "overflowing": point["overflowing_calls"],
            }
            for point in cache["points"]
        ]
        record = {
            **cache,
            "trace": cache["trace"]["source"],
            "facts": cache["trace"],
            "made": cache["trace"]["made"],
            "points": points,
            "environment": document["environment"],
            "exit_code": document["summary"]["exit_code"],
        }
    except (KeyError, TypeError) as error:
        raise ReportError("report", f"is not from `bench --cache`: {error}") from None
    return from_json(CacheBench, record)


def is_cache_bench(document: Any) -> bool:
    """Whether a JSON report is one of `bench --cache`."""
    bench = document.get("bench") if isinstance(document, dict) else None
    return isinstance(bench, dict) and "cache" in bench
