"""PARITY: planted faults are noticed, backends are judged, and unusual ids are noticed."""

import functools
import math

import pytest
import torch

from moedoctor.bench.moe import parity
from moedoctor.bench.moe.own_backends import Reference
from moedoctor.faults.selection.backend_parity import BackendParity, BackendParityParameters
from moedoctor.faults.selection.backend_parity_lab import observe
from moedoctor.reference.agreement import Bounds
from moedoctor.reference.moe_backend import Prepared
from moedoctor.reference.moe_layer import Layer
from moedoctor.results import Case, CaseVerdict, Observation, Tier, UnavailableError

FAULT = BackendParity()


def case(subject: str, **parameters: str) -> Case:
    values = {"backend": "MARLIN", "quantization": "nvfp4", "tokens": 5, **parameters}
    tier = Tier.KERNEL if subject == "installed" else Tier.MODEL
    return Case("PARITY", subject, tier, BackendParityParameters(**values).model_dump())


def judged(subject: str, **parameters: str) -> tuple[CaseVerdict, str]:
    point = case(subject, **parameters)
    judgement = FAULT.judge(point, FAULT.observe(point, None))
    return judgement.verdict, judgement.figure


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (Bounds(cosine=0.9, norm=math.inf, element=math.inf, matched=0, worst=math.inf), "half_output"),
        (Bounds(cosine=1.1, norm=0, element=0, matched=1, worst=0), "a right result was refused"),
    ],
    ids=["compares directions only", "accepts nothing"],
)
def test_a_harness_that_is_too_lax_or_too_strict_fails(bounds, words, monkeypatch):
    monkeypatch.setattr(parity, "choose_bounds", lambda activations: bounds)
    verdict, figure = judged("faulty")
    assert verdict is CaseVerdict.CLEAN
    assert words in figure


def observed(**changed: object) -> Observation:
    """Our backend's result for a layer, with some figures changed."""
    return Observation({**_right().evidence, **changed})


@functools.cache
def _right() -> Observation:
    return FAULT.observe(case("fixed"), None)


def test_a_wrong_backend_is_named_with_its_tokens() -> None:
    judgement = FAULT.judge(case("installed"), observed(reason="cosine 0.1 at token 3", wrong_tokens=2))
    assert judgement.verdict is CaseVerdict.REPRODUCED
    assert judgement.figure == "2 of 5 tokens wrong: cosine 0.1 at token 3"


@pytest.mark.parametrize("reason", [None, "cosine 0.1 at token 3"])
def test_a_blind_harness_does_not_judge_an_installed_backend(reason: str | None) -> None:
    blind = observed(controls_missed=["stale_row"], reason=reason, wrong_tokens=2)
    judgement = FAULT.judge(case("installed"), blind)
    assert judgement.verdict is CaseVerdict.ERROR, "neither right nor convicted"
    assert judgement.reason == "the comparison did not notice stale_row"
    fix = FAULT.judge(case("fixed"), blind)
    assert fix.verdict is not CaseVerdict.CLEAN, "so the scenario fails"
    assert "the comparison did not notice stale_row" in fix.figure


def test_a_backend_that_is_not_deterministic_is_reported() -> None:
    assert "not the same bits" in FAULT.judge(case("fixed"), observed(deterministic=False)).figure


def test_a_backend_that_cannot_run_is_skipped_with_its_reason() -> None:
    point = case("installed")
    with pytest.raises(UnavailableError, match="needs an NVIDIA GPU"):
        FAULT.observe(point, None)


class Forgetful(Reference):
    """Computes a duplicate only once, or treats an empty slot as expert 0."""

    def prepare(self, layer: Layer) -> Prepared:
        right = super().prepare(layer)

        class Call(Prepared):
            def __call__(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                twice = ids[:, :1] == ids[:, 1:]  # [T, 1]
                once = torch.cat((torch.ones_like(twice), ~twice), 1)  # [T, 2]
                return right(x, torch.where(once, w, 0.0), ids.clamp(min=0))

        return Call()


@pytest.mark.parametrize("ids", ["duplicates", "empty", "fewer"])
def test_a_backend_that_is_wrong_only_with_unusual_ids_is_noticed(ids: str) -> None:
    for kind, verdict in (("distinct", CaseVerdict.CLEAN), (ids, CaseVerdict.REPRODUCED)):
        point = case("installed", ids=kind)
        parameters = BackendParityParameters.model_validate(dict(point.parameters))
        observation = Observation(observe(parameters, "cpu", Forgetful("nvfp4")))
        assert FAULT.judge(point, observation).verdict is verdict


def test_a_backend_without_support_for_empty_slots_gets_none() -> None:
    class Refuses(Reference):
        def check_empty_slots(self) -> str | None:
            return "no -1"

    parameters = BackendParityParameters.model_validate(dict(case("installed", ids="empty").parameters))
    with pytest.raises(UnavailableError, match="no -1"):
        observe(parameters, "cpu", Refuses("nvfp4"))
