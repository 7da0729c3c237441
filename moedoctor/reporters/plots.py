"""Line charts as SVG files by matplotlib, which the extra ``moedoctor[plots]`` brings."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moedoctor.processes.files import write
from moedoctor.reporters.chart import Chart, Series
from moedoctor.text import explain_missing_package, join_lines

COLORS = ("#0060a0", "#b34700", "#007a55", "#9c3f7c", "#1b7893", "#8a6100", "#5b4b9a", "#6b5a2b")
"""Distinct for people with any kind of color vision, and dark enough for text on white."""
INK, QUIET, GRID = "#1f2328", "#59636e", "#e3e6ea"
_SHAPES = "os^DvPX*"
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (7, 2, 2, 2)), (0, (2, 1)))
_BOUND_DASHES: tuple[Any, ...] = ((0, (1, 1.5)), (0, (1, 4)), (0, (1, 1, 1, 1, 1, 5)), (0, (9, 2)))
_WIDTH, _LEFT, _TOP, _BOTTOM, _LINE, _LETTER = 7.6, 0.88, 0.23, 0.62, 0.145, 0.083
_PLOT = 3.3
_NAME_POINTS = 10.0
_LABEL, _TITLE, _NOTE = 24, 72, 116
"""Inches, points, and letters a line: of a name at a line's end, of the title, of the caption."""
_MOST_TICKS = 8


class PlotError(Exception):
    """No picture can be made; one line says why and what to do."""


def draw(chart: Chart, path: Path) -> None:
    """Write the chart with its caption to the SVG file `path`, whole or not at all.

    Raises PlotError without matplotlib, ValueError for 0 or less on a logarithmic axis, OutputError if the
    file cannot be written.
    """
    write(path, draw_svg(chart, caption=True))


def draw_svg(chart: Chart, *, caption: bool) -> str:
    """Return the chart as an SVG file with real text; the same chart gives the same text.

    With its caption it can be shown alone, on white; without it, it is for a page. Every line has a color, a
    marker and dashes of its own, and its name at its end. Raises PlotError without matplotlib, ValueError for
    0 or less on a logarithmic axis.
    """
    try:
        matplotlib, figures = map(importlib.import_module, ("matplotlib", "matplotlib.figure"))
    except ImportError:
        raise PlotError(explain_missing_package("matplotlib", "plots")) from None
    matplotlib.use("svg")
    style = {
        # The ids in two pictures of one page must differ.
        "svg.hashsalt": join_lines(f"moedoctor {chart.name} {chart.title}"),
        "svg.fonttype": "none",
        # DejaVu comes with matplotlib, so all machines measure the same letters; Verdana is as wide.
        "font.family": "DejaVu Sans",
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": INK,
        **{f"{axis}tick.{part}": QUIET for axis in "xy" for part in ("color", "labelcolor")},
        "axes.edgecolor": QUIET,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    names = ["\n".join(textwrap.wrap(line.name, _LABEL)) for line in chart.series]
    title = textwrap.wrap(join_lines(chart.title), _TITLE)
    note = textwrap.wrap(join_lines(chart.caption), _NOTE) if caption else []
    height = _PLOT + _TOP * len(title) + 0.12 + _BOTTOM + _LINE * len(note)
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=(_WIDTH, height))
        letters = max(len(part) for name in names for part in name.split("\n"))
        right = _WIDTH - _LEFT - letters * _LETTER - 0.2
        bottom = _BOTTOM + _LINE * len(note)
        axes = figure.add_axes((_LEFT / _WIDTH, bottom / height, right / _WIDTH, _PLOT / height))
        _fill(axes, chart)
        axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # from here on nothing moves
        _label_lines(axes, chart.series, names)
        top = 1 - 0.06 / height
        figure.text(0.12 / _WIDTH, top, "\n".join(title), fontsize=12, fontweight="bold", va="top")
        if note:
            figure.text(0.12 / _WIDTH, 0.08 / height, "\n".join(note), fontsize=8, color=QUIET, va="bottom")
        if not caption:
            figure.set_facecolor("none")
            axes.set_facecolor("none")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _shorten(text.getvalue())


def _shorten(drawn: str) -> str:
    """Return the same picture in fewer characters: one font for all texts, tenths of a point, no groups."""

    def shorten_tag(tag: re.Match[str]) -> str:
        fewer = re.sub(r"(\.\d)\d+", r"\1", re.sub(r"\s+", " ", tag[0]))
        return re.sub(r"font-family: 'DejaVu Sans'; | transform=\"rotate\(-0 [^\"]*\"", "", fewer)

    drawn = re.sub(r"</?g\b[^<>]*>", "", drawn)  # matplotlib's groups have a name, and cut off nothing here
    drawn = re.sub(r"<\w[^<>]*>", shorten_tag, re.sub(r">\s+<", ">\n<", drawn))
    return drawn.replace("<svg ", "<svg font-family=\"'DejaVu Sans', Verdana, sans-serif\" ", 1)


def _fill(axes: Any, chart: Chart) -> None:
    """Draw the lines, their spread and the axes."""
    for line, look in zip(chart.series, _choose_looks(chart.series), strict=True):
        if line.low:
            below = [value - low for value, low in zip(line.y, line.low, strict=True)]
            above = [high - value for value, high in zip(line.y, line.high, strict=True)]
            spread = [[max(0.0, part) for part in parts] for parts in (below, above)]
            axes.errorbar(line.x, line.y, spread, fmt="none", ecolor=look["color"], capsize=2.5, linewidth=1)
        axes.plot(line.x, line.y, linewidth=1.6, markersize=5, **look)
    scale = {True: " (log scale)", False: ""}
    axes.set_xlabel(join_lines(chart.x_label) + scale[chart.log_x])
    axes.set_ylabel(join_lines(chart.y_label) + scale[chart.log_y])
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    if chart.log_x:
        measured = sorted({value for line in chart.series if not line.bound for value in line.x})
        ticks = measured if 1 < len(measured) <= _MOST_TICKS else place_log_ticks(measured)
        axes.set_xscale("log", base=2)
        # Whole numbers as they are, others with three digits.
        axes.set_xticks(ticks, [f"{value:g}" if value == round(value) else f"{value:.3g}" for value in ticks])
        ends = [value for line in chart.series for value in line.x]
        room = (max(ends) / min(ends)) ** 0.04 if max(ends) > min(ends) else 2.0
        axes.set_xlim(min(ends) / room, max(ends) * room)
    if chart.log_y:
        values = [value for line in chart.series for value in (*line.y, *line.low, *line.high)]
        ticks = place_log_ticks(values)
        axes.set_yscale("log")
        axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
    if len(places := {value for line in chart.series for value in line.x}) == 1:
        axes.set_xticks(list(places))  # nothing between was measured
    axes.minorticks_off()
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    elif chart.log_y:  # else the outermost ticks would leave half of the picture empty
        axes.set_ylim(min(values) / 1.4, max(values) * 1.4)
    elif min(value for line in chart.series for value in line.y) >= 0:
        axes.set_ylim(bottom=0)


def _label_lines(axes: Any, series: Sequence[Series], names: Sequence[str]) -> None:
    """Write the name of each line at its end, moved up or down where names would meet."""
    points = 72 / axes.figure.dpi
    box = axes.get_window_extent()
    ends = []
    for index, line in enumerate(series):
        last = max(range(len(line.x)), key=lambda place: line.x[place])
        x, y = axes.transData.transform((line.x[last], line.y[last])) * points
        ends.append((y, x, index))
    ends.sort()
    heights = [(names[index].count("\n") + 1) * _NAME_POINTS + 2 for _, _, index in ends]
    places = _spread([y for y, _, _ in ends], heights, box.y0 * points, box.y1 * points)
    looks = _choose_looks(series)
    for (y, x, index), place in zip(ends, places, strict=True):
        side = box.x1 * points + 8
        if side - x > 12 or abs(place - y) > 3:
            lead = {"color": looks[index]["color"], "linewidth": 0.6, "alpha": 0.6}
            from_to = [(x + 4, y), (side - 2, place)]
            to_axes = axes.transAxes.inverted().transform([(a / points, b / points) for a, b in from_to])
            axes.plot(*zip(*to_axes, strict=True), transform=axes.transAxes, clip_on=False, **lead)
        at = axes.transAxes.inverted().transform((side / points, place / points))
        look = {"color": looks[index]["color"], "fontsize": _NAME_POINTS - 1.5, "linespacing": 1.0}
        axes.text(*at, names[index], transform=axes.transAxes, va="center", **look)


def _spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return a place for each label, near where it is wanted, so that none covers another.

    `wanted` must be sorted. Labels that do not fit between `low` and `high` go beyond.
    """
    offsets = [0.0]
    for above, below in itertools.pairwise(heights):
        offsets.append(offsets[-1] + (above + below) / 2)
    # Without their offsets the places must only never fall: labels that would meet share their mean.
    groups: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        groups.append((want - offset, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (first, many), (second, more) = groups[-2:]
            groups[-2:] = [((first * many + second * more) / (many + more), many + more)]
    most = max(low, high - offsets[-1])
    starts = [min(max(start, low), most) for start, count in groups for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def _choose_looks(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return color, marker and dashes of each line; a bound is gray and has no markers."""
    looks: list[dict[str, Any]] = []
    bound_dashes = itertools.cycle(_BOUND_DASHES)
    others = zip(*map(itertools.cycle, (COLORS, _SHAPES, _DASHES)), strict=False)
    for line in series:
        if line.bound:
            marker = {"marker": "_"} if len(line.x) == 1 else {}  # a line of one point has no length
            looks.append({"color": QUIET, "linestyle": next(bound_dashes), **marker})
        else:
            color, shape, dashes = next(others)
            looks.append({"color": color, "marker": shape, "linestyle": dashes})
    return looks


def place_log_ticks(values: Sequence[float]) -> list[float]:
    """Return ticks around all values: 1, 2 and 5 times each power of ten, or powers of ten if those are many.

    Raises ValueError for 0 and below.
    """
    if min(values) <= 0:
        raise ValueError("a logarithmic axis has no place for 0 and below")
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max((index for index, step in enumerate(steps) if step <= min(values)), default=0)
    last = next((index for index, step in enumerate(steps) if step >= max(values)), len(steps) - 1)
    ticks = steps[first : last + 1]
    return ticks if len(ticks) <= _MOST_TICKS else [10.0**power for power in powers]
