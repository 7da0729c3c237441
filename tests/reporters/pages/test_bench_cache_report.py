"""The report of `bench --cache`: JSON that reads back, charts, and the page."""

from dataclasses import asdict, replace
from typing import Any

from moedoctor.bench.cache.replay import ReplayPoint, collect_trace_facts, replay_trace
from moedoctor.reporters.pages.bench import Bench, make_bench_page
from moedoctor.reporters.pages.bench_cache import list_charts, summarize
from moedoctor.reporters.table import to_text
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace

TRACE = draw_zipf_trace(ZipfSettings(experts=16, top_k=2, layers=2, rows=40, streams=2))
FACTS = collect_trace_facts(TRACE)
POINTS = replay_trace(TRACE, capacities=[4, 8])


def figures(points: list[ReplayPoint] = POINTS) -> dict[str, Any]:
    return {
        "trace": {"source": "zipf", **asdict(FACTS), "made": TRACE.made},
        "scope": "layer",
        "batch": None,
        "points": [point.to_figures(FACTS) for point in points],
    }


def show(points: list[ReplayPoint]) -> str:
    return to_text(make_bench_page(Bench("cache", figures(points), {"gpu": None})))


def test_hit_rate_is_drawn_against_the_optimum() -> None:
    (rates,) = list_charts(figures())
    assert [line.name for line in rates.series if line.bound] == ["Belady (optimum)"]
    shares = {
        point.policy: min(
            each.hit_rate / best.hit_rate
            for each in POINTS
            for best in POINTS
            if (each.policy, best.policy, each.capacity) == (point.policy, "belady", best.capacity)
        )
        for point in POINTS
        if point.policy != "belady"
    }
    nearest = max(shares, key=lambda name: shares[name])
    assert rates.title.startswith(f"{nearest} reaches {shares[nearest]:.0%} ")


def test_calls_that_overflow_have_no_optimum_to_reach() -> None:
    points = [replace(point, overflowing=1) for point in POINTS]
    (rates,) = list_charts(figures(points))
    assert rates.title == "Hit rate over capacity"
    assert "of at most" not in summarize(figures(points))


def test_the_summary_names_the_best_causal_policy_and_the_bound() -> None:
    rates = {(point.policy, point.capacity): point.hit_rate for point in POINTS}
    best = max(rates[name, 8] for name in ("lru", "lfu", "lfru", "aging"))
    assert f"{best:.1%} of at most {rates['belady', 8]:.1%}" in summarize(figures())


def test_wrong_calls_are_shown() -> None:
    point = POINTS[0]
    wrong = replace(point, stats=replace(point.stats, wrong=3))
    assert "WRONG: 3 calls" in show([wrong])
    assert "WRONG" not in show(POINTS)
