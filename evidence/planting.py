"""Plants every known mistake in computed outputs, and counts how often the explanation names it.

A planted output is the reference with the mistake, and noise as of a kernel. What counts is decided without
the explanation: a mistake that changes the output by less than a sound backend may differ has no effect, and
two mistakes whose outputs a sound backend could give for one another cannot be told apart in that call.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from moedoctor.diagnose.capsule.computation import Computation
from moedoctor.diagnose.capsule.explain import Explanation, diagnose
from moedoctor.diagnose.capsule.mistakes import MISTAKES, Deviation, list_deviations, name_mistakes
from moedoctor.reference.agreement import agree, choose_bounds

FIRST, NOT_TOLD_APART, NOT_NAMED = "first", "not told apart", "not named"
WRONG, NO_EFFECT = "wrong", "no effect"
"""What came of a planted mistake."""


@dataclass
class Tally:
    """What came of planting."""

    counts: Counter[str] = field(default_factory=Counter)
    confused: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    """(layer, planted, named, outcome) of mistakes that were not told apart, or named wrongly."""
    sound_named: int = 0

    @property
    def decided(self) -> int:
        """Return how many planted mistakes had an effect and can be told apart."""
        return self.counts[FIRST] + self.counts[NOT_NAMED] + self.counts[WRONG]

    @property
    def first_share(self) -> float:
        """Return the share of those that was named first."""
        return self.counts[FIRST] / max(1, self.decided)

    @property
    def wrong_share(self) -> float:
        """Return the share of those for which something else was named."""
        return self.counts[WRONG] / max(1, self.decided)


def noisy(output: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return `output` [T, H] as a kernel gives it: the order of sums and bfloat16 move each element."""
    draw = torch.Generator().manual_seed(seed)
    unit = output.norm(dim=1, keepdim=True) / output.shape[1] ** 0.5  # [T, 1]
    own = output * torch.randn(output.shape, generator=draw)  # [T, H]
    shared = unit * torch.randn(output.shape, generator=draw)  # [T, H]
    changed: torch.Tensor = output + 2.0**-10 * (own + shared)  # [T, H]
    return changed.bfloat16()


def deviations(call: Computation) -> list[Deviation]:
    """Return the ways in which the known mistakes can happen in this call."""
    return [each for mistake in MISTAKES if call.applies(mistake) for each in list_deviations(mistake)]


def plant(tally: Tally, scheme: str, call: Computation, planted: Iterable[Deviation], seed: int) -> None:
    """Plant each of the deviations in the whole call, and count what the explanation makes of it."""
    right = call.compute_contributions().sum(1)  # [T, H]
    tally.sound_named += not diagnose(call, noisy(right, seed)).sound
    every = {each: call.compute_contributions(each).sum(1) for each in deviations(call)}
    for deviation in planted:
        output = call.compute_contributions(deviation).sum(1)  # [T, H]
        alike = [name_mistakes(each) for each, other in every.items() if is_noise(call, output, other)]
        _count(tally, scheme, call, deviation, output, alike, None, seed)


def plant_places(
    tally: Tally, scheme: str, call: Computation, planted: Iterable[Deviation], seed: int
) -> None:
    """Plant each of the deviations in one expert only; the expert must be named, too."""
    ids, right = call.problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    used, draw = ids[ids >= 0].unique().tolist(), random.Random(seed)
    changes = {each: call.compute_contributions(each) for each in deviations(call)}
    for deviation in planted:
        expert = draw.choice(used)
        here = (ids == expert)[..., None]  # [T, K, 1]
        output = torch.where(here, changes[deviation], right).sum(1)  # [T, H]
        alike = [
            name_mistakes(each)
            for each, change in changes.items()
            if is_noise(call, output, torch.where(here, change, right).sum(1))
            or is_noise(call, output, change.sum(1))
        ]
        _count(tally, scheme, call, deviation, output, alike, expert, seed)


def _count(
    tally: Tally,
    scheme: str,
    call: Computation,
    deviation: Deviation,
    output: torch.Tensor,
    alike: Sequence[tuple[str, ...]],
    expert: int | None,
    seed: int,
) -> None:
    """Count what the explanation makes of `output` [T, H]. The mistake is in `expert`, or in all of them."""
    if is_noise(call, output, call.compute_contributions().sum(1)):
        tally.counts[NO_EFFECT] += 1
        return
    planted, diagnosis = name_mistakes(deviation), diagnose(call, noisy(output, seed))
    best = diagnosis.best
    if best is None:
        tally.counts[NOT_NAMED] += 1
    elif set(best.mistakes) == set(planted) and _is_place(call, deviation, best, expert):
        tally.counts[FIRST] += 1
    else:
        listed = any(set(each.mistakes) == set(planted) for each in diagnosis.equals)
        simpler = len(best.deviation) == 1 < len(deviation) and is_noise(call, output, best.prediction)
        fits = listed or simpler or any(set(each) == set(best.mistakes) for each in alike)
        outcome = NOT_TOLD_APART if fits else WRONG
        tally.counts[outcome] += 1
        tally.confused[scheme, " + ".join(planted), " + ".join(best.mistakes), outcome] += 1


def _is_place(call: Computation, deviation: Deviation, best: Explanation, expert: int | None) -> bool:
    """Return whether it names the place, but for experts in which the mistake changes nothing."""
    if expert is None or best.experts == (expert,):
        return True
    ids, right, wrong = (
        call.problem.topk_ids,
        call.compute_contributions(),
        call.compute_contributions(deviation),
    )
    named = ids[ids >= 0].unique().tolist() if best.experts is None else best.experts
    if best.tokens is not None:
        named = ids[list(best.tokens)].unique().tolist()
    total = right.sum(1)  # [T, H]
    changed = [
        each
        for each in named
        if not is_noise(call, torch.where((ids == each)[..., None], wrong, right).sum(1), total)
    ]
    return changed == [expert]


def is_noise(call: Computation, output: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a sound backend could give either [T, H] for the other."""
    return agree(output, other, choose_bounds(call.activations)).right
