"""Plants every known mistake in computed outputs, and counts how often the explanation names it.

A planted output is the reference with the mistake, and noise as of a kernel. What counts is decided without
the explanation: a mistake that changes the output by less than a sound backend may differ has no effect, and
two mistakes whose outputs a sound backend could give for one another cannot be told apart in that call.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from moedoctor.diagnose.capsule.computation import Computation
from moedoctor.diagnose.capsule.explain import Explanation, diagnose
from moedoctor.diagnose.capsule.mistakes import MISTAKES, Deviation, list_deviations, name_mistakes
from moedoctor.reference.agreement import agree, choose_bounds
from moedoctor.reference.moe_layer import Layer

FIRST, NOT_TOLD_APART, NOT_NAMED, WRONG, NO_EFFECT = (
    "first",
    "not told apart",
    "not named",
    "wrong",
    "no effect",
)
"""What came of a planted mistake."""


Confusion = tuple[str, str, str, str]
"""(layer, planted, named, outcome) of mistakes that were not told apart, or named wrongly."""


@dataclass
class Tally:
    """What came of planting."""

    counts: Counter[str] = field(default_factory=Counter)
    by_mistake: dict[str, Counter[str]] = field(default_factory=dict)
    confused: Counter[Confusion] = field(default_factory=Counter)
    cosines: dict[Confusion, float] = field(default_factory=dict)
    """The lowest cosine of a token between the two outputs; the highest of all calls."""
    sound: int = 0
    sound_named: int = 0
    strange: int = 0
    """Outputs that no known mistake explains."""
    strange_named: int = 0

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

    def add(self, scheme: str, planted: str, outcome: str, named: str = "", cosine: float = 0.0) -> None:
        """Count one planted mistake."""
        self.counts[outcome] += 1
        self.by_mistake.setdefault(planted, Counter())[outcome] += 1
        if named:
            key = (scheme, planted, named, outcome)
            self.confused[key] += 1
            self.cosines[key] = max(self.cosines.get(key, -1.0), cosine)

    def merge(self, other: Tally) -> None:
        """Add what another process counted."""
        self.counts += other.counts
        for mistake, counts in other.by_mistake.items():
            self.by_mistake[mistake] = self.by_mistake.get(mistake, Counter()) + counts
        self.confused += other.confused
        for key, cosine in other.cosines.items():
            self.cosines[key] = max(self.cosines.get(key, -1.0), cosine)
        self.sound += other.sound
        self.sound_named += other.sound_named
        self.strange += other.strange
        self.strange_named += other.strange_named

    def record(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        names_of = ("layer", "planted", "named", "outcome")
        return {
            "planted": sum(self.counts.values()),
            "counts": dict(self.counts),
            "first_share": self.first_share,
            "wrong_share": self.wrong_share,
            "sound": self.sound,
            "sound_named": self.sound_named,
            "strange": self.strange,
            "strange_named": self.strange_named,
            "mistakes": {name: dict(counts) for name, counts in self.by_mistake.items()},
            "confused": [
                {**dict(zip(names_of, key, strict=True)), "times": times, "cosine": self.cosines[key]}
                for key, times in self.confused.most_common()
            ],
        }


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
    tally.sound += 1
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


def plant_strange(tally: Tally, call: Computation, seed: int) -> None:
    """Give an output that is wrong in a way that is no known mistake: it must be left without a name."""
    right, draw = call.compute_contributions().sum(1), torch.Generator().manual_seed(seed)  # [T, H]
    noise = torch.randn(right.shape, generator=draw) * right.norm(dim=1, keepdim=True) / right.shape[1] ** 0.5
    ways = (noise, right + 0.3 * noise, right.roll(1, dims=1), right.abs(), right.cumsum(1))  # [T, H] each
    tally.strange += 1
    tally.strange_named += diagnose(call, ways[seed % len(ways)].bfloat16()).best is not None


def plant_weights_and_rows(tally: Tally, scheme: str, call: Computation, foreign: Layer, seed: int) -> None:
    """Plant what has a place or a value: rows that nobody wrote, experts with other weights, scales, limits.

    `foreign` is another layer of the same shape. The expert and the token must be named, too.
    """
    draw, problem = random.Random(f"{scheme} {seed}"), call.problem
    ids, right = problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    expert = draw.choice(ids[ids >= 0].unique().tolist())
    other = draw.choice([each for each in range(problem.layer.shape.experts) if each != expert])
    token, source = draw.sample(range(len(ids)), 2)
    here = ids == expert  # [T, K]
    zeros, stale = (noisy(right.sum(1), seed).float() for _ in range(2))  # [T, H] each
    zeros[token], stale[token] = 0.0, stale[source]  # what is stale has the noise of its own call
    strange = replace(call, problem=replace(problem, layer=foreign), _ups={}, _outs={})
    outputs = {
        "row_unwritten (zeros)": (zeros, ("row_unwritten",), None),
        "row_unwritten (another token's)": (stale, ("row_unwritten",), None),
        "expert_replaced": (
            call.compute_with_ids(torch.where(here, other, ids)).sum(1),
            ("expert_replaced",),
            other,
        ),
        "expert_unknown": (_mixed(here, strange.compute_contributions(), right), ("expert_unknown",), None),
    }
    limit = draw.choice((0.5, 1.0, 3.0, 10.0))
    (clamped,) = call.compute_with_values("activation", [limit], ids >= 0)  # [T, K, H]
    outputs["activation_clamped at another limit"] = (clamped.sum(1), ("activation_clamped",), None)
    if problem.layer.quantization != "bf16":
        for step, factor in (("w13", draw.choice((0.25, 0.5, 3.0, 4.0))), ("w2", draw.choice((0.5, 3.0)))):
            wrong = _mixed(here, call.compute_with_values(step, [factor], here)[0], right)  # [T, H]
            outputs[f"global_scale_wrong in {step}"] = (wrong, ("global_scale_wrong",), None)
    total = right.sum(1)  # [T, H]
    for label, (output, mistakes, taken) in outputs.items():
        if is_noise(call, output, total):
            tally.add(scheme, label, NO_EFFECT)
            continue
        rows, whole = label.startswith("row"), label.startswith("activation")
        planted = Place(mistakes, None if rows or whole else (expert,), (token,) if rows else None, taken)
        diagnosis = diagnose(call, output.bfloat16() if rows else noisy(output, seed))
        found = [Place.of(each) for each in (diagnosis.best, *diagnosis.equals) if each is not None]
        if not found:
            tally.add(scheme, label, NOT_NAMED)
        elif found[0] == planted:
            tally.add(scheme, label, FIRST)
        else:
            assert diagnosis.best is not None
            simpler = diagnosis.best.mistakes != mistakes and is_noise(
                call, output, diagnosis.best.prediction
            )
            apart = planted not in found and not (simpler and len(diagnosis.best.deviation) == 1)
            cosine = float(
                torch.nn.functional.cosine_similarity(output, diagnosis.best.prediction, dim=1).min()
            )
            tally.add(
                scheme, label, WRONG if apart else NOT_TOLD_APART, " + ".join(found[0].mistakes), cosine
            )


class Place(NamedTuple):
    """What an explanation names: the mistakes, and where."""

    mistakes: tuple[str, ...]
    experts: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    taken: int | None

    @classmethod
    def of(cls, found: Explanation) -> Place:
        return cls(found.mistakes, found.experts, found.tokens, found.taken)


def _mixed(here: torch.Tensor, wrong: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [T, H]: pairs [T, K] of `here` from `wrong` [T, K, H], the others from `right`."""
    return torch.where(here[..., None], wrong, right).sum(1)


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
    label, planted = " + ".join(name_mistakes(deviation)), set(name_mistakes(deviation))
    if is_noise(call, output, call.compute_contributions().sum(1)):
        tally.add(scheme, label, NO_EFFECT)
        return
    diagnosis = diagnose(call, noisy(output, seed))
    if diagnosis.best is None:
        tally.add(scheme, label, NOT_NAMED)
        return
    best = diagnosis.best
    if set(best.mistakes) == planted and _is_place(call, deviation, best, expert):
        tally.add(scheme, label, FIRST)
        return
    listed = any(set(each.mistakes) == planted for each in diagnosis.equals)
    simpler = len(best.deviation) == 1 < len(deviation) and is_noise(call, output, best.prediction)
    fits = listed or simpler or any(set(each) == set(best.mistakes) for each in alike)
    prediction = best.prediction  # [T, H]
    cosine = float(torch.nn.functional.cosine_similarity(output, prediction, dim=1).min())
    tally.add(scheme, label, NOT_TOLD_APART if fits else WRONG, " + ".join(best.mistakes), cosine)


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
