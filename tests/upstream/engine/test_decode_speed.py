"""The steps of an engine and replays of its graphs between events on the GPU, and speeds of several texts."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import pytest
import torch

from moedoctor.upstream.engine import decode_speed
from moedoctor.upstream.engine.expert_cache_probes import _Speeds


@pytest.mark.parametrize("used", decode_speed._STEPS_OF_RUNNERS)
def test_each_step_is_between_events_until_they_are_removed(
    monkeypatch: pytest.MonkeyPatch, used: tuple[str, str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("torch.cuda.Event", clocked(clock))

    def step(self: object, took: float) -> float:
        clock[0] += took
        return took

    runners = {
        module: type("GPUModelRunner", (), {name: step}) for module, name in decode_speed._STEPS_OF_RUNNERS
    }
    for module, runner in runners.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(GPUModelRunner=runner))
    engine, name = runners[used[0]](), used[1]
    with decode_speed.step_events() as events:
        assert getattr(engine, name)(9.0) == 9.0
        assert events == [], "no GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with decode_speed.step_events() as events:
        assert getattr(engine, name)(9.0) == 9.0
        events.clear()
        assert decode_speed.milliseconds(events) == []
        for took in (50.0, 2.0, 1.0, 3.0):
            getattr(engine, name)(took)
            clock[0] += 100
        assert decode_speed.milliseconds(events[1:]) == [2.0, 1.0, 3.0]
    assert getattr(runners[used[0]], name) is step


def test_each_replay_of_a_graph_is_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def replay(self: torch.cuda.CUDAGraph) -> None:
        clock[0] += 7

    monkeypatch.setattr("torch.cuda.Event", clocked(clock))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    with decode_speed.graph_events() as events:
        torch.cuda.CUDAGraph.replay(cast(torch.cuda.CUDAGraph, None))
        clock[0] += 100
        assert decode_speed.milliseconds(events) == [7.0]
    assert torch.cuda.CUDAGraph.replay is replay


@pytest.mark.parametrize(("replays", "known"), [(2, False), (3, True), (4, True), (5, False)])
def test_as_many_replays_as_steps_are_the_steps(replays: int, known: bool) -> None:
    """Two steps after the first, with the prefill as a replay or not; piecewise graphs have more."""
    found = decode_speed.decode_replays(steps(*map(float, range(replays))), 2)
    assert found == ([replays - 2, replays - 1] if known else None)


def clocked(clock: list[float]) -> type:
    """Events that note the time of `clock`."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    return Event


class Stamp:
    """An event at a time in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Stamp) -> float:
        return end.at - self.at


def steps(*milliseconds: float) -> list[tuple[Any, Any]]:
    return [(Stamp(0.0), Stamp(took)) for took in milliseconds]


def test_a_pause_of_the_host_during_one_text_changes_no_speed() -> None:
    speeds = _Speeds()
    for pause in (0.0, 5.0, 0.0):
        for turn, took in enumerate((20.0, 10.0)):
            # The prefill, the first step, and two more.
            speeds.add(turn, 4, 2, 2e-3 * took + pause, steps(90.0, 30.0, took - 1, took + 1))
    by_clock, by_gpu = speeds.medians()
    assert by_clock == by_gpu == [pytest.approx(200.0), pytest.approx(400.0)]


def test_without_all_replays_there_is_no_speed_of_the_gpu() -> None:
    speeds = _Speeds()
    for turn in range(2):
        speeds.add(turn, 1, 3, 0.3, steps(90.0, 30.0, 10.0))
    assert speeds.medians() == ([10.0, 10.0], None)
