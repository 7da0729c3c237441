"""Measurements inside an engine, and answers of two engines on the prompts that one decides clearly."""

from __future__ import annotations

import fcntl
import json
import math
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.upstream.engine import clear_prompts, decode_speed
from moedoctor.upstream.engine.clear_prompts import Answers, compare, find_clear, make_prompts


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


def test_memory_that_repeats_leave_behind_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two repeats after the first, which fills caches. In bytes: torch alone takes more than 64 MiB."""
    assert 64 << 20 <= (decode_speed.read_status("VmRSS:") or 0) < 1 << 40
    held = {"VmRSS:": iter([5 << 30, 6 << 30, 9 << 30, 7 << 30])}
    monkeypatch.setattr(decode_speed, "generate", lambda *_, **__: [])
    monkeypatch.setattr(decode_speed, "read_status", lambda name: next(held[name]))
    llm = types.SimpleNamespace(apply_model=lambda function: [function(Model())])
    for repeats, growth in ((3, 4 << 30), (1, None)):
        (found,) = decode_speed.measure_engine(llm, prompts=[], batches=[1], tokens=4, repeats=repeats)
        assert found["host_growth"] == growth


def test_engines_work_in_turn(tmp_path: Any) -> None:
    """The second can only begin while the first does not hold the turn."""
    folder = str(tmp_path)
    with decode_speed._take_turns(folder, 1) as first, decode_speed._take_turns(folder, 1) as second:
        for turn in (first, second):
            with turn(), (tmp_path / "turn").open("w") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def answers(leads: list[float], shift: int = 0, gap: float = 0.0) -> Answers:
    """One token for each lead over the second best; `shift` makes other tokens, `gap` other logprobs."""
    tokens = [[prompt + shift] for prompt in range(len(leads))]
    steps = [
        [{str(ids[0]): -0.1 - gap, str(ids[0] + 1000): -0.1 - gap - lead}]
        for ids, lead in zip(tokens, leads, strict=True)
    ]
    return Answers(tokens, steps)


def test_a_prompt_is_clear_if_its_best_token_leads_at_every_step() -> None:
    two = Answers(
        [[1, 2], [1, 2]],
        [
            [{"1": -0.1, "3": -0.1 - clear_prompts.CLEAR - 1e-6}, {"2": -0.1, "3": -0.9}],
            [{"1": -0.1, "3": -0.9}, {"2": -0.1, "3": -0.1 - clear_prompts.CLEAR / 2}],
        ],
    )
    assert find_clear(two) == [0]
    assert find_clear(Answers([[1]], [[{"1": 0.0}]])) == [], "one logprob says nothing about the second token"


@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.integers(0, 40))
def test_only_clear_prompts_count_and_one_in_ten_may_differ(leads: list[float], wrong: int) -> None:
    reference, other = answers(leads), answers(leads)
    changed = Answers([[-1] if i < wrong else ids for i, ids in enumerate(other.tokens)], other.logprobs)
    result = compare(changed, reference)
    clear = find_clear(reference)
    assert result.clear == len(clear)
    assert result.same == sum(prompt >= wrong for prompt in clear)
    assert result.is_compared == (len(clear) >= clear_prompts.MIN_CLEAR)
    assert (result.problem is not None) == (
        result.is_compared and result.same < clear_prompts.MIN_SAME * len(clear)
    )


def test_the_distance_is_the_median_of_the_clear_prompts() -> None:
    leads = [1.0] * 8 + [0.1]
    assert compare(answers(leads, gap=0.25), answers(leads)).distance == pytest.approx(0.25)
    assert compare(answers(leads, shift=500), answers(leads)).distance == math.inf, "no token in common"
    assert compare(answers([0.1]), answers([0.1])).distance is None


def test_a_logprob_that_is_not_finite_is_wrong_also_as_text() -> None:
    broken = Answers([[0]] * 8, [[{"0": "nan", "1": -1.0}]] * 8)  # type: ignore[dict-item]
    assert compare(broken, answers([1.0] * 8)).problem == "a logprob is not finite"


def test_prompts_are_text_for_a_tokenizer_and_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    ids = make_prompts(tmp_path)
    assert ids == make_prompts(tmp_path)
    assert all(3 <= token < 100 for prompt in ids for token in prompt if isinstance(token, int))
    (tmp_path / "tokenizer.json").write_text("{}")
    texts = make_prompts(tmp_path)
    assert all(isinstance(prompt, str) for prompt in texts)
    assert len(texts) == len(set(map(str, texts))) > 50
