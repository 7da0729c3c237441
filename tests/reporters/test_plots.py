"""Pictures are valid SVG, reproducible and labeled; a missing library gives a helpful error."""

import itertools
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import problem
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.plots import _spread, draw_svg, place_log_ticks
from moedoctor.reporters.plots import draw as draw_file
from moedoctor.text import join_lines

LINES = (
    Series("lru", [8, 16, 32], [0.2, 0.4, 0.7]),
    Series("lfru", [8, 16, 32], [0.25, 0.45, 0.72], low=[0.2, 0.4, 0.7], high=[0.3, 0.5, 0.75]),
    Series("optimum", [8, 16, 32], [0.4, 0.6, 0.8], bound=True),
)
CHART = Chart("rate", "lfru is best", x_label="slots", y_label="rate", series=LINES, caption="a remark")


def draw(**more: object) -> str:
    pytest.importorskip("matplotlib")
    return draw_svg(replace(CHART, **more), caption=True)  # type: ignore[arg-type]


def words(drawn: str) -> list[str]:
    """Return the texts of a picture; they are text, not outlines."""
    return ["".join(element.itertext()).strip() for element in elements(drawn, "text")]


def elements(drawn: str, tag: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(drawn).iter() if element.tag.endswith(f"}}{tag}")]


def styles(drawn: str, key: str) -> set[str]:
    """Return the values of a property of the lines' paths, wide as lines of data are."""
    found = [element.get("style", "") for element in elements(drawn, "path")]
    lines = [style for style in found if "stroke-width: 1.6" in style]
    return {value for style in lines for value in re.findall(rf"{key}: ([^;]+)", style)}


def test_the_same_data_give_the_same_file_without_a_date(tmp_path: Path) -> None:
    first = draw(log_x=True)
    draw_file(replace(CHART, log_x=True), tmp_path / "a.svg")
    assert first == (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "dc:date" not in first


def test_every_name_label_and_tick_is_text_in_the_picture() -> None:
    shown = words(draw(log_x=True))
    assert {"lru", "lfru", "optimum", "lfru is best", "slots (log scale)", "rate", "a remark"} <= set(shown)
    assert {"8", "16", "32"} <= set(shown)
    assert "a remark" not in words(draw_svg(CHART, caption=False))


def test_lines_differ_in_more_than_colour_and_a_spread_has_bars() -> None:
    plain = replace(CHART, series=tuple(replace(line, low=(), high=(), bound=False) for line in LINES))
    drawn = draw_svg(plain, caption=False)
    assert len(styles(drawn, "stroke")) == 3
    assert len(styles(drawn, "stroke-dasharray")) == 2  # the first line is solid
    markers = {path.get("d") for path in elements(drawn, "path") if path.get("id", "").startswith("m")}
    assert len(markers) == 5  # three lines, and the ticks of two axes
    assert len(elements(draw(), "path")) > len(elements(drawn, "path"))


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(8, 30)), min_size=1, max_size=8))
def test_no_label_covers_another(labels: list[tuple[float, float]]) -> None:
    labels = sorted(labels)
    wanted, heights = [label[0] for label in labels], [label[1] for label in labels]
    places = _spread(wanted, heights, 0.0, 300.0)
    for index in range(len(places) - 1):
        assert places[index + 1] - places[index] > (heights[index] + heights[index + 1]) / 2 - 1e-6
    # Labels that have room stay where they are wanted.
    apart = [(a + b) / 2 for a, b in itertools.pairwise(heights)]
    if all(right - left >= need for left, right, need in zip(wanted, wanted[1:], apart, strict=False)):
        assert places == pytest.approx(wanted) or wanted[-1] + sum(apart) > 300


@pytest.mark.parametrize(
    "values",
    [
        {"x": [], "y": []},
        {"x": [1], "y": [1, 2]},
        {"x": [1], "y": [math.nan]},
        {"x": [1], "y": [math.inf]},
        {"x": [1], "y": [1], "low": [1]},
        {"x": [1], "y": [1], "low": [1, 2], "high": [1, 2]},
    ],
)
def test_values_that_cannot_be_drawn_are_refused(values: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="a line"):
        Series("a line", **values)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([30.0, 800.0, 9000.0], [10, 100, 1000, 10000]),
        ([1.0], [1]),
        ([0.03, 0.4], [0.02, 0.05, 0.1, 0.2, 0.5]),
    ],
)
def test_a_logarithmic_axis_has_ticks_around_its_lines(values: list[float], ticks: list[float]) -> None:
    line = Series("a line", list(range(1, len(values) + 1)), values)
    assert place_log_ticks(line.y) == pytest.approx(ticks)
    shown = words(draw(series=(line,), log_y=True))
    inside = [tick for tick in ticks if min(values) / 1.4 <= tick <= max(values) * 1.4]
    assert inside
    assert {f"{tick:g}" for tick in inside} <= set(shown)


def test_a_picture_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 0"):
        draw(log_y=True, series=(Series("a line", [1, 2], [0.0, 1.0]),))
    with pytest.raises(ValueError, match="series"):
        draw(series=())


@pytest.mark.parametrize(
    "text", ["$x$ $\\frac{$", "\x1b]0;t\x07a\n\x9b2J\u202eb\ud800 -->", "<script>x</script>"]
)
def test_names_from_a_report_are_plain_text(text: str) -> None:
    """They may hold what a terminal acts on, and what matplotlib would read as mathematics."""
    hostile = replace(CHART, title=text, caption=text, series=(Series(text, [1, 2], [1, 2]),))
    drawn = draw_svg(hostile, caption=True)
    assert not problem(drawn)
    assert not elements(drawn, "script")
    assert words(drawn).count(join_lines(text)) == 3
