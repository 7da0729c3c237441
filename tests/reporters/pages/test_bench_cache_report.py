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
    facts = {"source": "zipf", **asdict(FACTS), "made": TRACE.made}
    rows = [point.to_figures(FACTS) for point in points]
    return {"trace": facts, "scope": "layer", "batch": None, "points": rows}


def show(points: list[ReplayPoint]) -> str:
    return to_text(make_bench_page(Bench.from_figures("cache", figures(points), {"gpu": None})))


def test_hit_rate_is_drawn_against_the_optimum() -> None:
    (rates,) = list_charts(figures())
    assert [line.name for line in rates.series if line.bound] == ["Belady (optimum)"]
    assert " reaches " in rates.title


def test_calls_that_overflow_have_no_optimum_to_reach() -> None:
    points = [replace(point, overflowing=1) for point in POINTS]
    (rates,) = list_charts(figures(points))
    assert rates.title == "Hit rate over capacity"
    assert "of at most" not in summarize(figures(points))


def test_wrong_calls_are_shown() -> None:
    point = POINTS[0]
    wrong = replace(point, stats=replace(point.stats, wrong=3))
    assert "WRONG: 3 calls" in show([wrong])
    assert "WRONG" not in show(POINTS)
