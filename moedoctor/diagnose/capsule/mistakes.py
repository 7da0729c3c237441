"""The mistakes that a MoE kernel is known to make, as ways in which the steps of a layer go wrong.

A layer is computed in the steps of `STEPS`. A wrong output is explained by a `Deviation`: the steps that went
wrong, and how. So two mistakes at once need no words of their own. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from moedoctor.text import load_yaml

STEPS = ("input", "w13", "activation", "middle", "w2", "sum")
"""Quantize the input, multiply by w13, activate, quantize again, multiply by w2, add up a token's experts."""
RIGHT = "right"


@dataclass(frozen=True)
class Mistake:
    name: str
    steps: tuple[str, ...]
    """The steps that go wrong; in one of them, or in all at once."""
    words: str
    """The behavior of a kernel with it, to follow "the output is that of …"."""
    entry: str | None = None
    """The known failure that it belongs to."""
    needs: str = ""
    """The property of a call without which it changes nothing; empty if every call shows it."""


MISTAKES = tuple(
    Mistake(**{**row, "steps": tuple(row["steps"])})
    for row in load_yaml("moedoctor.diagnose.capsule", "mistakes.yaml")
)
BY_NAME: Mapping[str, Mistake] = {mistake.name: mistake for mistake in MISTAKES}

Deviation = tuple[tuple[str, str], ...]
"""(step, option) of each step that goes wrong, in the order of `STEPS`; empty for the right computation."""


def list_deviations(mistake: Mistake) -> Iterator[Deviation]:
    """Yield the ways in which it can happen: in each of its steps alone, then in all of them."""
    for step in mistake.steps:
        yield ((step, mistake.name),)
    if len(mistake.steps) > 1:
        yield tuple((step, mistake.name) for step in mistake.steps)


def name_mistakes(deviation: Deviation) -> tuple[str, ...]:
    return tuple(dict.fromkeys(option for _, option in deviation))


def list_pairs(deviations: Sequence[Deviation]) -> Iterator[Deviation]:
    """Yield each two of the deviations at once, where they are about different steps and mistakes."""
    for first, second in combinations(deviations, 2):
        steps = dict(first) | dict(second)
        same = set(name_mistakes(first)) & set(name_mistakes(second))
        if not same and len(steps) == len(first) + len(second):
            yield tuple((step, steps[step]) for step in STEPS if step in steps)
