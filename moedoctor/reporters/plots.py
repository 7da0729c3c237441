"""Pictures: lines over an axis, as an SVG file by matplotlib. The same data gives the same file.

The library is optional (``pip install 'moedoctor[plots]'``).
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.reporters.output import write

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8c6d31")
"""Told apart with any kind of colour vision (Okabe and Ito), then two more."""
_INK, _QUIET, _GRID, _PAPER = "#1f2328", "#59636e", "#e3e6ea", "#ffffff"
_LINE = 0.155
"""Height of a line of a label, in inches."""
_NAME = 20
"""Characters of a name in one line; the rest goes below."""
_MOST_TICKS = 8


class PlotError(Exception):
    """No picture can be made; one line says why and what to do."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    bound: bool = False
    """A limit that the others are held against: dashed, in grey."""
    low: Sequence[float] = ()
    """Lower end of the spread at each x, with `high`; empty for none."""
    high: Sequence[float] = ()

    def __post_init__(self) -> None:
        lengths = {len(one) for one in (self.x, self.y, self.low, self.high) if len(one)}
        if len(lengths) != 1 or bool(self.low) != bool(self.high):
            raise ValueError(f"{self.name}: x, y, low and high must have the same length, and at least 1")
        if not all(map(math.isfinite, (*self.x, *self.y, *self.low, *self.high))):
            raise ValueError(f"{self.name}: every value must be finite; leave out what was not measured")


def line_chart(
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    log_x: bool = False,
    log_y: bool = False,
    note: str | None = None,
    y_range: tuple[float, float] | None = None,
) -> None:
    """Write the lines to the SVG file `path`, whole or not at all; `note` stands small below them.

    Every line carries its name at its right end. With `log_x` the axis doubles at each step and its ticks
    are the values that were measured; with `log_y` equal steps are equal factors. Raises PlotError where
    matplotlib is missing, ValueError without series and for what `log_y` has no place for, OutputError where
    the file cannot be written.
    """
    if not series:
        raise ValueError("series must hold at least one line")
    matplotlib = import_library("matplotlib")
    matplotlib.use("svg")
    style = {
        "svg.hashsalt": "moedoctor",
        "font.family": "DejaVu Sans",  # comes with matplotlib, so that all machines draw the same
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _QUIET,
        "xtick.color": _QUIET,
        "ytick.color": _QUIET,
    }
    with matplotlib.rc_context(style):
        figure = import_library("matplotlib.figure").Figure(figsize=(7.2, 4.2), facecolor=_PAPER)
        below = _wrapped(note, 118) if note else ""
        bottom = min(0.15 + 0.037 * len(below.splitlines()), 0.5)
        axes = figure.add_axes((0.095, bottom, 0.735, 0.86 - bottom), facecolor=_PAPER)
        figure.text(0.02, 0.945, title, size=12, weight="bold", va="center")
        figure.text(0.02, 0.03, below, size=8, color=_QUIET, va="bottom", linespacing=1.35)
        _prepare(axes, series, log_x, y_range)
        if log_y:
            _use_factors(axes, series)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", size=9, color=_QUIET, pad=8)
        for one, colour in zip(series, colours(series), strict=True):
            _draw(axes, one, colour)
        _name_lines(axes, series)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    write(path, text.getvalue())


def import_library(name: str) -> Any:
    """Raises PlotError, with what to install, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise PlotError(f"{package} is not installed: pip install 'moedoctor[plots]'") from None


def colours(series: Sequence[Series]) -> list[str]:
    """One for each line, as ``#rrggbb``; grey for bounds."""
    free = iter(COLOURS * (1 + len(series) // len(COLOURS)))
    return [_QUIET if one.bound else next(free) for one in series]


def _wrapped(text: str, columns: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, columns))


def _prepare(axes: Any, series: Sequence[Series], log_x: bool, y_range: tuple[float, float] | None) -> None:
    """The frame: only what is needed to read a value off a line."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    if log_x:
        ticks = sorted({value for one in series for value in one.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    if y_range:
        axes.set_ylim(*y_range)
    elif min(min(one.y) for one in series) >= 0:
        top = max(max((*one.y, *one.high)) for one in series)
        axes.set_ylim(0, top * 1.06 or 1.0)


def _draw(axes: Any, one: Series, colour: str) -> None:
    dashes = (0, (4, 2)) if one.bound else "solid"
    axes.plot(one.x, one.y, color=colour, linestyle=dashes, linewidth=1.8, marker="o", markersize=3.5)
    if one.low:
        axes.fill_between(one.x, one.low, one.high, color=colour, alpha=0.15, linewidth=0)


def _use_factors(axes: Any, series: Sequence[Series]) -> None:
    """A vertical axis of equal factors, no higher than the lines need."""
    ticks = factors(series)
    axes.set_yscale("log")
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def factors(series: Sequence[Series]) -> list[float]:
    """Ticks around all values: 1, 2 and 5 times each power of ten, or fewer where those would be too many.

    Raises ValueError for 0 and below.
    """
    values = [value for one in series for value in (*one.y, *one.low, *one.high)]
    if min(values) <= 0:
        raise ValueError("an axis of equal factors has no place for 0 and below")
    powers = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= min(values))
    last = next(index for index, step in enumerate(steps) if step >= max(values) and index > first)
    ticks = steps[first : last + 1]
    if len(ticks) <= _MOST_TICKS:
        return ticks
    inner = [step for step in steps[::3] if ticks[0] < step < ticks[-1]]
    return [ticks[0], *inner, ticks[-1]]


def _name_lines(axes: Any, series: Sequence[Series]) -> None:
    """Each name right of its line, moved up or down where two would touch."""
    low, high = axes.get_ylim()
    by_factors = axes.get_yscale() == "log"
    if by_factors:
        low, high = math.log10(low), math.log10(high)
    end = max(max(one.x) for one in series)
    ends = [one.y[list(one.x).index(max(one.x))] for one in series]
    places = [((math.log10(value) if by_factors else value) - low) / (high - low) for value in ends]
    # Lines that end at the same height are named in the order in which they lie before.
    places = [
        place + 1e-9 * sum(one.y) / len(one.y) / (high - low)
        for place, one in zip(places, series, strict=True)
    ]
    names = [_wrapped(one.name, _NAME) for one in series]
    tall = axes.figure.get_figheight() * axes.get_position().height
    heights = [_LINE / tall * len(name.splitlines()) for name in names]
    for name, colour, place in zip(names, colours(series), _spread(places, heights), strict=True):
        axes.annotate(
            name,
            (end, 10 ** (low + place * (high - low)) if by_factors else low + place * (high - low)),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            size=9,
            annotation_clip=False,
        )


def _spread(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The middles of labels that want to be at `places`: in that order, apart, from 0 to 1 if they fit."""
    order = sorted(range(len(places)), key=lambda index: (places[index], index))
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _touch(groups[-2], groups[-1], places, heights):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(places)
    for group in groups:
        for index, place in zip(group, _stacked(group, places, heights), strict=True):
            moved[index] = place
    return moved


def _touch(below: list[int], above: list[int], places: Sequence[float], heights: Sequence[float]) -> bool:
    apart = _stacked(above, places, heights)[0] - _stacked(below, places, heights)[-1]
    return apart < (heights[below[-1]] + heights[above[0]]) / 2


def _stacked(group: list[int], places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The middles of labels that lie on each other, as near to their places as that allows."""
    steps = [(heights[first] + heights[second]) / 2 for first, second in itertools.pairwise(group)]
    middles = list(itertools.accumulate(steps, initial=0.0))
    start = sum(places[index] - middle for index, middle in zip(group, middles, strict=True)) / len(group)
    start = max(min(start, 1 - middles[-1]), 0.0)
    return [start + middle for middle in middles]
