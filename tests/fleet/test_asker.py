"""The end of a node's task, with a Ray that ends it as the test says."""

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moedoctor.fleet.cluster import Node, Question, ask_nodes
from moedoctor.fleet.rows import Row, Status

_STARTED = json.dumps({"python": "3.12", "worker_seconds": 0.1})
_MISSING = json.dumps({"python": "3.12", "worker_seconds": 0.1, "missing": True})
_REPORT = json.dumps({"schema_version": 1, "environment": {}, "summary": {"exit_code": 0}})
_ANSWER = json.dumps({"code": 0, "seconds": 1.0, "report": _REPORT})


class _LostError(Exception):
    """Raised by Ray where a worker dies."""


class _Stream:
    def __init__(self, *words: str, end: type[Exception]) -> None:
        self._words: Iterator[str] = iter(words)
        self._end = end

    def __next__(self) -> str:
        for word in self._words:
            return word
        raise self._end("its worker died")


def _rows(monkeypatch: pytest.MonkeyPatch, stream: _Stream, *, gpus: int) -> list[Row]:
    monkeypatch.setattr("moedoctor.fleet.cluster.Head.find", lambda ray: SimpleNamespace(
        is_lost=lambda: False, answers=lambda: True))  # fmt: skip
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    remote = SimpleNamespace(remote=lambda *arguments: stream)
    ray: Any = SimpleNamespace(
        cloudpickle=SimpleNamespace(register_pickle_by_value=lambda module: None),
        remote=lambda function: SimpleNamespace(options=lambda **options: remote),
        wait=lambda streams, **limits: (streams[:1], streams[1:]),
        get=lambda word, timeout: word,
        exceptions=SimpleNamespace(TaskCancelledError=KeyboardInterrupt),
        cancel=lambda stream, force: None,
    )
    rows: list[Row] = []
    node = Node("0" * 8, "node", "10.0.0.1", gpus)
    ask_nodes(ray, [node], Question("moedoctor", ("check",), 60.0, per_gpu=gpus > 0), rows.append)
    return rows


@pytest.mark.parametrize("end", [StopIteration, _LostError])
@pytest.mark.parametrize(("words", "gpus", "died"), [
    ((_STARTED, _ANSWER), 0, (0, 0)),
    ((_STARTED, _ANSWER, _ANSWER), 2, (0, 0)),
    ((_STARTED, _ANSWER), 2, (0, 1)),
    ((_STARTED,), 0, (1, 1)),
    ((_MISSING,), 0, (0, 0)),
])  # fmt: skip
def test_a_task_that_ends_after_its_answers_adds_no_row(end, words, gpus, died, monkeypatch):
    """`died` is how many rows say so after an end of its own and after the death of its worker."""
    rows = _rows(monkeypatch, _Stream(*words, end=end), gpus=gpus)
    others = words.count(_ANSWER) + words.count(_MISSING)
    statuses = [row.status for row in rows]
    assert statuses.count(Status.DIED) == died[end is _LostError], rows
    assert len(rows) == others + died[end is _LostError], rows
