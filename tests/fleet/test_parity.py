"""The GPU that the bits convict; a computation on a CPU gives the same bits twice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.fleet import parity


def _answer(
    *sums: str, gpu: str = "H200", error: float = 0.001, control: bool = True, given: str = "in"
) -> Any:
    case = {"case": "decode", "input_sha256": given, "output_sha256": list(sums)}
    case |= {"relative_error": error, "control_noticed": control}
    return {"moedoctor": "1", "environment": {"gpu": gpu, "torch": "2"}, "cases": [case]}


def _named(answers: dict[str, Any]) -> list[str]:
    return [odd.name for odd in parity.judge(answers).oddities]


@given(
    count=st.integers(1, 12), odd=st.integers(0), how=st.sampled_from(["others", "itself", "input", "error"])
)
def test_one_odd_gpu_is_named_and_equal_ones_are_not(count: int, odd: int, how: str) -> None:
    answers = {f"gpu-{index}": _answer("a", "a") for index in range(count + 2)}
    name = f"gpu-{odd % len(answers)}"
    wrong = {
        "others": _answer("b", "b"),
        "itself": _answer("a", "b"),
        "input": _answer("a", "a", given="other"),
        "error": _answer("b", "b", error=0.5),
    }
    assert _named(answers) == []
    answers[name] = wrong[how]
    assert _named(answers) == [name]
    assert parity.judge(dict(reversed(answers.items()))) == parity.judge(answers)


def test_two_gpus_that_differ_are_both_named_with_their_errors() -> None:
    judged = parity.judge({"0": _answer("a", "a", error=0.001), "1": _answer("b", "b", error=0.3)})
    assert [odd.name for odd in judged.oddities] == ["0", "1"]
    assert "relative error 0.3" in judged.oddities[1].what


def test_a_kernel_that_is_not_deterministic_convicts_no_gpu() -> None:
    judged = parity.judge({str(index): _answer("a", str(index)) for index in range(4)})
    assert judged.oddities == ()
    assert "not deterministic" in judged.undecided[0]


def test_bits_of_other_models_are_not_compared() -> None:
    answers = {"0": _answer("a", "a"), "1": _answer("b", "b", gpu="B200")}
    assert _named(answers) == []
    assert parity.judge(answers).compared == {"H200": 1, "B200": 1}


def test_a_long_or_hostile_name_of_a_case_is_short_and_clean() -> None:
    answers = {name: _answer("a", "a", error=0.5) for name in "01"}
    for answer in answers.values():
        answer["cases"][0]["case"] = "\x1b[31m" + "x" * 5000
    (first, _) = parity.judge(answers).oddities
    assert first.case.isprintable()
    assert len(first.case) < 150


def test_an_equal_but_wrong_result_is_named() -> None:
    assert _named({"0": _answer("a", "a", error=0.5), "1": _answer("a", "a", error=0.5)}) == ["0", "1"]


@pytest.mark.parametrize(
    "cases", [None, 3, [], [3], [{"case": "decode"}], [{"case": [], "output_sha256": "a"}]]
)
def test_a_hostile_report_is_undecided_or_nothing(cases: Any) -> None:
    judged = parity.judge({"0": {"environment": 4, "cases": cases}, "1": _answer("a", "a")})
    assert judged.oddities == ()


def test_a_gpu_whose_control_failed_is_not_trusted() -> None:
    judged = parity.judge({"0": _answer("a", "a", control=False)})
    assert "planted" in judged.undecided[0]


def test_a_cpu_computes_the_same_bits_twice_and_notices_a_planted_bit() -> None:
    report = parity.answer(2)
    again = parity.answer(2)
    assert [case["case"] for case in report["cases"]] == ["decode", "prefill", "memory"]
    for case, repeated in zip(report["cases"], again["cases"], strict=True):
        assert case["control_noticed"]
        assert len({*case["output_sha256"], *repeated["output_sha256"]}) == 1
        assert case["input_sha256"] == repeated["input_sha256"]
    assert parity.judge({"a": report, "b": again}).oddities == ()
