"""How slow this machine is now beside an undisturbed one, for limits in processor seconds.

Neighbors on the same processor take clock and caches, which processor time counts as ours.
"""

import time

_USUAL = 0.0078
"""Seconds of `_work` on an AMD EPYC of 2.25 GHz in an undisturbed moment."""


def slowness() -> float:
    """Return how many times longer Python takes than usual, at least 1; the best of five short tries."""
    return max(1.0, min(_work() for _ in range(5)) / _USUAL)


def _work() -> float:
    started = time.process_time()
    sum(number * number for number in range(100_000))
    return time.process_time() - started
