"""The report of `bench --cache`: JSON that reads back, charts, and the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moedoctor.bench.cache.replay import facts_of, replay_trace
from moedoctor.reporters.pages.bench_cache import (
    CacheBench,
    bench_page,
    summary_line,
    terminal_charts,
)
from moedoctor.reporters.table import to_text
from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

TRACE = zipf_trace(ZipfSettings(experts=16, top_k=2, layers=2, rows=40, streams=2))
SPEED = (
    {"subject": "ours", "capacity": 4, "tokens_per_second": 50.0},
    {"subject": "ours", "capacity": 8, "tokens_per_second": 80.0},
)
BENCH = CacheBench(
    trace="zipf",
    facts=facts_of(TRACE),
    made=TRACE.made,
    scope="layer",
    batch=None,
    points=tuple(replay_trace(TRACE, capacities=[4, 8])),
    environment={"gpu": None},
    speed=SPEED,
    speed_note="Speed: on a made-up GPU.",
)


def test_a_terminal_gets_both_charts() -> None:
    pytest.importorskip("plotext")
    charts = terminal_charts(BENCH, 80)
    assert "Hit rate over capacity" in charts
    assert "Tokens per second over capacity" in charts


def test_the_summary_names_the_best_causal_policy_and_the_bound() -> None:
    rates = {(point.policy, point.capacity): point.hit_rate for point in BENCH.points}
    best = max(rates[name, 8] for name in ("lru", "lfu", "lfru", "aging"))
    assert f"{best:.1%} of at most {rates['belady', 8]:.1%}" in summary_line(BENCH)


def test_wrong_calls_are_shown() -> None:
    point = BENCH.points[0]
    wrong = replace(BENCH, points=(replace(point, stats=replace(point.stats, wrong=3)),))
    assert "WRONG: 3 calls" in to_text(bench_page(wrong))
    assert "WRONG" not in to_text(bench_page(BENCH))
