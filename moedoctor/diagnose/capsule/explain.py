"""Finds the known mistake that explains a wrong output of a MoE layer, and its experts and tokens.

An output is a sum over pairs of token and expert. So it is found for each pair by itself whether the mistake
happened there: the least-squares share of the mistake in what the output differs by, rounded to 0 or 1. A
mistake is named only if what it predicts agrees with the output as a sound backend would with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from moedoctor.diagnose.capsule.computation import Computation, find_repeats
from moedoctor.diagnose.capsule.mistakes import (
    MISTAKES,
    Deviation,
    list_deviations,
    list_pairs,
    name_mistakes,
)
from moedoctor.reference.agreement import Agreement, agree, choose_bounds, relative_error

_MOST_UNKNOWN = 3
"""Experts that are looked for at most if none of them is itself."""
_MOST_WEIGHTS, _MOST_VALUES, _MOST_LIKELY = 2**24, 2**19, 8
"""Weights of a layer, and values of its experts' outputs, with which every mistake is tried on all tokens.

Of a larger call, every mistake is tried on a few tokens, and those that explain them best on all tokens."""
_MOST_TOGETHER = 256
"""Mistakes that are computed together."""
_FAR = 0.25
"""A relative error that no bound allows: each allows a token less than half of it."""
_OCTAVES, _FINEST = 8, 2.0**-12
"""Powers of two by which a scale or limit is looked for, and how finely."""
_NOISE = {"none": 2.0**-9, "fp8": 2.0**-5, "nvfp4": 2.0**-5}
"""A sound backend's largest error of an element, relative to its token's RMS; flipped codes exceed it."""
_APART = 3.0
"""Predictions that are nearer to each other than this many times the noise are not told apart."""


@dataclass(frozen=True)
class Explanation:
    """One mistake, or two at once, as an explanation of the output."""

    mistakes: tuple[str, ...]
    """Names of `MISTAKES`, or one of ``row_unwritten``, ``global_scale_wrong``, ``expert_replaced`` and
    ``expert_unknown``."""
    deviation: Deviation
    residual: float
    """‖output - prediction‖ / ‖output - reference‖ over the finite tokens."""
    cosine: float
    """Of output and prediction, over the finite tokens."""
    holds: bool
    """True if the prediction agrees with the output within the bounds of a sound backend."""
    experts: tuple[int, ...] | None = None
    """The experts' places in the layer, if the mistake happens in some of the experts only."""
    tokens: tuple[int, ...] | None = None
    """The tokens, if the mistake happens in some of the tokens only."""
    taken: int | None = None
    """``expert_replaced``: the place of the expert that was computed instead."""
    factor: float | None = None
    """``global_scale_wrong``: how many times too large the scale is. ``activation_clamped``: the limit."""
    token_shares: Mapping[int, float] = field(default_factory=dict, compare=False)
    """`share` of each wrong token; of the explanations of a `Diagnosis` only."""
    expert_shares: Mapping[int, float] = field(default_factory=dict, compare=False)
    """`share` over the wrong tokens that use each expert, by its place in the layer."""
    prediction: torch.Tensor = field(repr=False, compare=False, default_factory=lambda: torch.empty(0))
    """float32 [T, H]"""

    @property
    def answer(self) -> object:
        """The mistakes and their places; equal explanations have equal answers."""
        scale = None if self.factor is None else (self.deviation, round(self.factor, 2))
        return set(self.mistakes), self.experts, self.tokens, self.taken, scale

    @property
    def share(self) -> float:
        """Return the part of the difference that it explains, 0 to 1."""
        return max(0.0, 1.0 - self.residual**2)


@dataclass(frozen=True)
class Diagnosis:
    agreement: Agreement
    """Output and reference."""
    best: Explanation | None = None
    """The explanation of the output; None if it is right, or if no known mistake does."""
    equals: tuple[Explanation, ...] = ()
    """Other explanations that this call cannot tell apart from the best."""
    runner_up: Explanation | None = None
    """The best of the rest, whether it holds or not."""
    compared: int = 0
    """Explanations that were computed."""


def diagnose(computation: Computation, output: torch.Tensor) -> Diagnosis:
    """Explain `output` [T, H] of the call in `computation`.

    Tokens with NaN or Inf, in the output or the reference, are left out. If the others are right, there is
    nothing to explain: a mistake that changes none of them would explain them all.
    """
    bounds = choose_bounds(computation.activations)
    right = computation.compute_contributions()  # [T, K, H]
    agreement = agree(output.float(), right.sum(1), bounds)
    finite = output.isfinite().all(1) & right.sum(1).isfinite().all(1)  # [T]
    if agreement.right or not bool(finite.any()):
        return Diagnosis(agreement)
    if agree(output[finite].float(), right.sum(1)[finite], bounds).right:
        return Diagnosis(agreement)
    call = _Call(computation, output.float(), right, finite)
    deviations = [
        deviation
        for mistake in MISTAKES
        if computation.applies(mistake)
        for deviation in list_deviations(mistake)
    ]
    searches: Sequence[Callable[[], list[Explanation]]] = (
        lambda: [*call.explain_by_rows(), *call.try_out(deviations)],
        call.explain_by_values,
        call.explain_by_experts,
        lambda: call.try_out(list(list_pairs(deviations))),
        call.explain_by_unknown_experts,
    )
    found: list[Explanation] = []
    for search in searches:
        found += search()
        if any(explanation.holds for explanation in found):
            break
    return call.rank(agreement, found)


class _Call:
    """One wrong output, and how well each mistake explains it."""

    def __init__(
        self, computation: Computation, output: torch.Tensor, right: torch.Tensor, finite: torch.Tensor
    ) -> None:
        self.computation, self.output, self.right, self.finite = computation, output, right, finite
        self.ids = computation.problem.topk_ids  # [T, K]
        self.reference = right.sum(1)  # [T, H]
        self.bounds = choose_bounds(computation.activations)
        self.difference = output - self.reference  # [T, H]
        self.size = float(self.difference[finite].double().norm())
        self.used: list[int] = self.ids[self.ids >= 0].unique().tolist()
        """The experts that some token uses."""
        self.compared = 0

    @cached_property
    def wrong(self) -> list[int]:
        """The finite tokens that differ from the reference beyond the noise."""
        rows = zip(self.output, self.reference, self.finite.tolist(), strict=True)
        return [
            token
            for token, (got, want, finite) in enumerate(rows)
            if finite and not agree(got[None], want[None], self.bounds).right
        ]

    def try_out(self, deviations: Sequence[Deviation]) -> list[Explanation]:
        """Return how well each of the deviations explains the output, of a large call the likeliest only."""
        if self._is_large():
            few = self._select(self._choose_tokens())
            likely = few._explain_all(deviations, free=True)
            likely.sort(key=lambda explanation: (not explanation.holds, explanation.residual))
            self.compared += few.compared
            deviations = [explanation.deviation for explanation in likely[:_MOST_LIKELY]]
        return self._explain_all(deviations, free=self._is_large())

    def _explain_all(self, deviations: Sequence[Deviation], *, free: bool) -> list[Explanation]:
        """Return how well each explains the output; with `free`, what was computed for it is not kept."""
        found = []
        # Those with the same w2 stay together, so that each weight is dequantized once.
        ordered = sorted(deviations, key=lambda deviation: dict(deviation).get("w2", ""))
        for first in range(0, len(ordered), _MOST_TOGETHER):
            together = ordered[first : first + _MOST_TOGETHER]
            self.computation.prepare(together)
            found += [each for deviation in together if (each := self.explain(deviation)) is not None]
            if free:
                self.computation.forget()
        return found

    def explain(self, deviation: Deviation) -> Explanation | None:
        """Return how well the deviation explains the output; None if it changes nothing here."""
        wrong = self.computation.compute_contributions(deviation).nan_to_num()  # [T, K, H]
        change = wrong - self.right  # [T, K, H]
        # Changes of two pairs may cancel, so each pair must be noise by itself.
        outputs = (wrong.sum(1), *(self.reference + change[:, lane] for lane in range(change.shape[1])))
        if all(self._agrees(output, self.reference) for output in outputs):
            return None
        whole = self._make_explanation(name_mistakes(deviation), deviation, wrong.sum(1))
        if whole.holds:
            return whole
        mask = self._locate(change)  # [T, K]
        if bool(mask.all()) or not bool(mask.any()):
            return whole
        mixed = torch.where(mask[..., None], wrong, self.right).sum(1)  # [T, H]
        # The experts, or else the tokens, that the mask is made of.
        chosen = self.ids[mask].unique()
        if bool((torch.isin(self.ids, chosen) == mask).all()):
            places = {"experts": tuple(map(int, chosen))}
        else:
            places = {"tokens": tuple(mask.any(1).nonzero().flatten().tolist())}
        part = self._make_explanation(name_mistakes(deviation), deviation, mixed, **places)
        return part if part.holds else whole

    def explain_by_rows(self) -> list[Explanation]:
        """Explain wrong rows by rows that nobody wrote: zeros, or another token's row."""
        prediction = self.reference.clone()  # [T, H]
        for token in self.wrong:
            row = self.output[token]  # [H]
            same = (self.output == row).all(1)  # [T]
            same[token] = False
            if bool(same.any()) or not bool(row.any()):
                prediction[token] = row
        if not self.wrong or len(self.wrong) == len(self.output):
            return []
        return [self._make_explanation(("row_unwritten",), (), prediction, tokens=tuple(self.wrong))]

    def explain_by_values(self) -> list[Explanation]:
        """Explain the output by a wrong global scale or limit of the activation, in one expert or in all."""
        suspects = self._find_suspects()
        causes: list[tuple[int, ...]] = [(expert,) for expert in self._find_causes(suspects)]
        found = [self._fit_value("activation", experts) for experts in (*causes, tuple(self.used))]
        if self.computation.problem.layer.quantization != "bf16":
            together = [tuple(suspects)] if len(suspects) > 1 else []
            found += [
                self._fit_value(step, experts) for experts in (*causes, *together) for step in ("w13", "w2")
            ]
        return found

    def _fit_value(self, step: str, experts: tuple[int, ...]) -> Explanation:
        few = self._select(self._choose_tokens(experts)) if self._is_large() else self
        best, width = 0.0, float(_OCTAVES)
        while width > _FINEST:  # ever narrower around the best
            octaves = [best + width * place / _OCTAVES for place in range(-_OCTAVES, _OCTAVES + 1)]
            predictions = few._predict(step, experts, octaves)  # [T, H] each
            errors = [float((few.output - each)[few.finite].double().norm()) for each in predictions]
            best, width = octaves[errors.index(min(errors))], width / _OCTAVES
        (prediction,) = self._predict(step, experts, [best])
        places = None if len(experts) == len(self.used) else experts
        name = "activation_clamped" if step == "activation" else "global_scale_wrong"
        return self._make_explanation((name,), ((step, name),), prediction, experts=places, factor=2.0**best)

    def _predict(self, step: str, experts: tuple[int, ...], octaves: Sequence[float]) -> list[torch.Tensor]:
        """Return the output [T, H] for each value of a scale or limit."""
        pairs = torch.isin(self.ids, torch.tensor(experts, device=self.ids.device))  # [T, K]
        rest = torch.where(pairs[..., None], 0.0, self.right).sum(1)  # [T, H]
        values = [2.0**each for each in octaves]
        return [rest + each.sum(1) for each in self.computation.compute_with_values(step, values, pairs)]

    def explain_by_experts(self) -> list[Explanation]:
        """Explain the output by an expert that was computed with the weights of another that is held."""
        found = []
        for expert in self._find_causes(self._find_suspects()):
            here = self.ids == expert  # [T, K]
            for other in range(self.computation.problem.layer.shape.experts):
                if other == expert:
                    continue
                taken = self.computation.compute_with_ids(torch.where(here, other, -1))  # [T, K, H]
                prediction = torch.where(here[..., None], taken, self.right).sum(1)  # [T, H]
                found.append(
                    self._make_explanation(
                        ("expert_replaced",), (), prediction, experts=(expert,), taken=other
                    )
                )
        return found

    def explain_by_unknown_experts(self) -> list[Explanation]:
        """Explain the output by as few experts as possible that are not themselves.

        Just the tokens that use them are wrong. Experts that only appear together cannot be told apart.
        """
        wrong = set(self.wrong)
        tokens_of = {expert: self._find_tokens(expert) for expert in self._find_suspects()}
        if not wrong or len(wrong) == len(self.output):
            return []
        for size in range(1, _MOST_UNKNOWN + 1):
            found = [
                experts
                for experts in combinations(tokens_of, size)
                if set().union(*(tokens_of[expert] for expert in experts)) == wrong
            ]
            if found:
                rows = torch.tensor(self.wrong, device=self.output.device)
                prediction = self.reference.index_copy(0, rows, self.output[rows])  # [T, H]
                return [
                    self._make_explanation(("expert_unknown",), (), prediction, experts=experts)
                    for experts in found
                ]
        return []

    def rank(self, agreement: Agreement, found: Sequence[Explanation]) -> Diagnosis:
        """Return the diagnosis: the best explanation, what equals it, and the next."""
        # A mistake that happens everywhere explains with fewer words than one that happens in some places.
        simple = [
            len(item.mistakes) + (item.experts is not None or item.tokens is not None) for item in found
        ]
        order = sorted(range(len(found)), key=lambda i: (not found[i].holds, found[i].residual))
        if not order:
            return Diagnosis(agreement)
        first = found[order[0]]
        if not first.holds:
            return Diagnosis(agreement, None, (), self._add_shares(first), self.compared)
        noise = _APART * first.residual * self.size
        near = [i for i in order if found[i].holds and self._measure(first, found[i]) <= noise]
        chosen = min(near, key=lambda i: (simple[i], found[i].residual))
        best = found[chosen]
        equals = tuple(
            found[i] for i in near if simple[i] == simple[chosen] and found[i].answer != best.answer
        )
        rest = [found[i] for i in order if i not in near]
        runner_up = self._add_shares(rest[0]) if rest else None
        return Diagnosis(agreement, self._add_shares(best), equals, runner_up, self.compared)

    # --- Helpers ------------------------------------------------------------------------------------------

    def _add_shares(self, found: Explanation) -> Explanation:
        """Return it with what it explains of each wrong token, and of the wrong tokens of each expert."""
        left = (self.output - found.prediction).double().square().sum(1)  # [T]
        whole = self.difference.double().square().sum(1)  # [T]

        def share(tokens: Sequence[int]) -> float:
            rows = list(tokens)
            return max(0.0, 1.0 - float(left[rows].sum() / whole[rows].sum()))

        tokens_of = {expert: sorted(self._find_tokens(expert) & set(self.wrong)) for expert in self.used}
        return replace(
            found,
            token_shares={token: share([token]) for token in self.wrong},
            expert_shares={expert: share(tokens) for expert, tokens in tokens_of.items() if tokens},
        )

    def _is_large(self) -> bool:
        """Return True if most mistakes are tried on a few tokens only."""
        shape = self.computation.problem.layer.shape
        weights = shape.experts * shape.hidden * (shape.w13_rows + shape.intermediate)
        return weights > _MOST_WEIGHTS or self.right.numel() > _MOST_VALUES

    def _select(self, tokens: Sequence[int]) -> _Call:
        rows = list(tokens)
        return _Call(
            self.computation.select_tokens(rows), self.output[rows], self.right[rows], self.finite[rows]
        )

    def _choose_tokens(self, experts: Sequence[int] = ()) -> list[int]:
        """Return the token that is furthest off, and those in which few mistakes can be seen.

        These are duplicate ids and ids of -1. With `experts`, it is one that uses them.
        """
        errors = relative_error(self.output, self.reference)  # [T]
        errors[~self.finite] = -1.0
        if experts:
            errors[~torch.isin(self.ids, torch.tensor(experts)).any(1)] = -1.0
        kinds = (
            torch.ones(len(self.ids), dtype=torch.bool),
            find_repeats(self.ids).any(1),
            (self.ids < 0).any(1),
        )
        found = [int(torch.where(kind, errors, -2.0).argmax()) for kind in kinds if bool(kind.any())]
        return sorted(set(found))

    def _make_explanation(
        self, mistakes: tuple[str, ...], deviation: Deviation, prediction: torch.Tensor, **places: Any
    ) -> Explanation:
        """Return the explanation by `prediction` [T, H]; `places` are its experts, tokens and values."""
        self.compared += 1
        got, want = self.output[self.finite].double(), prediction[self.finite].double()  # [T', H] each
        cosine = float((got * want).sum() / (got.norm() * want.norm()).clamp(min=1e-300))
        residual = float((got - want).norm()) / max(self.size, 1e-300)
        holds = self._agrees(self.output[self.finite], prediction[self.finite])
        return Explanation(mistakes, deviation, residual, cosine, holds, prediction=prediction, **places)

    def _agrees(self, output: torch.Tensor, prediction: torch.Tensor) -> bool:
        """Return True if `output` [T, H] is within the bounds; the first line saves most of the time."""
        if not float((output - prediction).norm()) <= _FAR * float(prediction.norm()):
            return False
        return agree(output, prediction, self.bounds).right

    def _locate(self, change: torch.Tensor) -> torch.Tensor:
        """Return bool [T, K]: the pairs in which the change [T, K, H] happened.

        An expert that a token has twice is one pair here: its changes are parallel, so shares of them mean
        nothing.
        """
        first = (self.ids[:, :, None] == self.ids[:, None, :]).int().argmax(2)  # [T, K]
        change = torch.zeros_like(change).scatter_add_(1, first[..., None].expand_as(change), change).double()
        gram = torch.einsum("tkh,tlh->tkl", change, change)  # [T, K, K]; float32 has no squares of 1e20
        along = torch.einsum("tkh,th->tk", change, self.difference.nan_to_num().double())  # [T, K]
        own = gram.diagonal(dim1=1, dim2=2)  # [T, K]
        ridge = 1e-9 * own.amax(1, keepdim=True).clamp(min=1e-300)  # [T, 1]
        system = gram + torch.diag_embed(ridge.expand_as(own))  # [T, K, K]
        share = torch.linalg.solve(system, along[..., None]).squeeze(-1)  # [T, K]
        size = self.reference.double().square().sum(1, keepdim=True)  # [T, 1]
        # Noise moves a share by noise / size of the change. A pair that it could turn follows its expert, as
        # does a pair of a token with NaN or Inf.
        noise = _NOISE[self.computation.activations.partition("_")[0]]
        speaks = own * change.shape[2] > size * (8 * noise) ** 2  # [T, K]
        speaks = speaks.gather(1, first) & self.finite[:, None]  # [T, K]
        happened: torch.Tensor = (share > 0.5).gather(1, first)  # [T, K]
        for expert in self.ids[~speaks].unique().tolist():
            of_expert = self.ids == expert  # [T, K]
            loud = of_expert & speaks
            votes = happened[loud] if bool(loud.any()) else happened[speaks]
            happened[of_expert & ~speaks] = bool(votes.double().mean() > 0.5) if votes.numel() else False
        return happened

    def _find_suspects(self) -> list[int]:
        """Return the experts whose every token is wrong, and that can be seen."""
        return [expert for expert in self.used if self._find_tokens(expert) <= set(self.wrong)]

    def _find_causes(self, suspects: Sequence[int]) -> list[int]:
        """Return the suspects each of which uses every wrong token, so that it could be the only cause."""
        return [expert for expert in suspects if self._find_tokens(expert) == set(self.wrong)]

    def _find_tokens(self, expert: int) -> set[int]:
        """Return the finite tokens that use the expert."""
        return set(((self.ids == expert).any(1) & self.finite).nonzero().flatten().tolist())

    def _measure(self, first: Explanation, other: Explanation) -> float:
        """Return how far apart the two predictions are over the finite tokens."""
        return float((first.prediction - other.prediction)[self.finite].double().norm())
