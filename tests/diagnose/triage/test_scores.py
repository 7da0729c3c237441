"""Triage finds what texts hold and nothing else, also in the half that was held back."""

import pytest

from tests.diagnose.triage.scores import Labelled, Score, labelled, score

TEXTS = tuple(labelled())


@pytest.mark.parametrize("held_back", [False, True])
@pytest.mark.parametrize(
    ("kind", "recall"), [("report", 0.75), pytest.param("log", 0.95, marks=pytest.mark.slow)]
)
def test_precision_and_recall(kind: str, recall: float, held_back: bool) -> None:
    half = score(text for text in TEXTS if text.kind == kind and text.held_back is held_back)
    assert half.precision >= 0.95, half.wrong
    assert half.recall >= recall, half.missed


def test_a_score_counts_what_is_wrong_and_what_is_missed() -> None:
    crash = Labelled("crash", "log", "RuntimeError: b_scales is not on GPU in marlin", frozenset({"MD001"}))
    assert score([crash]) == Score(1, 0, (("crash", "MD003"),), (("crash", "MD001"),))
    assert (score([crash]).precision, score([crash]).recall) == (0.0, 0.0)
