"""The exit code of a report."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import case, report, reports, scenario

from moedoctor.gate import FailOn, decide
from moedoctor.results import CaseResult, CaseVerdict, Report, ScenarioVerdict

REPRODUCED = CaseVerdict.REPRODUCED

PROVED = scenario("proved")


def died(how: str) -> CaseResult:
    return case("faulty", "error", evidence={"death": how})


# Report, then the exit code for fail_on = error, error with strict, warning, never.
TABLE = [
    (report(), (0, 0, 0, 0)),
    (report(PROVED), (0, 0, 0, 0)),
    (report(scenario("found")), (1, 1, 1, 0)),
    (report(scenario("failed")), (1, 1, 1, 0)),
    (report(scenario("absent")), (0, 0, 1, 0)),
    (report(scenario("skipped")), (0, 1, 1, 0)),
    (report(scenario("proved", case("faulty", "reproduced"), case("installed", "skipped"))), (0, 1, 1, 0)),
    (report(scenario("error")), (3, 3, 3, 3)),
    (report(scenario("error"), scenario("found")), (1, 1, 1, 3)),
    (report(scenario("error"), scenario("skipped")), (3, 1, 1, 3)),
    (report(scenario("error"), scenario("absent")), (3, 3, 1, 3)),
    (report(scenario("error", died("broken_library"), died("disk_full"))), (1, 1, 1, 0)),
    (report(scenario("error", died("out_of_memory"), died("signal"))), (3, 3, 3, 3)),
    (report(PROVED, findings=("MD001: worse",)), (1, 1, 1, 0)),
    (report(scenario("skipped", case("installed", "reproduced"))), (1, 1, 1, 0)),
    (report(scenario("error", case("vllm@0.19.1", "reproduced"))), (1, 1, 1, 3)),
    (report(scenario("proved", case("vllm@0.19.1", "reproduced", expected=REPRODUCED))), (0, 0, 0, 0)),
]


@pytest.mark.parametrize(("record", "codes"), TABLE)
def test_exit_codes(record: Report, codes: tuple[int, int, int, int]) -> None:
    gates: list[tuple[bool, FailOn]] = [
        (False, "error"),
        (True, "error"),
        (False, "warning"),
        (True, "never"),
    ]
    assert tuple(decide(record, strict=strict, fail_on=level).exit_code for strict, level in gates) == codes


def test_what_the_baseline_holds_of_a_named_release_gives_no_exit_code() -> None:
    old, new = case("vllm@0.19.1", "reproduced"), case("vllm@0.21.0", "reproduced")

    def code(before: CaseResult, *after: CaseResult) -> int:
        baseline, current = (report(scenario("found", *cases)) for cases in ((before,), after))
        return decide(current, strict=False, fail_on="error", baseline=baseline).exit_code

    assert code(old, old) == 0
    assert code(old, old, new) == 1
    assert code(case("vllm@0.19.1", "clean"), old) == 1
    assert code(case("installed", "reproduced"), case("installed", "reproduced")) == 1


@settings(max_examples=25)
@given(reports, st.booleans(), st.sampled_from(("error", "warning", "never")))
def test_every_other_exit_code_than_0_has_reasons(record: Report, strict: bool, fail_on: FailOn) -> None:
    decision = decide(record, strict=strict, fail_on=fail_on)
    assert bool(decision.reasons) == bool(decision.exit_code)
    for result in record.scenarios if decision.exit_code == 1 else ():
        if result.verdict is ScenarioVerdict.FAILED:
            assert any(reason.startswith(f"{result.id} ") for reason in decision.reasons)


@settings(max_examples=25)
@given(reports, st.booleans())
def test_a_stricter_gate_never_lets_more_through(record: Report, strict: bool) -> None:
    codes = [decide(record, strict=strict, fail_on=each).exit_code for each in ("never", "error", "warning")]
    assert set(codes) <= {0, 1, 3}
    assert codes[0] != 1
    for lenient, hard in itertools.pairwise(codes):
        assert lenient == 0 or hard != 0
