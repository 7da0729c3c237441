"""Measurements inside an engine: answers, planted faults, steps and graphs between events, turns."""

from __future__ import annotations

import fcntl
import sys
import types
from typing import Any, cast

import pytest
import torch

from moedoctor.upstream.engine import decode_speed


@pytest.mark.parametrize("used", decode_speed._STEPS_OF_RUNNERS)
def test_each_step_is_between_events_until_they_are_removed(monkeypatch, used):
    clock = [0.0]
    monkeypatch.setattr("torch.cuda.Event", make_clocked(clock))

    def step(self: object, took: float) -> float:
        clock[0] += took
        return took

    steps = decode_speed._STEPS_OF_RUNNERS
    runners = {module: type("GPUModelRunner", (), {name: step}) for module, name in steps}
    for module, runner in runners.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(GPUModelRunner=runner))
    engine, name = runners[used[0]](), used[1]
    with decode_speed.record_step_events() as events:
        assert getattr(engine, name)(9.0) == 9.0
        assert events == [], "no GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with decode_speed.record_step_events() as events:
        assert getattr(engine, name)(9.0) == 9.0
        events.clear()
        assert decode_speed.measure_milliseconds(events) == []
        for took in (50.0, 2.0, 1.0, 3.0):
            getattr(engine, name)(took)
            clock[0] += 100
        assert decode_speed.measure_milliseconds(events[1:]) == [2.0, 1.0, 3.0]
    assert getattr(runners[used[0]], name) is step


def test_each_replay_of_a_graph_is_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def replay(self: torch.cuda.CUDAGraph) -> None:
        clock[0] += 7

    monkeypatch.setattr("torch.cuda.Event", make_clocked(clock))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    with decode_speed.record_graph_events() as events:
        torch.cuda.CUDAGraph.replay(cast(torch.cuda.CUDAGraph, None))
        clock[0] += 100
        assert decode_speed.measure_milliseconds(events) == [7.0]
    assert torch.cuda.CUDAGraph.replay is replay


@pytest.mark.parametrize(("replays", "known"), [(2, False), (3, True), (4, True), (5, False)])
def test_as_many_replays_as_steps_are_the_steps(replays: int, known: bool) -> None:
    """Two steps after the first, with the prefill as a replay or not; piecewise graphs have more."""
    events = []
    for took in range(replays):
        clock = [0.0]
        pair = [make_clocked(clock)(enable_timing=True) for _ in range(2)]
        pair[0].record()
        clock[0] += took
        pair[1].record()
        events.append(tuple(pair))
    found = decode_speed.time_decode_replays(events, 2)
    assert found == ([replays - 2, replays - 1] if known else None)


def make_clocked(clock: list[float]) -> type:
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


class Model:
    """Two routers and an expert, with the names that vLLM gives them."""

    def __init__(self) -> None:
        self.weights = {
            "layers.0.mlp.gate.weight": torch.arange(6.0).reshape(3, 2),
            "layers.1.router.proj.weight": torch.arange(6.0).reshape(3, 2).to(torch.float8_e4m3fn),
            "layers.0.mlp.experts.w13_weight": torch.zeros(3, 2, 2),
            "layers.0.mlp.gate.bias": torch.zeros(3),
        }

    def named_parameters(self) -> Any:
        return self.weights.items()

    def modules(self) -> list[Any]:
        kernel = types.SimpleNamespace(impl=types.SimpleNamespace(fused_experts=self))
        method = types.SimpleNamespace(moe_kernel=kernel)
        layers = [types.SimpleNamespace(quant_method=method)] * 2  # one layer, found twice
        return [*layers, types.SimpleNamespace(quant_method=types.SimpleNamespace(moe_kernel=kernel))]


def test_every_router_gets_the_rows_of_other_experts_and_its_own_back() -> None:
    model = Model()
    llm = types.SimpleNamespace(apply_model=lambda function: [function(model)])
    before = {name: weight.clone() for name, weight in model.weights.items()}
    with decode_speed.exchange_routers(llm) as changed:
        assert changed == 2
        for name, weight in model.weights.items():
            expected = before[name].float()
            is_router = weight.dim() == 2
            assert torch.equal(weight.float(), expected.roll(1, 0) if is_router else expected), name
    assert all(torch.equal(model.weights[name].float(), before[name].float()) for name in before)
    assert decode_speed.count_experts(llm) == {"Model": 2}


def test_measurements_so_far_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that dies while it is timed has answered already."""
    asked: list[tuple[int, Any]] = []

    def generate(llm: Any, prompts: Any, **sampling: Any) -> list[Any]:
        asked.append((len(prompts), sampling["max_tokens"]))
        if sampling["temperature"] and len(asked) > 3:
            raise RuntimeError("dead")
        step = {7: types.SimpleNamespace(logprob=-0.5)}
        return [types.SimpleNamespace(token_ids=[7], logprobs=[step])] * len(prompts)

    monkeypatch.setattr(decode_speed, "generate", generate)
    llm = types.SimpleNamespace(apply_model=lambda function: [function(Model())])
    given = {"prompts": [[1], [2]], "batches": [1, 3], "tokens": 4, "repeats": 1, "control": True}
    probe = decode_speed.measure_engine(llm, **given)
    assert next(probe)["answers"] == {"tokens": [[7], [7]], "logprobs": [[{"7": -0.5}]] * 2}
    assert next(probe)["wrong_answers"]["tokens"] == [[7], [7]]
    with pytest.raises(RuntimeError, match="dead"):
        next(probe)
    assert asked == [(2, 4), (2, 4), (1, 4), (3, 4)]


def test_engines_work_in_turn(tmp_path: Any) -> None:
    """The second can only begin while the first does not hold the turn."""
    folder = str(tmp_path)
    with decode_speed._take_turns(folder, 1) as first, decode_speed._take_turns(folder, 1) as second:
        for turn in (first, second):
            with turn(), (tmp_path / "turn").open("w") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
