"""Planted mistakes are named, sound outputs are not, and nothing else is."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedoctor.diagnose.capsule import explain, mistakes
from moedoctor.diagnose.capsule.computation import Computation
from moedoctor.diagnose.capsule.explain import Diagnosis, Explanation, diagnose
from moedoctor.diagnose.capsule.mistakes import Deviation, list_deviations, list_pairs, name_mistakes
from moedoctor.reference.agreement import agree, choose_bounds
from tests.capsules import SCHEMES, computation, make_capsule, noisy

_CALLS = [(*scheme, activation) for scheme in SCHEMES for activation in ("silu", "relu2")]
_CELLS = [
    pytest.param(call, 4 + (place + place // 2) % 2, marks=[] if place in (5, 8) else pytest.mark.slow)
    for place, call in enumerate(_CALLS)
]


def _call(scheme: tuple[str, str, str], seed: int) -> Computation:
    *kinds, activation = scheme
    capsule = make_capsule(*kinds, activation=activation, seed=seed, halves=True, unusual=seed % 2 == 1)
    return computation(capsule)


def _list_names(diagnosis: Diagnosis) -> list[set[str]]:
    """Return the mistakes that it names first, and those that it cannot tell apart from them."""
    best = [] if diagnosis.best is None else [diagnosis.best]
    return [set(found.mistakes) for found in (*best, *diagnosis.equals)]


FIRST, NOT_TOLD_APART, NOT_NAMED = "first", "not told apart", "not named"
WRONG, NO_EFFECT = "wrong", "no effect"


def list_all(call: Computation) -> list[Deviation]:
    """Return the ways in which the known mistakes can happen in this call."""
    return [each for kind in mistakes.MISTAKES if call.applies(kind) for each in list_deviations(kind)]


def is_noise(call: Computation, output: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a sound backend could give either [T, H] for the other."""
    return agree(output, other, choose_bounds(call.activations)).right


def plant(
    call: Computation, planted: Iterable[Deviation], seed: int, *, in_one_expert: bool = False
) -> Iterator[tuple[str, Deviation]]:
    """Plant each of the deviations, and yield what the explanation makes of it: one of the words above.

    What counts is decided without the explanation. A mistake that changes the output by less than a sound
    backend may differ has no effect. Two mistakes whose outputs a sound backend could give for one another
    cannot be told apart in that call.
    """
    ids, right = call.problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    used, draw = ids[ids >= 0].unique().tolist(), random.Random(seed)
    assert diagnose(call, noisy(right.sum(1), seed)).agreement.right
    for deviation in planted:
        expert = draw.choice(used) if in_one_expert else None
        here = (ids == expert if in_one_expert else torch.ones_like(ids).bool())[..., None]  # [T, K, 1]
        output = torch.where(here, call.compute_contributions(deviation), right).sum(1)  # [T, H]
        names, diagnosis = set(name_mistakes(deviation)), diagnose(call, noisy(output, seed))
        best = diagnosis.best
        if is_noise(call, output, right.sum(1)):
            yield NO_EFFECT, deviation
        elif best is None:
            yield NOT_NAMED, deviation
        elif set(best.mistakes) == names and _is_place(call, deviation, best, expert):
            yield FIRST, deviation
        else:
            alike = [
                set(name_mistakes(each))
                for each in list_all(call)
                for change in [call.compute_contributions(each)]  # [T, K, H]
                for other in (torch.where(here, change, right), change)  # [T, K, H]
                if is_noise(call, output, other.sum(1))
            ]
            simpler = len(best.deviation) == 1 < len(deviation) and is_noise(call, output, best.prediction)
            fits = names in _list_names(diagnosis)[1:] or simpler or set(best.mistakes) in alike
            yield NOT_TOLD_APART if fits else WRONG, deviation


def _is_place(call: Computation, deviation: Deviation, best: Explanation, expert: int | None) -> bool:
    """Return whether it names the place, but for experts in which the mistake changes nothing."""
    if expert is None or best.experts == (expert,):
        return True
    ids = call.problem.topk_ids  # [T, K]
    right, wrong = call.compute_contributions(), call.compute_contributions(deviation)  # [T, K, H]
    named = ids[ids >= 0].unique().tolist() if best.experts is None else best.experts
    if best.tokens is not None:
        named = ids[list(best.tokens)].unique().tolist()
    mixed = {each: torch.where((ids == each)[..., None], wrong, right).sum(1) for each in named}
    return [each for each in named if not is_noise(call, mixed[each], right.sum(1))] == [expert]


def _judge(outcomes: list[tuple[str, Deviation]]) -> None:
    counts = Counter(outcome for outcome, _ in outcomes)
    decided = counts[FIRST] + counts[NOT_NAMED] + counts[WRONG]
    assert decided > 0.8 * (counts.total() - counts[NO_EFFECT]), outcomes
    assert counts[FIRST] >= 0.98 * decided, outcomes
    assert counts[WRONG] <= 0.01 * decided, outcomes


def test_planted_mistakes_are_named_first() -> None:
    outcomes: list[tuple[str, Deviation]] = []
    for seed, scheme in list(enumerate(_CALLS))[1::3]:
        call = _call(scheme, seed)
        outcomes += plant(call, random.Random(seed).sample(list_all(call), 3), seed)
    _judge(outcomes)


@given(
    lost=st.sets(st.integers(0, 7), min_size=1), wrong=st.booleans(), value=st.sampled_from(["nan", "inf"])
)
@settings(max_examples=5, deadline=None)
def test_tokens_with_nan_are_explained_by_no_mistake_that_leaves_them_finite(lost, wrong, value):
    call = computation(make_capsule("nvfp4"))
    deviation = (("w13", "gate_up_swapped"),) if wrong else ()
    output = noisy(call.compute_contributions(deviation).sum(1))  # [T, H]
    output[sorted(lost), 3] = float(value)
    diagnosis = diagnose(call, output)
    assert not diagnosis.agreement.right
    explained = [{"gate_up_swapped"}] if wrong and len(lost) < len(output) else []
    assert _list_names(diagnosis) == explained


@pytest.mark.slow
def test_a_large_call_is_explained_by_a_few_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mistake is tried on few tokens, and only the likeliest on all of them."""
    monkeypatch.setattr(explain, "_MOST_WEIGHTS", 0)
    seed = 2
    call = _call(_CALLS[2], seed)
    every, draw = list_all(call), random.Random(seed)
    planted = [*draw.sample(every, len(every) // 4), *draw.sample(list(list_pairs(every)), 2)]
    outcomes = [*plant(call, planted, seed)]
    _judge([*outcomes, *plant(call, draw.sample(every, 6), seed, in_one_expert=True)])


@pytest.mark.parametrize("step", ["w13", "w2"])
def test_a_wrong_global_scale_is_named_with_its_factor(step: str) -> None:
    call = _call(("nvfp4", "none", "silu"), 10)
    ids, right = call.problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    expert = int(ids[0, 0])
    (wrong,) = call.compute_with_values(step, [3.0], ids == expert)  # [T, K, H]
    found = diagnose(call, noisy(torch.where((ids == expert)[..., None], wrong, right).sum(1))).best
    assert (found.mistakes, found.experts) == (("global_scale_wrong",), (expert,))
    assert found.deviation == ((step, "global_scale_wrong"),)
    assert found.factor == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_the_limit_of_a_clamped_activation_is_named(activation: str) -> None:
    call = _call(("bf16", "none", activation), 11)
    (wrong,) = call.compute_with_values("activation", [3.3], call.problem.topk_ids >= 0)  # [T, K, H]
    found = diagnose(call, noisy(wrong.sum(1))).best
    assert (found.mistakes, found.experts) == (("activation_clamped",), None)
    assert found.factor == pytest.approx(3.3, rel=0.01)


@pytest.mark.parametrize(("scheme", "seed"), _CELLS)
def test_a_mistake_in_some_experts_names_them(scheme: tuple[str, str, str], seed: int) -> None:
    """With seed 5 a token has an expert twice, and values are large."""
    call = _call(scheme, seed)
    every = list_all(call)
    planted = random.Random(seed).sample(every, len(every) // 2)
    outcomes = dict(plant(call, planted, seed, in_one_expert=True))
    assert outcomes.keys().isdisjoint((WRONG, NOT_NAMED)), outcomes


@pytest.mark.parametrize("scheme", _CALLS[5::5])
def test_two_mistakes_at_once_are_named_unless_one_of_them_explains_it(scheme: tuple[str, str, str]) -> None:
    call = _call(scheme, 6)
    pairs = random.Random(6).sample(list(list_pairs(list_all(call))), 2)
    outcomes = dict(plant(call, pairs, 6))
    assert outcomes.keys().isdisjoint((WRONG, NOT_NAMED)), outcomes


@pytest.mark.parametrize("scheme", _CALLS[5::5])
def test_an_expert_with_other_weights_is_named(scheme: tuple[str, str, str]) -> None:
    call, foreign = _call(scheme, 8), _call(scheme, 9)
    ids, right = call.problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    expert = int(ids[0, 0])
    other = (expert + 3) % call.problem.layer.shape.experts
    moved = call.compute_with_ids(torch.where(ids == expert, other, ids)).sum(1)  # [T, H]
    found = diagnose(call, noisy(moved)).best
    assert (found.mistakes, found.experts, found.taken) == (("expert_replaced",), (expert,), other)

    foreign.problem = replace(call.problem, layer=foreign.problem.layer)
    mixed = torch.where((ids == expert)[..., None], foreign.compute_contributions(), right).sum(1)  # [T, H]
    unknown = diagnose(call, noisy(mixed))
    assert unknown.best.mistakes == ("expert_unknown",)
    assert expert in {place for found in (unknown.best, *unknown.equals) for place in found.experts or ()}


def test_a_row_that_nobody_wrote_is_named() -> None:
    call = _call(("nvfp4", "none", "silu"), 2)
    for value in (torch.zeros(256), None):
        output = noisy(call.compute_contributions().sum(1))  # [T, H]
        output[3] = output[5] if value is None else value
        found = diagnose(call, output).best
        assert (found.mistakes, found.tokens) == (("row_unwritten",), (3,))


def test_what_no_known_mistake_explains_is_not_named() -> None:
    call = _call(_CALLS[4], 4)
    right = call.compute_contributions().sum(1)  # [T, H]
    draw = torch.Generator().manual_seed(4)
    output = torch.randn(right.shape, generator=draw) * right.norm() / right.numel() ** 0.5  # [T, H]
    found = diagnose(call, output.bfloat16())
    assert not found.agreement.right
    assert found.best is None
    assert found.runner_up is not None
