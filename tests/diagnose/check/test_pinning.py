"""Pinning memory is tried in a child process, also on machines without a GPU."""

from typing import Any
from unittest.mock import Mock

import pytest

from moedoctor.diagnose.check import pinning
from moedoctor.diagnose.check.pinning import Pinning, try_pinning
from moedoctor.processes.ask import ChildError


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr(pinning, "ask", child := Mock())
    return child


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"pinned": True, "seconds": 0.012}, Pinning(True, True, "64 MiB pinned in 12 ms")),
        ({"pinned": False, "error": "CUDA error: failed"}, Pinning(True, False, "CUDA error: failed")),
        ({"pinned": False, "seconds": 0.1}, Pinning(True, False, "torch did not say why")),
        (ChildError("no answer within 30 s"), Pinning(True, False, "no answer within 30 s")),
        (ChildError("no file /home/alice/lib.so"), Pinning(True, False, "no file ~/lib.so")),
    ],
)
def test_what_the_child_says(ask: Mock, answer: Any, expected: Pinning) -> None:
    ask.side_effect = [answer]
    assert try_pinning() == expected
    assert ask.call_args.args == ("moedoctor.diagnose.check.pinning",)


def test_without_a_gpu_the_child_answers_that_torch_sees_none(ask, monkeypatch):
    """It is called here; another process would take seconds to import torch."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ask.return_value = pinning._pin(None)
    assert try_pinning() == Pinning(False, None, "torch sees no GPU")


@pytest.mark.gpu
def test_a_gpu_machine_pins() -> None:
    found = try_pinning()
    assert found.works, found.reason
