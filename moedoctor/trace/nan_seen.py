"""A set of a trace's points that is kept on the host, and that compiled code may add to.

Where torch.compile reads an `add`, the point is added then and there, once: what it compiled looks at the
point from then on. Code that changed the set at each call would be compiled anew whenever the set is another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

_NUMBERS = itertools.count(1)


class SeenPoints:
    """Points of one trace that something happened at."""

    def __init__(self) -> None:
        self.points: set[int] = set()
        self._adders: list[Callable[[], None]] = []
        self._key = f"set {next(_NUMBERS)}"
        """Of this set alone, so that code that was compiled for another trace is not taken for this one."""

    def take(self) -> None:
        """There is one more point: their numbers are given in this order, from 0."""
        self._adders.append(_adder(self.points, len(self._adders)))

    def add(self, point: int) -> None:
        """Something happened at the point with this number."""
        if self._key:  # always; the compiler guards on what is asked
            self._adders[point]()


def _adder(points: set[int], point: int) -> Callable[[], None]:
    def add() -> None:
        points.add(point)

    # What torch.compiler.assume_constant_result does, which loads the compiler: two seconds for those who do
    # not compile. Without arguments, for of those the compiler takes constants only.
    add._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return add
