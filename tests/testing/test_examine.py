"""The examination itself: children, crashes, small examples, and what a target declares."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedoctor.processes.ask import Ended
from moedoctor.testing import TargetError, check_expert_cache, check_moe, check_router, child, moe
from moedoctor.testing.examine import examine, name_target
from moedoctor.testing.questions import Setting, load_questions

PLANTED = str(Path(__file__).with_name("planted.py"))


@pytest.mark.usefixtures("forked_examination")
@pytest.mark.slow
def test_a_crash_and_a_hang_are_answers_and_the_others_are_asked() -> None:
    questions = ("ordinary", "nan_rows", "nan_entry", "equal_logits", "bias")
    report = check_router(f"{PLANTED}:die_of_nan", only=questions, seconds=2)
    answers = {answer.question: answer for answer in report.answers}
    assert [answers[name].verdict.value for name in questions] == [
        "right", "crashed", "crashed", "right", "skipped",
    ]  # fmt: skip
    assert "SIGABRT" in str(answers["nan_rows"].reason)
    assert answers["nan_rows"].entry == "MD001"
    assert answers["nan_entry"].reason == "no answer within 2 s"
    assert answers["bias"].reason == "takes no bias"
    assert [answer.question for answer in report.failed] == ["nan_rows", "nan_entry"]
    assert report.badge == "moedoctor router: 2 of 4 right, 2 crashed"


def test_an_examination_that_was_interrupted_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"package": "x 1", "machine": "CPU", "options": {}, "undefined": {}}
    at = {"variant": "", "question": "nan_rows"}
    events = (
        {"event": "target", "kind": "router", **facts},
        {"event": "answer", "variant": "", "question": "ordinary", "verdict": "right"},
        {"event": "begin", **at, "sizes": {"tokens": 1}},
    )
    ended = Ended(events, None, "", 1.0, 60.0, interrupted=True)
    monkeypatch.setitem(examine.__globals__, "run_module", lambda *_, **__: ended)
    report = check_router("x:y")
    passes = {answer.question: answer.passes for answer in report.answers}
    assert passes == {"ordinary": True, "nan_rows": False}
    assert [answer.reason for answer in report.failed] == ["interrupted, with the questions after it"]


def test_an_error_that_a_refused_launch_leaves_is_not_the_next_questions(monkeypatch):
    left = ["invalid argument"]

    def raise_pending(device: str) -> None:
        if left:
            raise RuntimeError(left.pop())

    def compute(name: str, sizes: Any, setting: Setting) -> None:
        if name == "no_tokens":
            raise ValueError("no token")

    monkeypatch.setattr(child, "_raise_pending_error", raise_pending)
    questions = load_questions("router")
    request = {"seconds": 60.0, "sizes": {"tokens": 1}}
    first, second = (
        list(child._ask(compute, questions[name], Setting(device="cuda:0"), request))[-1]
        for name in ("no_tokens", "renormalized")
    )
    assert (first["verdict"], first["reason"]) == ("refused", "ValueError: no token")
    assert second["verdict"] == "right"


@pytest.mark.parametrize(("hidden", "wrong", "right"), [(16, 1, True), (256, 5, True), (256, 13, False)])
def test_a_short_row_may_miss_an_element_and_no_row_a_share(monkeypatch, hidden, wrong, right):
    expected = torch.randn(4, hidden, generator=torch.Generator().manual_seed(0))
    allowance = expected.norm(dim=1, keepdim=True) / hidden**0.5 + expected.abs()
    output = expected + 0.035 * allowance * (torch.arange(hidden) < wrong)  # 0.03 would match
    monkeypatch.setattr(moe, "compute_expected", lambda given, inputs, near: expected)
    ids = torch.zeros(4, 1, dtype=torch.int32)
    call = SimpleNamespace(x=output, topk_ids=ids, topk_weights=ids.float(), experts=1, first=0, layer=None)
    assert (moe.judge(call, output, "none", named=False) is None) == right


@pytest.mark.usefixtures("forked_examination")
def test_the_smallest_example_is_found_and_its_line_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    report = check_router(f"{PLANTED}:route_one_expert_of_equals", only=("equal_logits",), seed=3)
    (answer,) = report.answers
    assert answer.sizes == {"tokens": 1, "experts": 2, "top_k": 2}
    assert answer.repeat is not None
    assert "seed=3" in answer.repeat
    exec(answer.repeat, {})
    assert f"equal_logits: wrong: {answer.reason}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_refusal_counts_apart_and_where_it_is_not_allowed_it_fails() -> None:
    report = check_expert_cache(f"{PLANTED}:Declared", only=("unknown_ids", "ordinary", "skipped_ids"))
    found = {answer.question: (answer.verdict.value, answer.passes) for answer in report.answers}
    assert found == {
        "ordinary": ("right", True),
        "unknown_ids": ("refused", True),
        "skipped_ids": ("refused", True),  # documented as undefined
    }
    assert {answer.undefined for answer in report.answers} == {None, "ids must be experts"}


@pytest.mark.usefixtures("forked_examination")
def test_a_format_that_is_refused_is_not_asked_about_and_a_mistake_is_named() -> None:
    asked = {"formats": ("bf16", "mxfp4"), "activations": ("silu", "gelu")}
    report = check_moe(f"{PLANTED}:swapped", **asked, only=("ordinary", "no_tokens"))
    found = {(answer.variant, answer.question): answer for answer in report.answers}
    first = found["bf16 silu", "ordinary"]
    assert str(first.reason).endswith("as with the gate and up halves of w13 swapped")
    assert first.sizes is not None
    assert first.sizes["tokens"] == first.sizes["experts"] == first.sizes["top_k"] == 1
    assert found["bf16 gelu", "ordinary"].verdict.value == "refused"
    assert found["bf16 gelu", "no_tokens"].reason == "refuses bf16 gelu"
    assert [answer.variant for answer in report.failed] == ["bf16 silu"] * 2 + ["mxfp4 silu"] * 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere_at_all:fn", "No module named 'nowhere_at_all'"),
        ("moedoctor.text:nothing", "has no attribute 'nothing'"),
        ("absent.py:fn", "no such file"),
        ("fn", "expected package.module:name or file.py:name"),
    ],
)
def test_a_target_that_is_not_there_is_one_line(target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        check_router(target)
    assert "\n" not in str(caught.value)


def test_a_function_is_found_by_its_name_and_a_nested_one_is_refused() -> None:
    from moedoctor.fixes.routing import topk_softmax

    assert name_target(topk_softmax) == "moedoctor.fixes.routing:topk_softmax"
    nested: Any = lambda logits, top_k: None  # noqa: E731
    with pytest.raises(ValueError, match="not at the top level of a module"):
        check_router(nested)
