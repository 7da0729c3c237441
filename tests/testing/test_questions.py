"""Each question is answered rightly by a sound implementation and wrongly by one with a planted mistake."""

import importlib
from typing import Any

import pytest

from moedoctor.testing import load_questions
from moedoctor.testing.questions import KINDS, Setting, UnfitError
from tests.testing.planted import PLANTED, SOUND

QUESTIONS = [(kind, name) for kind in KINDS for name in load_questions(kind)]
OPTIONS = {"scores_of_zero": {"scoring": "sigmoid"}}


def ask(kind: str, name: str, implementation: Any) -> str | None:
    """Return what is wrong with the first answer that is not right; a refusal that is allowed is right."""
    module, question = importlib.import_module(f"moedoctor.testing.{kind}"), load_questions(kind)[name]
    options = {**getattr(implementation, "moedoctor", {}), **OPTIONS.get(name, {})}
    for variant in getattr(module, "list_variants", lambda *_: ("",))(implementation, options):
        for sizes in question.sizes:
            try:
                reason = module.ask(implementation, name, sizes, Setting(variant, options))
            except UnfitError:
                reason = None
            except Exception as error:
                reason = None if question.may_refuse else f"{type(error).__name__}: {error}"
            if reason is not None:
                return f"{variant} {sizes}: {reason}"
    return None


@pytest.mark.parametrize(("kind", "name"), QUESTIONS)
def test_a_sound_implementation_is_right(kind: str, name: str) -> None:
    if OPTIONS.get(name) is None:
        assert ask(kind, name, SOUND[kind]) is None


@pytest.mark.parametrize(("kind", "name"), QUESTIONS)
def test_a_planted_mistake_is_wrong(kind: str, name: str) -> None:
    assert ask(kind, name, PLANTED[kind][name]) is not None
