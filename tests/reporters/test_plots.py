"""Pictures are valid SVG, reproducible and labelled; a missing library gives a helpful error."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hostile import problem
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.reporters.plots import PlotError, Series, _legend, line_chart, log_ticks, terminal_chart

LINES = [
    Series("lru", [8, 16, 32], [0.2, 0.4, 0.7]),
    Series("lfru", [8, 16, 32], [0.25, 0.45, 0.72], low=[0.2, 0.4, 0.7], high=[0.3, 0.5, 0.75]),
    Series("optimum", [8, 16, 32], [0.4, 0.6, 0.8], bound=True),
]


def draw(path: Path, **more: object) -> str:
    pytest.importorskip("matplotlib")
    options: dict[str, object] = {"title": "Hit rate", "x_label": "slots", "y_label": "rate", "series": LINES}
    line_chart(path, **{**options, **more})  # type: ignore[arg-type]
    return path.read_text(encoding="utf-8")


def test_the_same_data_give_the_same_file_without_a_date(tmp_path: Path) -> None:
    first = draw(tmp_path / "a.svg", log_x=True, note="how")
    assert first == draw(tmp_path / "b.svg", log_x=True, note="how")
    assert "dc:date" not in first
    ET.fromstring(first)


def test_every_name_label_and_tick_is_in_the_picture(tmp_path: Path) -> None:
    text = draw(tmp_path / "a.svg", log_x=True, note="a remark")
    comments = [line for line in text.splitlines() if line.strip().startswith("<!--")]
    labels = " ".join(comments)
    for word in ("lru", "lfru", "optimum", "Hit rate", "slots", "rate", "a remark", " 8 ", " 16 ", " 32 "):
        assert word in labels, word


def test_other_data_give_another_picture(tmp_path: Path) -> None:
    other = [Series("lru", [8, 16, 32], [0.2, 0.4, 0.6]), *LINES[1:]]
    assert draw(tmp_path / "a.svg") != draw(tmp_path / "b.svg", series=other)


def test_markup_in_a_name_stays_text(tmp_path: Path) -> None:
    text = draw(tmp_path / "a.svg", series=[Series("<script>x</script>", [1], [1])])
    assert not [element for element in ET.fromstring(text).iter() if element.tag.endswith("script")]


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
        ([20.0, 500.0], [20, 50, 100, 200, 500]),
        ([1.0], [1]),
        ([0.03, 0.4], [0.02, 0.05, 0.1, 0.2, 0.5]),
        ([3.0, 70000.0], [1, 10, 100, 1000, 10000, 100000]),
    ],
)
def test_a_logarithmic_axis_has_ticks_around_its_lines(
    tmp_path: Path, values: list[float], ticks: list[float]
) -> None:
    line = Series("a line", list(range(1, len(values) + 1)), values)
    assert log_ticks([line]) == pytest.approx(ticks)
    text = draw(tmp_path / "a.svg", series=[line], log_y=True)
    for tick in ticks:
        assert f"<!-- {tick:g} -->" in text


def test_a_logarithmic_axis_has_no_place_for_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for 0"):
        draw(tmp_path / "a.svg", log_y=True, series=[Series("a line", [1, 2], [0.0, 1.0])])


def test_no_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="series"):
        draw(tmp_path / "a.svg", series=[])


def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "plotext", None)
    with pytest.raises(PlotError, match=r"needs matplotlib, .*: pip install matplotlib"):
        line_chart(tmp_path / "a.svg", title="t", x_label="x", y_label="y", series=LINES)
    with pytest.raises(PlotError, match="needs plotext"):
        terminal_chart(title="t", x_label="x", y_label="y", series=LINES)


@pytest.mark.parametrize("colour", [True, False])
def test_the_terminal_chart_names_its_lines_and_fits(colour: bool) -> None:
    pytest.importorskip("plotext")
    text = terminal_chart(
        title="Hit rate", x_label="slots", y_label="rate", series=LINES, log_x=True, width=70, colour=colour
    )
    for word in ("Hit rate", "lru", "lfru", "optimum", "slots", "32"):
        assert word in text
    if not colour:
        assert "\x1b" not in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= 70
    assert plain.splitlines()[-1].split() == (
        ["━━", "lru", "━━", "lfru", "━━", "optimum"] if colour else ["o", "lru", "x", "lfru", "+", "optimum"]
    )


@given(st.lists(st.text("abc ", min_size=1, max_size=30), min_size=1, max_size=8))
def test_names_below_a_terminal_chart_fit(names: list[str]) -> None:
    lines = _legend([("x", name, len(name) + 1) for name in names], 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(lines) == "".join(f"  x {name}" for name in names)


def test_a_long_name_is_wrapped_and_a_long_note_moves_the_axes_up(tmp_path: Path) -> None:
    short = draw(tmp_path / "a.svg", note="one line")
    text = draw(
        tmp_path / "b.svg",
        note="a note of three lines " * 15,
        series=[Series("ours: aging, packed, hits computed during copies", [1, 2], [1.0, 2.0])],
    )
    assert "<!-- ours: aging, packed, -->" in text
    assert "<!-- hits computed during -->" in text

    def bottom(svg: str) -> float:
        return float(re.search(r'<g id="axes_1">\s*<g id="patch_2">\s*<path d="M [\d.]+ ([\d.]+)', svg)[1])

    assert bottom(text) < bottom(short) - 15


def test_the_terminal_chart_has_a_logarithmic_axis() -> None:
    pytest.importorskip("plotext")
    line = Series("a line", [1, 2, 4], [20.0, 90.0, 800.0])
    text = terminal_chart(
        title="t", x_label="x", y_label="y", series=[line], log_y=True, width=70, colour=False
    )
    ticks = [line.split("┤")[0].strip() for line in text.splitlines() if "┤" in line]
    assert ticks == ["1000", "500", "200", "100", "50", "20"]


def test_names_from_a_report_are_plain_text(tmp_path: Path) -> None:
    """They may hold what a terminal acts on, and what matplotlib would read as mathematics."""
    pytest.importorskip("plotext")
    for text in ("$x$ $\\frac{$", "\x1b]0;t\x07a\n\x9b2J\u202eb\ud800 --> <b>"):
        line = Series(text, [1, 2], [1, 2])
        assert not problem(draw(tmp_path / "a.svg", title=text, note=text, series=[line]))
        options = {"title": text, "x_label": "x", "y_label": "y", "series": [line], "colour": False}
        assert not problem(terminal_chart(**options))  # type: ignore[arg-type]
