"""The report of `bench --cache`: JSON that reads back, charts, and the page."""

from __future__ import annotations

from dataclasses import replace

from moedoctor.bench.cache.replay import collect_trace_facts, replay_trace
from moedoctor.reporters.pages.bench import make_bench_page
from moedoctor.reporters.pages.bench_cache import CacheBench, list_charts, summarize
from moedoctor.reporters.table import to_text
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace

TRACE = draw_zipf_trace(ZipfSettings(experts=16, top_k=2, layers=2, rows=40, streams=2))
BENCH = CacheBench(
    trace="zipf",
    facts=collect_trace_facts(TRACE),
    made=TRACE.made,
    scope="layer",
    batch=None,
    points=tuple(replay_trace(TRACE, capacities=[4, 8])),
    environment={"gpu": None},
)


def test_hit_rate_is_drawn_against_the_optimum() -> None:
    (rates,) = list_charts(BENCH)
    assert [line.name for line in rates.series if line.bound] == ["Belady (optimum)"]
    shares = {
        point.policy: min(
            each.hit_rate / best.hit_rate
            for each in BENCH.points
            for best in BENCH.points
            if (each.policy, best.policy, each.capacity) == (point.policy, "belady", best.capacity)
        )
        for point in BENCH.points
        if point.policy != "belady"
    }
    nearest = max(shares, key=lambda name: shares[name])
    assert rates.title.startswith(f"{nearest} reaches {shares[nearest]:.0%} ")


def test_without_an_optimum_no_title_names_it() -> None:
    points = tuple(point for point in BENCH.points if point.policy != "belady")
    (rates,) = list_charts(replace(BENCH, points=points))
    assert rates.title == "Hit rate over capacity"
    assert not [line for line in rates.series if line.bound]


def test_calls_that_overflow_have_no_optimum_to_reach() -> None:
    points = tuple(replace(point, overflowing=1) for point in BENCH.points)
    (rates,) = list_charts(replace(BENCH, points=points))
    assert rates.title == "Hit rate over capacity"
    assert "of at most" not in summarize(replace(BENCH, points=points))


def test_the_summary_names_the_best_causal_policy_and_the_bound() -> None:
    rates = {(point.policy, point.capacity): point.hit_rate for point in BENCH.points}
    best = max(rates[name, 8] for name in ("lru", "lfu", "lfru", "aging"))
    assert f"{best:.1%} of at most {rates['belady', 8]:.1%}" in summarize(BENCH)


def test_wrong_calls_are_shown() -> None:
    point = BENCH.points[0]
    wrong = replace(BENCH, points=(replace(point, stats=replace(point.stats, wrong=3)),))
    assert "WRONG: 3 calls" in to_text(make_bench_page(wrong))
    assert "WRONG" not in to_text(make_bench_page(BENCH))
