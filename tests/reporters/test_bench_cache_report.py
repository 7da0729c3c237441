"""The charts that a terminal gets below the table, and nobody else."""

from __future__ import annotations

import pytest

from moedoctor.bench.cache.replay import facts_of, replay_trace
from moedoctor.reporters.bench_cache import render, summary_line
from moedoctor.reporters.bench_cache_json import CacheBench, from_dict, is_cache_bench, to_dict
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


def test_a_terminal_gets_both_charts_and_a_file_none() -> None:
    pytest.importorskip("plotext")
    shown = render(BENCH, "table", width=80)
    assert shown.startswith(render(BENCH, "table").rstrip("\n"))
    assert "Hit rate over capacity" in shown
    assert "Tokens per second over capacity" in shown
    assert "Hit rate over capacity" not in render(BENCH, "table")
    assert render(BENCH, "json", width=80) == render(BENCH, "json")


def test_the_record_survives_json() -> None:
    document = to_dict(BENCH)
    assert is_cache_bench(document)
    assert from_dict(document) == BENCH


@pytest.mark.parametrize("document", [{}, [], None, {"bench": []}, {"bench": {"backends": []}}])
def test_other_documents_are_no_cache_bench(document: object) -> None:
    assert not is_cache_bench(document)


def test_the_summary_names_the_best_causal_policy_and_the_bound() -> None:
    rates = {(one.policy, one.capacity): one.hit_rate for one in BENCH.points}
    best = max(rates[name, 8] for name in ("lru", "lfu", "lfru", "aging"))
    assert f"{best:.1%} of at most {rates['belady', 8]:.1%}" in summary_line(BENCH)


def test_wrong_calls_would_be_said() -> None:
    from dataclasses import replace

    point = BENCH.points[0]
    wrong = replace(BENCH, points=(replace(point, stats=replace(point.stats, wrong=3)),))
    assert "WRONG: 3 calls" in render(wrong, "table")
    assert "WRONG" not in render(BENCH, "table")
