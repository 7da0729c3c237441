"""PARITY: planted faults are noticed, backends are judged, and unusual ids are noticed."""

import functools
import math

import pytest
import torch
from fault_cases import judge, run

from moedoctor.bench.moe import parity
from moedoctor.bench.moe.own_backends import Reference
from moedoctor.faults.selection.backend_parity import BackendParity, BackendParityParameters
from moedoctor.faults.selection.backend_parity_lab import observe
from moedoctor.interfaces import Judgement
from moedoctor.reference.agreement import Bounds
from moedoctor.reference.moe_backend import Prepared
from moedoctor.reference.moe_layer import Layer
from moedoctor.results import CaseVerdict, Tier, UnavailableError

FAULT = BackendParity()


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
    judged = run(FAULT, tokens=5)
    assert judged.verdict is CaseVerdict.CLEAN
    assert words in judged.figure


_run_ours = functools.cache(lambda: run(FAULT, "fixed", tokens=5))


def judge_changed(subject: str, **changed: object) -> Judgement:
    """Judge our backend's result for a layer, with some figures changed."""
    return judge(FAULT, {**_run_ours().evidence, **changed}, subject)


def test_a_wrong_backend_is_named_with_its_tokens() -> None:
    judgement = judge_changed("installed", reason="cosine 0.1 at token 3", wrong_tokens=2)
    assert judgement.verdict is CaseVerdict.REPRODUCED
    assert judgement.figure == "2 of 5 tokens wrong: cosine 0.1 at token 3"


@pytest.mark.parametrize("reason", [None, "cosine 0.1 at token 3"])
def test_a_blind_harness_does_not_judge_an_installed_backend(reason: str | None) -> None:
    blind = {"controls_missed": ["stale_row"], "reason": reason, "wrong_tokens": 2}
    judgement = judge_changed("installed", **blind)
    assert judgement.verdict is CaseVerdict.ERROR, "neither right nor convicted"
    assert judgement.reason == "the comparison did not notice stale_row"
    fix = judge_changed("fixed", **blind)
    assert fix.verdict is not CaseVerdict.CLEAN, "so the scenario fails"
    assert "the comparison did not notice stale_row" in fix.figure


def test_a_backend_that_is_not_deterministic_is_reported() -> None:
    assert "not the same bits" in judge_changed("fixed", deterministic=False).figure


def test_a_backend_that_cannot_run_is_skipped_with_its_reason() -> None:
    with pytest.raises(UnavailableError, match="needs an NVIDIA GPU"):
        run(FAULT, "installed", Tier.KERNEL, tokens=5)


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
        parameters = BackendParityParameters(tokens=5, ids=kind)
        evidence = observe(parameters, "cpu", Forgetful("nvfp4"))
        assert judge(FAULT, evidence, "installed").verdict is verdict


def test_a_backend_without_support_for_empty_slots_gets_none() -> None:
    class Refuses(Reference):
        def check_empty_slots(self) -> str | None:
            return "no -1"

    with pytest.raises(UnavailableError, match="no -1"):
        observe(BackendParityParameters(ids="empty"), "cpu", Refuses("nvfp4"))
