"""Pictures: lines over an axis, as an SVG file by matplotlib and in the terminal by plotext.

Both libraries are optional (``pip install 'moedoctor[plots]'``). The same data gives the same file.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.output import write

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8c6d31")
"""Told apart with any kind of colour vision (Okabe and Ito), then two more."""
_INK, _QUIET, _GRID, _PAPER = "#1f2328", "#59636e", "#e3e6ea", "#ffffff"
_GAP = 0.052
"""Least distance of two labels, in heights of the axes."""


_MARKERS = "ox+*#@%&"
"""Of lines that no colour tells apart."""


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
    matplotlib = _import("matplotlib")
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
        figure = _import("matplotlib.figure").Figure(figsize=(7.2, 4.2), facecolor=_PAPER)
        axes = figure.add_axes(
            (0.095, 0.2 if note else 0.14, 0.735, 0.66 if note else 0.72), facecolor=_PAPER
        )
        figure.text(0.02, 0.945, title, size=12, weight="bold", va="center")
        if note:
            figure.text(0.02, 0.035, _wrapped(note), size=8, color=_QUIET, va="bottom", linespacing=1.35)
        _prepare(axes, series, log_x, y_range)
        if log_y:
            _use_factors(axes, series)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", size=9, color=_QUIET, pad=8)
        for one, colour in zip(series, _colours(series), strict=True):
            _draw(axes, one, colour)
        _name_lines(axes, series)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    write(path, text.getvalue())


def terminal_chart(
    *,
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    log_x: bool = False,
    width: int = 80,
    height: int = 22,
    colour: bool = True,
) -> str:
    """The lines as text of `width` columns, with a legend. Raises PlotError where plotext is missing."""
    plot = _import("plotext")
    figure = getattr(plot, "figure", None)
    if figure is None:
        raise PlotError("plotext is older than 6: pip install -U 'moedoctor[plots]'")
    figure.clear()
    figure.theme("default" if colour else "clear")
    figure.plot_size(width, height)
    figure.title(title)
    figure.label(x_label, "x")
    figure.label(y_label, "y")
    for index, one in enumerate(series):
        x = [math.log2(value) for value in one.x] if log_x else list(one.x)
        marker = "braille" if colour else _MARKERS[index % len(_MARKERS)]
        figure.draw(figure.signal(x, list(one.y), marker=marker).lines().label(one.name))
    ticks = sorted({value for one in series for value in one.x})
    places = [math.log2(value) for value in ticks] if log_x else ticks
    figure.ruler("x").ticks(places, [f"{value:g}" for value in ticks])
    text = str(figure.build().string())
    figure.clear()
    return text if colour else str(plot.uncolorize(text))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise PlotError(f"{package} is not installed: pip install 'moedoctor[plots]'") from None


def _colours(series: Sequence[Series]) -> list[str]:
    free = iter(COLOURS * (1 + len(series) // len(COLOURS)))
    return [_QUIET if one.bound else next(free) for one in series]


def _wrapped(note: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(note, 118))


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
    """A vertical axis of equal factors, with a tick at each power of ten."""
    low, high = _decades(series)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _decades(series: Sequence[Series]) -> tuple[float, float]:
    """The powers of ten around all values. Raises ValueError for 0 and below."""
    values = [value for one in series for value in (*one.y, *one.low, *one.high)]
    if min(values) <= 0:
        raise ValueError("an axis of equal factors has no place for 0 and below")
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)


def _name_lines(axes: Any, series: Sequence[Series]) -> None:
    """Each name right of its line, moved up or down where two would touch."""
    low, high = axes.get_ylim()
    factors = axes.get_yscale() == "log"
    if factors:
        low, high = math.log10(low), math.log10(high)
    end = max(max(one.x) for one in series)
    ends = [one.y[list(one.x).index(max(one.x))] for one in series]
    places = [((math.log10(value) if factors else value) - low) / (high - low) for value in ends]
    # Lines that end at the same height are named in the order in which they lie before.
    places = [
        place + 1e-9 * sum(one.y) / len(one.y) / (high - low)
        for place, one in zip(places, series, strict=True)
    ]
    for (one, colour), place in zip(zip(series, _colours(series), strict=True), _spread(places), strict=True):
        axes.annotate(
            one.name,
            (end, 10 ** (low + place * (high - low)) if factors else low + place * (high - low)),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            size=9,
            annotation_clip=False,
        )


def _spread(places: Sequence[float], gap: float = _GAP) -> list[float]:
    """`places` with at least `gap` between any two, in the same order, moved as little as that takes."""
    order = sorted(range(len(places)), key=lambda index: (places[index], index))
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _start(groups[-1], places, gap) < _end(groups[-2], places, gap) + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(places)
    for group in groups:
        for position, index in enumerate(group):
            moved[index] = _start(group, places, gap) + position * gap
    return moved


def _start(group: Sequence[int], places: Sequence[float], gap: float) -> float:
    return sum(places[index] for index in group) / len(group) - gap * (len(group) - 1) / 2


def _end(group: Sequence[int], places: Sequence[float], gap: float) -> float:
    return _start(group, places, gap) + gap * (len(group) - 1)
