"""`bench --engine`: engines compared and timed, with a stand-in for vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_stub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.bench import engines
from moedoctor.bench.engines import Plan, compare_tokens, measure, prompts_for, request_for


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with config.json; the stand-in gives its engines finite logprobs."""
    monkeypatch.setenv("PYTHONPATH", str(engine_stub.write(tmp_path / "site")))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return folder


def plan(model: Path, **changes: Any) -> Plan:
    return replace(Plan(model, tokens=4, repeats=2, batches=(1, 2)), **changes)


def test_engines_are_compared_and_only_right_ones_are_timed(model: Path) -> None:
    """`close` takes the reference's second token, 0.25 behind; `wrong` one that is not among its best."""
    rows = measure(plan(model, backends=("marlin", "close", "wrong")))
    by_backend = {row["moe_backend"]: row for row in rows if row["batch"] == 2}
    right, close, wrong = (by_backend[name] for name in ("marlin", "close", "wrong"))
    assert (right["tokens_same"], right["tokens_of"], right["ratio"]) == (2, 2, 1.0)
    # The stand-in takes 2 ms a token, prompt after prompt, which is 500. A rate is a difference of two times
    # and may come out a little higher; with the first tokens counted it would be 667.
    assert 100 < right["tokens_per_second"] < 600
    assert right["tokens_per_second_p20"] <= right["tokens_per_second"] <= right["tokens_per_second_p80"]
    assert right["first_token_ms"] >= 4
    assert (right["chosen"], right["repeatable"]) == ("MARLIN", True)
    assert (right["repeats"], close["repeats"]) == (4, 2), "the reference ran before and after the others"
    assert close["tokens_same"] == 0
    assert close["rounding"].endswith("by 0.25")
    assert close["tokens_per_second"] > 0
    assert "is not among the reference's" in wrong["wrong"]
    assert not {"tokens_per_second", "first_token_ms", "ratio"} & wrong.keys()


def test_a_fix_that_is_not_active_is_a_failure_and_one_that_is_not_needed_is_none(model: Path) -> None:
    """The stand-in applies `offload` alone; vLLM 0.21.0 does not need `routing`."""
    rows = measure(plan(model, fixes=("offload", "backend", "routing"), batches=(1,)))
    by_fix = {row["fix"]: row for row in rows}
    assert list(by_fix) == ["none", "offload", "backend", "routing"]
    assert "tokens_per_second" in by_fix["offload"]
    assert "tokens_per_second" in by_fix["routing"]
    assert by_fix["backend"]["failed"] == "the fix was asked for and is not active"


def test_an_engine_that_dies_is_a_row_and_the_next_one_is_the_reference(model: Path) -> None:
    ran: list[str] = []

    def run(request: Any) -> Any:
        ran.append(request.label)
        if request.arguments["moe_backend"] == "marlin":
            return engine_stub.died("no such\nbackend")
        return engines.run_engine(request)

    steps: list[tuple[int, int, str]] = []
    rows = measure(
        plan(model, backends=("marlin", "triton"), rounds=2, batches=(1,)),
        run=run,
        progress=lambda *step: steps.append(step),
    )
    assert [step[:2] for step in steps] == [(done, 4) for done in range(4)]
    assert steps[2][2] == "engine triton, fix none, round 2"
    assert ran == ["marlin, none", "triton, none", "triton, none", "marlin, none"], "in turn, and back"
    assert rows[0]["failed"] == "load: RuntimeError: no such"
    assert (rows[1]["ratio"], rows[1]["repeats"]) == (1.0, 4)


def test_a_machine_that_changed_shows_in_the_spread_of_the_reference(model: Path) -> None:
    """Nothing else would tell that the others were slower because of it."""
    ran: list[str] = []

    def run(request: Any) -> Any:
        ran.append(request.label)
        return answer(3.0 if len(ran) > 1 else 1.0, tokens=[1, 2])

    rows = measure(plan(model, backends=("marlin", "triton"), batches=(1,)), run=run)
    assert ran == ["marlin, none", "triton, none", "marlin, none"]
    reference, other = rows
    assert reference["tokens_per_second_p80"] > 2 * reference["tokens_per_second_p20"]
    assert (reference["starts"], other["starts"]) == (2, 1)


def test_an_answer_is_wrong_only_if_it_is_far_from_each_run_of_the_reference() -> None:
    def rows(*answers: list[int]) -> dict[str, Any]:
        each = [row(tokens) for tokens in answers]  # of one prompt
        return {key: [answered[key][0] for answered in each] for key in ("tokens", "logprobs")}

    references = [rows([1, 2], [5, 6]), rows([1, 12], [5, 16])]
    mixed = compare_tokens(references, rows([1, 2], [5, 16]))
    assert (mixed["same"], mixed["wrong"], mixed["parting"]) == (2, None, None)
    assert (
        compare_tokens(references, rows([1, 13], [5, 6]))["parting"]
        == "prompt 1, token 2: the reference's 12 leads 13 by 0.5"
    )
    assert "prompt 2" in compare_tokens(references, rows([1, 2], [5, 26]))["wrong"]


def test_a_reference_that_is_far_from_itself_is_wrong(model: Path) -> None:
    tokens = iter(([1, 2], [1, 2], [1, 9]))
    rows = measure(
        plan(model, backends=("marlin", "triton"), batches=(1,)),
        run=lambda request: answer(1.0, tokens=next(tokens)),
    )
    assert "is not among" in rows[0]["wrong"]
    assert rows[0]["repeatable"] is False
    assert (rows[1]["tokens_same"], "wrong" in rows[1]) == (1, False)


def test_a_second_run_of_the_reference_that_fails_loses_nothing(model: Path) -> None:
    answers = iter([answer(1.0, [1, 2]), answer(1.0, [1, 2]), engine_stub.died("out of memory")])
    steps: list[tuple[int, int, str]] = []
    rows = measure(
        plan(model, backends=("marlin", "triton"), batches=(1,)),
        run=lambda request: next(answers),
        progress=lambda *step: steps.append(step),
    )
    assert [row["ratio"] for row in rows] == [1.0, 1.0]
    assert (rows[0]["starts"], rows[0]["again"]) == (1, "failed: load: RuntimeError: out of memory")
    assert "again" not in rows[1]
    assert [step[:2] for step in steps] == [(0, 2), (1, 2), (2, 3)]


def test_prompts_are_text_for_a_tokenizer_and_the_users_variables_hold(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompts_for(model)
    assert all(5 <= token < 100 for prompt in ids for token in prompt if not isinstance(prompt, str))
    assert len({tuple(prompt) for prompt in ids}) == 8
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    request = request_for(plan(model, arguments={"max_model_len": 64}), "auto", "offload+backend")
    assert request.environ == {"VLLM_USE_DEEP_GEMM": "1", "MOEDOCTOR_FIXES": "offload,backend"}
    assert (request.arguments["max_model_len"], request.arguments["moe_backend"]) == (64, None)
    assert request.arguments["skip_tokenizer_init"] is True
    (model / "tokenizer.json").write_text("{}")
    assert all(isinstance(prompt, str) for prompt in prompts_for(model))
    assert request_for(plan(model), "auto", "none").arguments["skip_tokenizer_init"] is False


def answer(seconds: float, tokens: list[int]) -> Any:
    """What an engine gives that takes so long for all tokens but the first."""
    times = {"decoded": 1, "first_s": [0.1, 0.1], "whole_s": [0.1 + seconds] * 2, "repeatable": True}
    return engine_stub.answered((), probe=[{"batch": 1, **row(tokens), **times}])


def row(tokens: list[int], lead: float = 0.5) -> dict[str, Any]:
    steps = [{str(token): -0.1, str(token + 1): -0.1 - lead} for token in tokens]
    return {"tokens": [tokens], "logprobs": [steps]}


@pytest.mark.parametrize(
    ("reference", "other", "verdict"),
    [
        (row([1, 2]), row([1, 2]), ""),
        (row([1, 2]), row([1, 3]), "rounding"),
        (row([1, 2], lead=1.5), row([1, 3]), "leads 3 by 1.5"),
        (row([1, 2]), row([1, 9]), "is not among"),
        (row([1, 2]), row([1]), "one answer ends"),
        (row([1, 2]), row([1, 2], lead=float("nan")), "not finite"),
        (row([1, 2], lead=float("nan")), row([1, 3]), "leads 3 by nan"),
    ],
)
def test_what_is_rounding_and_what_is_wrong(reference: Any, other: Any, verdict: str) -> None:
    result = compare_tokens([reference], other)
    assert (result["parting"] is not None) == (verdict == "rounding")
    assert (result["wrong"] is not None) == (verdict not in ("", "rounding"))
    assert verdict in ("", "rounding") or verdict in result["wrong"]


def test_a_step_of_a_hundred_may_be_far_and_two_may_not() -> None:
    """Rounding sends a token to another expert now and then. The answers part in the last step."""
    tokens = list(range(100))
    reference = row(tokens, lead=0.5)
    reference["logprobs"][0][-1] = {"99": -0.1, "100": -1.2}
    other = row([*tokens[:-1], 100], lead=0.5)
    jumped = compare_tokens([reference], other)
    assert jumped["wrong"] is None
    assert jumped["parting"] == (
        "prompt 1, token 100: the reference's 99 leads 100 by 1.1; 1 of 100 steps differ by more "
        "than 1 in logprob"
    )
    other["logprobs"][0][7]["7"] -= 1.5
    assert compare_tokens([reference], other)["wrong"] == (
        "prompt 1, token 8: the logprob of 7 is 1.5 from the reference's; 2 of 100 steps differ by more than "
        "1 in logprob"
    )
    twice = {key: [*reference[key], *reference[key]] for key in reference}
    longer = {key: [*other[key], *reference[key]] for key in reference}
    assert compare_tokens([twice], longer)["wrong"] is None, "2 of 200"


def test_equal_tokens_with_far_logprobs_are_wrong() -> None:
    other = row([1, 2, 3])
    for step in other["logprobs"][0]:
        step.update({token: value - 2 for token, value in step.items()})
    result = compare_tokens([row([1, 2, 3])], other)
    assert (result["same"], result["parting"]) == (1, None)
    assert "3 of 3 steps" in result["wrong"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 7), st.integers(2, 40))
def test_any_far_token_is_wrong_wherever_it_is(tokens: list[int], at: int, far: int) -> None:
    other = list(tokens)
    other[at % len(tokens)] += far
    result = compare_tokens([row(tokens)], row(other))
    assert result["wrong"]
    assert result["same"] == 0
