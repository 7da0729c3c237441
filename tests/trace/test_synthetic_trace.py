"""Synthetic routing: repeatable, with the documented distribution, one-line errors for bad settings."""

from collections import Counter

import pytest

from moedoctor.trace.format import TraceError
from moedoctor.trace.synthetic import ZipfSettings, draw_zipf_trace


def test_the_seed_determines_the_trace() -> None:
    settings = ZipfSettings(experts=16, top_k=3, layers=2, rows=40, streams=3)
    first, again = draw_zipf_trace(settings), draw_zipf_trace(settings)
    assert list(first.topk_ids) == list(again.topk_ids)
    other = draw_zipf_trace(ZipfSettings(experts=16, top_k=3, layers=2, rows=40, streams=3, seed=1))
    assert list(first.topk_ids) != list(other.topk_ids)
    assert sum(first.stream_rows) == 40
    assert all(len(call) == 3 for call in first.list_calls(1))


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
def test_single_experts_are_drawn_with_zipf_weights(skew: float) -> None:
    settings = ZipfSettings(experts=4, top_k=1, layers=1, rows=8000, streams=1, skew=skew, drift=0.0)
    counts = sorted(Counter(draw_zipf_trace(settings).topk_ids).values(), reverse=True)
    weights = [1 / rank**skew for rank in range(1, 5)]
    for count, weight in zip(counts, weights, strict=True):
        assert count / 8000 == pytest.approx(weight / sum(weights), abs=0.02)


def test_drift_changes_which_experts_are_popular() -> None:
    def moved(drift: float) -> bool:
        settings = ZipfSettings(experts=32, top_k=2, layers=1, rows=4000, streams=1, skew=2.0, drift=drift)
        ids = draw_zipf_trace(settings).topk_ids
        return Counter(ids[:1000]).most_common(1)[0][0] != Counter(ids[-1000:]).most_common(1)[0][0]

    assert not moved(0.0)
    assert moved(1.0)


def test_settings_are_read_from_text() -> None:
    assert ZipfSettings.parse("zipf") == ZipfSettings()
    expected = ZipfSettings(experts=64, skew=1.5, seed=7)
    assert ZipfSettings.parse("zipf:experts=64, skew=1.5,seed=7") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipf:colour=3", "'colour=3' is none of experts"),
        ("zipf:experts=many", "experts is 'many', expected a number"),
        ("zipf:experts=0", "experts is 0"),
        ("zipf:top_k=200", "top_k up to experts"),
        ("zipf:skew=nan", "skew from 0 to 10"),
        ("zipf:rows=1000000000", "expected fewer rows"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        ZipfSettings.parse(text)
