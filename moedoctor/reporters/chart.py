"""The data of a picture: lines with names, axes and a caption. `moedoctor.reporters.plots` draws it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.text import join_lines


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    bound: bool = False
    """A limit that the other lines are compared with: dashed, in gray."""
    low: Sequence[float] = ()
    """Lower and upper end of the spread at each point; empty for none."""
    high: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", join_lines(self.name))
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high) if len(values)}
        if len(lengths) != 1 or bool(self.low) != bool(self.high):
            raise ValueError(f"{self.name}: x, y, low and high must have the same length, and at least 1")
        if not all(map(math.isfinite, (*self.x, *self.y, *self.low, *self.high))):
            raise ValueError(f"{self.name}: every value must be finite; leave out what was not measured")

    @classmethod
    def from_records(
        cls, name: str, rows: Sequence[Mapping[str, Any]], x: str, y: str, unit: float = 1.0
    ) -> Series:
        """Return the keys `x` and `y` of records; the spread is ``_p20`` to ``_p80`` of `y`, if all have it.

        `y` is divided by `unit`.
        """
        spread = all(f"{y}_{end}" in row for row in rows for end in ("p20", "p80"))
        low, high = ([row[f"{y}_{end}"] / unit for row in rows] if spread else () for end in ("p20", "p80"))
        return cls(name, [row[x] for row in rows], [row[y] / unit for row in rows], low=low, high=high)


@dataclass(frozen=True)
class Chart:
    """A line chart."""

    name: str
    """A part of the name of its file, such as ``hit_rate``."""
    title: str
    """The message that the data has, in one sentence."""
    x_label: str
    y_label: str
    """With the unit."""
    series: tuple[Series, ...]
    caption: str
    """The quantity that is plotted."""
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    also: tuple[str, ...] = ()
    """More that its figures say, for what the report found: a picture has one message as its title."""

    def __post_init__(self) -> None:
        if not self.series:
            raise ValueError("series must hold at least one line")


def describe_spans(values: Sequence[float], chosen: Sequence[float]) -> str:
    """Return where `chosen` lie among the sorted numbers of tokens: ``from 1 to 64 and at 96 tokens``.

    Only values that follow each other make a range.
    """
    groups = itertools.groupby(values, chosen.__contains__)
    runs = [list(run) for is_chosen, run in groups if is_chosen]
    texts = [f"from {run[0]:g} to {run[-1]:g}" if len(run) > 1 else f"at {run[0]:g}" for run in runs]
    noun = "token" if runs and runs[-1] == [1] else "tokens"
    return f"{' and '.join(texts)} {noun}" if texts else ""
