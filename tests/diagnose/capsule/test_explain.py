"""Planted mistakes are named, sound outputs are not, and nothing else is."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence import planting
from moedoctor.diagnose.capsule import explain
from moedoctor.diagnose.capsule.computation import Computation
from moedoctor.diagnose.capsule.explain import Diagnosis, diagnose
from moedoctor.diagnose.capsule.mistakes import list_pairs, name_mistakes
from tests.capsules import SCHEMES, computation, make_capsule, noisy

_CALLS = [(*scheme, activation) for scheme in SCHEMES for activation in ("silu", "relu2")]
_CELLS = [
    pytest.param(call, 4 + (place + place // 2) % 2, marks=[] if place in (5, 8) else pytest.mark.slow)
    for place, call in enumerate(_CALLS)
]


def _call(scheme: tuple[str, str, str], seed: int) -> Computation:
    quantization, activations, activation = scheme
    unusual = seed % 2 == 1
    capsule = make_capsule(
        quantization, activations, activation=activation, seed=seed, halves=True, unusual=unusual
    )
    return computation(capsule)


def _list_names(diagnosis: Diagnosis) -> list[set[str]]:
    """Return the mistakes that it names first, and those that it cannot tell apart from them."""
    best = [] if diagnosis.best is None else [diagnosis.best]
    return [set(found.mistakes) for found in (*best, *diagnosis.equals)]


def _judge(tally: planting.Tally) -> None:
    assert tally.decided > 0.8 * (sum(tally.counts.values()) - tally.counts[planting.NO_EFFECT]), tally
    assert tally.first_share >= 0.98, tally
    assert tally.wrong_share <= 0.01, tally
    assert tally.sound_named == 0, tally


def test_planted_mistakes_are_named_first() -> None:
    tally = planting.Tally()
    for seed, scheme in list(enumerate(_CALLS))[1::3]:
        call = _call(scheme, seed)
        planted = random.Random(seed).sample(planting.deviations(call), 3)
        planting.plant(tally, "/".join(scheme), call, planted, seed)
    _judge(tally)


@given(
    lost=st.sets(st.integers(0, 7), min_size=1), wrong=st.booleans(), value=st.sampled_from(["nan", "inf"])
)
@settings(max_examples=5, deadline=None)
def test_tokens_with_nan_are_explained_by_no_mistake_that_leaves_them_finite(
    lost: set[int], wrong: bool, value: str
) -> None:
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
    tally, seed = planting.Tally(), 2
    call = _call(_CALLS[2], seed)
    every, draw = planting.deviations(call), random.Random(seed)
    pairs = draw.sample(list(list_pairs(every)), 2)
    planting.plant(tally, "", call, [*draw.sample(every, len(every) // 4), *pairs], seed)
    planting.plant_places(tally, "", call, draw.sample(every, 6), seed)
    _judge(tally)


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
    ids, right = call.problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    chance = random.Random(seed)
    every = planting.deviations(call)
    for deviation in chance.sample(every, len(every) // 2):
        expert = chance.choice(ids.unique().tolist())
        wrong = call.compute_contributions(deviation)  # [T, K, H]
        mixed = torch.where((ids == expert)[..., None], wrong, right).sum(1)  # [T, H]
        # A mistake that only this expert can show is one of the whole layer.
        if planting.is_noise(call, mixed, right.sum(1)) or planting.is_noise(call, mixed, wrong.sum(1)):
            continue
        found = diagnose(call, noisy(mixed))
        assert set(name_mistakes(deviation)) in _list_names(found), (deviation, found)
        assert found.best.experts == (expert,), (deviation, found)


@pytest.mark.parametrize("scheme", _CALLS[1::5])
def test_two_mistakes_at_once_are_named_unless_one_of_them_explains_it(scheme: tuple[str, str, str]) -> None:
    call = _call(scheme, 6)
    right = call.compute_contributions().sum(1)  # [T, H]
    pairs = list(list_pairs(planting.deviations(call)))
    for deviation in random.Random(6).sample(pairs, 2):
        wrong = call.compute_contributions(deviation).sum(1)  # [T, H]
        if planting.is_noise(call, wrong, right):
            continue
        named = _list_names(diagnose(call, noisy(wrong)))
        planted = set(name_mistakes(deviation))
        single = [
            each
            for each in planting.deviations(call)
            if planting.is_noise(call, call.compute_contributions(each).sum(1), wrong)
        ]
        assert planted in named or (single and set(name_mistakes(single[0])) in named), (deviation, named)


@pytest.mark.parametrize("scheme", _CALLS[1::5])
def test_an_expert_with_other_weights_is_named(scheme: tuple[str, str, str]) -> None:
    call, foreign = _call(scheme, 8), _call(scheme, 9)
    ids, right = call.problem.topk_ids, call.compute_contributions()  # [T, K], [T, K, H]
    expert = int(ids[0, 0])
    other = (expert + 3) % call.problem.layer.shape.experts
    moved = call.compute_with_ids(torch.where(ids == expert, other, ids)).sum(1)  # [T, H]
    found = diagnose(call, noisy(moved)).best
    assert (found.mistakes, found.experts, found.taken) == (("expert_replaced",), (expert,), other)

    foreign.problem = call.problem.__class__(
        foreign.problem.layer, call.problem.x, call.problem.topk_weights, ids
    )
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
    assert not found.sound
    assert found.best is None
    assert found.runner_up is not None
