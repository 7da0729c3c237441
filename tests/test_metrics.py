"""Metrics: which figures are compared, which way is better, and how tolerances are written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.comparison import Tolerance, group_of, judge_metric, metrics

LOWER = ("kernel_us", "load_ms", "start_seconds", "ours_vllm_ratio")
HIGHER = ("copy_gb_s", "tokens_per_second")
positive = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("kernel_us", "latency"),
        ("rows[0].load_ms", "latency"),
        ("start_seconds", "latency"),
        ("ours_vllm_ratio", "ratio"),
        ("copy_gb_s", "bandwidth"),
        ("tokens_per_second", "throughput"),
        ("rows_with_duplicates", None),
        ("kernel_us.spread", None),
        ("seconds", None),
        ("bonus", None),
        ("status", None),
    ],
)
def test_the_end_of_the_name_tells_the_group(name: str, group: str | None) -> None:
    assert group_of(name) == group


def test_metrics_are_found_inside_mappings_and_lists() -> None:
    evidence = {
        "kernel_us": 3,
        "rows": [{"tokens": 1, "kernel_us": 2.5}, {"kernel_us": "nan"}],
        "ours": {"vllm_ratio": 0.6, "name": "x"},
        "note_us": "fast",
        "flag_us": True,
        "samples_us": [1.0, 2.0],
        "missing_us": None,
    }
    found = {"kernel_us": 3, "rows[0].kernel_us": 2.5, "rows[1].kernel_us": "nan", "ours.vllm_ratio": 0.6}
    assert metrics(evidence) == found


@given(st.sampled_from(LOWER + HIGHER), positive, st.floats(0.06, 3), st.booleans())
def test_direction_follows_the_name(name: str, baseline: float, change: float, up: bool) -> None:
    current = baseline * (1 + change) if up else baseline / (1 + change)
    judged = judge_metric(name, baseline, current, Tolerance(0.05))
    assert judged is not None
    assert judged[0] == ("regression" if up == (name in LOWER) else "improvement")


@given(st.sampled_from(LOWER + HIGHER), positive, st.floats(-1, 1), st.floats(0, 0.9))
def test_within_the_tolerance_nothing_is_said(name: str, baseline: float, share: float, limit: float) -> None:
    assert judge_metric(name, baseline, baseline * (1 + share * limit), Tolerance(limit)) is None


def test_the_reason_names_the_change_and_the_tolerance() -> None:
    assert judge_metric("kernel_us", 2.0, 2.5, Tolerance(0.025)) == (
        "regression",
        "25.0% higher, tolerated 2.5%",
    )
    assert judge_metric("copy_gb_s", 50.0, 40.0, Tolerance()) == ("regression", "20.0% lower, tolerated 5%")
    assert judge_metric("kernel_us", 100.0, 105.0, Tolerance(0.05)) is None
    assert judge_metric("kernel_us", 1.0, 1.05, Tolerance(0.05)) is None


def test_figures_without_a_usable_baseline() -> None:
    lost = judge_metric("kernel_us", 2.0, "nan", Tolerance())
    assert lost is not None
    assert lost[0] == "regression"
    for baseline, current in ((0.0, 1.0), (-1.0, 1.0), ("nan", 1.0), ("nan", "inf")):
        judged = judge_metric("kernel_us", baseline, current, Tolerance())
        assert judged is not None
        assert judged[0] == "note"
    assert judge_metric("kernel_us", "nan", "nan", Tolerance()) is None
    assert judge_metric("kernel_us", 0, 0, Tolerance()) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5%", Tolerance(0.05)),
        (" 2.5 % ", Tolerance(0.025)),
        ("0%", Tolerance(0.0)),
        ("latency:5%,ratio:2%", Tolerance(by_key={"latency": 0.05, "ratio": 0.02})),
        (("3%", "kernel_us=10%"), Tolerance(0.03, {"kernel_us": 0.1})),
        ("rows[0].kernel_us = 10%", Tolerance(by_key={"rows[0].kernel_us": 0.1})),
    ],
)
def test_tolerances_are_read(text: str | tuple[str, ...], expected: Tolerance) -> None:
    read = Tolerance.parse(text)
    assert read.default == pytest.approx(expected.default)
    assert dict(read.by_key) == pytest.approx(dict(expected.by_key))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tolerance '': expected a percentage such as 5%"),
        ("5", "tolerance '5': expected a percentage"),
        ("-5%", "tolerance '-5%': expected a percentage"),
        ("nan%", "expected a percentage"),
        ("latency:5%,", "tolerance '': expected"),
        ("latency:", "tolerance 'latency:': expected"),
        ("2000%", "expected 0% to 1000%"),
        ("latncy:5%", "unknown metric latncy, expected one of latency, ratio, bandwidth, throughput"),
        ("5%,6%", "the general tolerance is given twice"),
        ("ratio:5%,ratio=6%", "ratio is given twice"),
        ("9" * 5000 + "%", "expected a percentage"),
    ],
)
def test_bad_tolerances_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="tolerance") as caught:
        Tolerance.parse(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_most_exact_tolerance_counts() -> None:
    tolerance = Tolerance.parse("1%,latency:2%,kernel_us:3%,rows[0].kernel_us:4%")
    limits = [tolerance.limit(name) for name in ("a_ratio", "a_us", "x.kernel_us", "rows[0].kernel_us")]
    assert limits == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert math.isclose(Tolerance().limit("a_us"), 0.05)
