"""The limits that the expert cache must reach: a figure on the wrong side refutes a limit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from moedoctor.bench.cache.limits import DEFAULT, judge
from moedoctor.bench.cache.speed import VARIANTS
from moedoctor.fixes.expert_cache import ExpertCache

PR = {"engine": "pr37190", "batch": 1, "capacity": 32, "gigabytes_a_step": 1.6, "bus_share": 0.7}
OURS = {
    "engine": "overlap",
    "batch": 1,
    "capacity": 32,
    "against": "pr37190",
    "gigabytes_a_step": 0.9,
    "bus_share": 0.9,
    "speedup_bound": 2.6,
    "one_graph": True,
}
FULL = {"engine": "resident", "batch": 8, "capacity": 128, "against": "uncached", "one_graph": True}


def _verdicts(decode: list[dict[str, Any]] = [], **rows: list[dict[str, Any]]) -> list[str]:  # noqa: B006
    return [row["verdict"] for row in judge(decode, **rows)]


@pytest.mark.parametrize(("speedup", "verdict"), [(2.0, "confirmed"), (1.99, "refuted")])
def test_twice_the_pr(speedup: float, verdict: str) -> None:
    first, graph = judge([PR, OURS | {"speedup": speedup}])
    assert (first["verdict"], first["measured"], first["limit"]) == (verdict, speedup, 2.0)
    assert "0.90 GB a step against 1.60" in first["remark"]
    assert "2.60" in first["remark"]
    assert "aging + packed + overlap + engine device: tokens per second over the PR's" in first["claim"]
    assert graph["verdict"] == "confirmed"


@pytest.mark.parametrize("fastest", [2.4, None])
def test_the_default_cache_is_compared_with_the_fastest(fastest: float | None) -> None:
    ours = OURS if fastest is None else OURS | {"speedup": fastest}
    default = OURS | {"engine": "device", "speedup": 1.57}
    elsewhere = default | {"capacity": 64, "speedup": 1.9}
    row, *_ = judge([PR, elsewhere, default, ours])
    assert (row.get("measured"), row["default_cache"]) == (fastest, 1.57)
    assert row["remark"].endswith("the default cache (lfru + engine device): 1.57")
    for unknown in ([], [default | {"against": "host"}], [elsewhere]):
        row, *_ = judge([PR, ours, *unknown])
        assert "default_cache" not in row
        assert row["remark"].endswith("the default cache (lfru + engine device): not measured")


def test_the_default_cache_has_the_default_options() -> None:
    options = {
        name: parameter.default for name, parameter in inspect.signature(ExpertCache).parameters.items()
    }
    assert options["policy"] == DEFAULT.policy
    assert options["packed"] is DEFAULT.packed is False
    assert inspect.signature(ExpertCache.groups).parameters["overlap"].default is DEFAULT.overlap is False
    assert DEFAULT in VARIANTS


def test_a_ratio_to_something_else_decides_nothing() -> None:
    first, _ = judge([OURS | {"speedup": 3.0, "against": "device"}])
    assert first["verdict"] == "untested"
    assert "measured" not in first
    assert _verdicts([OURS | {"speedup": 3.0, "batch": 8}]) == ["confirmed"]  # the graph alone


def test_the_recorded_trace_has_limits_of_its_own() -> None:
    rows = judge([PR, OURS | {"speedup": 2.5}], recorded=[PR, OURS | {"speedup": 1.9}])
    assert [(row["verdict"], "recorded" in row["claim"]) for row in rows] == [
        ("confirmed", False),
        ("refuted", True),
        ("confirmed", False),
    ]


def test_the_other_limits() -> None:
    assert _verdicts([FULL | {"speedup": 0.95}]) == ["confirmed", "confirmed"]
    assert _verdicts([FULL | {"speedup": 0.94, "one_graph": False}]) == ["refuted", "refuted"]
    misses = [
        {"engine": "pinned", "miss_gb_s": 50.0},
        {"engine": "device", "miss_gb_s": 46.0, "of_pinned": 0.92},
        {"engine": "host", "miss_gb_s": 44.0, "of_pinned": 0.88},
        {"engine": "packed", "miss_gb_s": 60.0, "of_pinned": 1.2},
    ]
    assert _verdicts(misses=misses) == ["confirmed", "refuted"]
    times = {"overhead": 0.1, "overhead_in_turn": 0.3, "us": 300.0, "us_in_turn": 350.0}
    groups = [{"groups": count, **times} for count in (2, 4, 8)]
    assert _verdicts(groups=groups) == ["refuted", "confirmed", "confirmed", *["refuted"] * 3]
    replays = [
        {"policy": "lru", "capacity": 16, "accesses_per_second": 2e6},
        {"policy": "lru", "capacity": 32, "accesses_per_second": 0.9e6},
        {"policy": "lfu", "capacity": 32, "accesses_per_second": 1e6},
    ]
    assert _verdicts(replays=replays) == ["refuted", "confirmed"]
