"""Line charts: as an SVG file by matplotlib, and as text for a terminal by plotext.

Both libraries are optional: the extra ``moedoctor[plots]`` brings them.
"""

from __future__ import annotations

import importlib
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedoctor.processes.files import write
from moedoctor.text import missing_package, one_line

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8c6d31")
"""Distinct for people with any kind of colour vision (Okabe and Ito), and two more."""
_QUIET, _GRID = "#59636e", "#e3e6ea"
_MARKERS = "ox+*#@%&"
"""For a terminal without colour."""
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
    """A limit that the other lines are compared with: dashed, in grey."""
    low: Sequence[float] = ()
    """Lower and upper end of the spread at each point; empty for none."""
    high: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", one_line(self.name))
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high) if len(values)}
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
    """Write the lines to the SVG file `path`, whole or not at all; the same data gives the same file.

    `log_x` shows the values that were measured as ticks, at equal factors. `note` is shown small below the
    lines. Raises PlotError without matplotlib, ValueError without series and for 0 or less on a logarithmic
    axis, OutputError if the file cannot be written.
    """
    if not series:
        raise ValueError("series must hold at least one line")
    matplotlib = import_library("matplotlib")
    matplotlib.use("svg")
    style = {"svg.hashsalt": "moedoctor", "font.family": "DejaVu Sans", "text.parse_math": False}
    with matplotlib.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        # DejaVu comes with matplotlib, so all machines draw the same letters.
        figure = import_library("matplotlib.figure").Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot(title=one_line(title), xlabel=x_label, ylabel=y_label, axisbelow=True)
        axes.grid(axis="y", color=_GRID)
        for line, colour in zip(series, _colours(series), strict=True):
            name = "\n".join(textwrap.wrap(line.name, 24))
            dashes = "dashed" if line.bound else "solid"
            axes.plot(line.x, line.y, color=colour, linestyle=dashes, marker="o", markersize=3.5, label=name)
            if line.low:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        if log_x:
            ticks = sorted({value for line in series for value in line.x})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        if log_y:
            ticks = log_ticks(series)
            axes.set_yscale("log")
            axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
        if y_range:
            axes.set_ylim(*y_range)
        elif not log_y and min(value for line in series for value in line.y) >= 0:
            axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        if note:
            wrapped = "\n".join(textwrap.wrap(one_line(note), 118))
            figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=8, color=_QUIET)
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
    log_y: bool = False,
    width: int = 80,
    height: int = 22,
    colour: bool = True,
) -> str:
    """Return the lines as text of `width` columns, with their names below.

    Raises PlotError without plotext, ValueError for 0 or less on a logarithmic axis.
    """
    plot = import_library("plotext")
    figure = getattr(plot, "figure", None)
    if figure is None:
        raise PlotError("plotext is older than 6: pip install -U plotext")
    levels = log_ticks(series) if log_y else []
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.title(one_line(title))
    figure.label(x_label, "x")
    figure.label(y_label, "y")
    names = []
    for index, (line, hexadecimal) in enumerate(zip(series, _colours(series), strict=True)):
        x = [math.log2(value) for value in line.x] if log_x else list(line.x)
        y = [math.log10(value) for value in line.y] if log_y else list(line.y)
        shade: tuple[int, ...] = tuple(bytes.fromhex(hexadecimal[1:]))
        character = _MARKERS[index % len(_MARKERS)]
        marker = plot.marker("braille", shade) if colour else character
        figure.draw(figure.signal(x, y, marker=marker).lines())
        key = "\x1b[38;2;{};{};{}m━━\x1b[0m".format(*shade) if colour else character
        names.append((key, line.name, len(line.name) + (2 if colour else 1)))
    if log_y:
        figure.ruler("y").ticks([math.log10(level) for level in levels], [f"{level:g}" for level in levels])
    ticks = sorted({value for line in series for value in line.x})
    places = [math.log2(value) for value in ticks] if log_x else ticks
    figure.ruler("x").ticks(places, [f"{value:g}" for value in ticks])
    text = str(figure.build().string())
    figure.clear()
    text = text if colour else str(plot.uncolorize(text))
    return text.rstrip("\n") + "\n" + _legend(names, width)


def import_library(name: str) -> Any:
    """Import a library. Raises PlotError, with what to install, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise PlotError(missing_package(package, "plots")) from None


def log_ticks(series: Sequence[Series]) -> list[float]:
    """Return ticks around all values: 1, 2 and 5 times each power of ten, or powers of ten if those are many.

    Raises ValueError for 0 and below.
    """
    values = [value for line in series for value in (*line.y, *line.low, *line.high)]
    if min(values) <= 0:
        raise ValueError("a logarithmic axis has no place for 0 and below")
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max((index for index, step in enumerate(steps) if step <= min(values)), default=0)
    last = next((index for index, step in enumerate(steps) if step >= max(values)), len(steps) - 1)
    ticks = steps[first : last + 1]
    return ticks if len(ticks) <= _MOST_TICKS else [10.0**power for power in powers]


def _colours(series: Sequence[Series]) -> list[str]:
    """Return a colour for each line, as ``#rrggbb``; grey for bounds."""
    free = iter(_COLOURS * (1 + len(series) // len(_COLOURS)))
    return [_QUIET if line.bound else next(free) for line in series]


def _legend(names: Sequence[tuple[str, str, int]], width: int) -> str:
    """Return (key, name, columns of both) of each line, in as few lines of `width` columns as possible."""
    lines: list[str] = []
    used = 0
    for key, name, columns in names:
        if not lines or used + columns + 3 > width:
            lines.append("")
            used = 0
        lines[-1] += f"  {key} {name}"
        used += columns + 3
    return "\n".join(lines) + "\n"
