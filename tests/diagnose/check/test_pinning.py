"""Pinning memory is tried in a child process, also on machines without a GPU."""

from typing import Any

import pytest

from moedoctor.diagnose.check import pinning
from moedoctor.diagnose.check.pinning import Pinning, try_pinning
from moedoctor.processes.ask import ChildError


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def ask(module: str, **options: Any) -> Any:
        assert module == "moedoctor.diagnose.check.pinning"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pinning, "ask", ask)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"pinned": True, "seconds": 0.012}, Pinning(True, True, "64 MiB pinned in 12 ms")),
        (
            {"pinned": False, "error": "CUDA error: OS call failed"},
            Pinning(True, False, "CUDA error: OS call failed"),
        ),
        ({"pinned": False, "seconds": 0.1}, Pinning(True, False, "torch did not say why")),
        (ChildError("no answer within 30 s"), Pinning(True, False, "no answer within 30 s")),
    ],
)
def test_what_the_child_says(monkeypatch: pytest.MonkeyPatch, answer: Any, expected: Pinning) -> None:
    answering(monkeypatch, answer)
    assert try_pinning() == expected


def test_names_in_an_error_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ChildError("no such file /home/alice/lib.so"))
    assert "alice" not in try_pinning().reason


def test_without_a_gpu_the_child_answers_that_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called here; another process would take seconds to import torch."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answering(monkeypatch, pinning._pin(None))
    assert try_pinning() == Pinning(False, None, "torch sees no GPU")


@pytest.mark.gpu
def test_a_gpu_machine_pins() -> None:
    found = try_pinning()
    assert found.works, found.reason
