"""Lines over an axis as text for a terminal, by plotext (``pip install 'moedoctor[plots]'``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moedoctor.reporters.plots import PlotError, Series, colours, factors, import_library

_MARKERS = "ox+*#@%&"
"""Of lines that no colour tells apart."""


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
    """The lines as text of `width` columns, their names below.

    Raises PlotError where plotext is missing, ValueError for what `log_y` has no place for.
    """
    plot = import_library("plotext")
    figure = getattr(plot, "figure", None)
    if figure is None:
        raise PlotError("plotext is older than 6: pip install -U 'moedoctor[plots]'")
    levels = factors(series) if log_y else []
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.title(title)
    figure.label(x_label, "x")
    figure.label(y_label, "y")
    names = []
    for index, (one, hexadecimal) in enumerate(zip(series, colours(series), strict=True)):
        x = [math.log2(value) for value in one.x] if log_x else list(one.x)
        y = [math.log10(value) for value in one.y] if log_y else list(one.y)
        shade: tuple[int, ...] = tuple(bytes.fromhex(hexadecimal[1:]))
        character = _MARKERS[index % len(_MARKERS)]
        marker = plot.marker("braille", shade) if colour else character
        figure.draw(figure.signal(x, y, marker=marker).lines())
        key = "\x1b[38;2;{};{};{}m━━\x1b[0m".format(*shade) if colour else character
        names.append((key, one.name, len(one.name) + (2 if colour else 1)))
    if log_y:
        figure.ruler("y").ticks([math.log10(level) for level in levels], [f"{level:g}" for level in levels])
    ticks = sorted({value for one in series for value in one.x})
    places = [math.log2(value) for value in ticks] if log_x else ticks
    figure.ruler("x").ticks(places, [f"{value:g}" for value in ticks])
    text = str(figure.build().string())
    figure.clear()
    text = text if colour else str(plot.uncolorize(text))
    return text.rstrip("\n") + "\n" + _legend(names, width)


def _legend(names: Sequence[tuple[str, str, int]], width: int) -> str:
    """(key, name, columns of both) of every line, in as few lines of `width` columns as they fit into."""
    lines: list[str] = []
    used = 0
    for key, name, columns in names:
        if not lines or used + columns + 3 > width:
            lines.append("")
            used = 0
        lines[-1] += f"  {key} {name}"
        used += columns + 3
    return "\n".join(lines) + "\n"
