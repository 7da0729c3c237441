"""JUnit XML, read back by the standard parser and by junitparser."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from report_samples import POINTS, PULL, case, crashed, full_report, report, scenario

from moedoctor.reporters.junit import JunitReporter
from moedoctor.results import ClaimResult, ClaimVerdict, Report, ScenarioResult


def _root(report: Report) -> ET.Element:
    return ET.fromstring(JunitReporter().render(report).encode("utf-8"))


def _outcomes(result: ScenarioResult) -> dict[str, str]:
    """Return the outcome by test name without parameters; a test that passes has an empty one."""
    tests = _root(report(result)).iter("testcase")
    results = {}
    for test in tests:
        outcomes = [child.tag for child in test if child.tag in ("failure", "error", "skipped")]
        assert len(outcomes) <= 1
        results[test.get("name", "").split(" ")[0]] = outcomes[0] if outcomes else ""
    return results


def test_a_scenario_is_a_suite_and_a_case_is_a_test() -> None:
    root = _root(full_report())
    suites = list(root)
    names = [suite.get("name") for suite in suites]
    assert names == ["MD001 nan_routing", "MD005 untraceable_offload", "baseline"]
    assert len(list(suites[0].iter("testcase"))) == len(full_report().scenarios[0].cases)
    first = next(suites[0].iter("testcase"))
    name = "faulty/model tokens=128 top_k=2 scoring=softmax"
    assert first.attrib == {"classname": "moedoctor.MD001.nan_routing", "name": name, "time": "0.000"}
    assert first.findtext("system-out") == 'reproduced: 13 of 128 rows\n{"rows":13}'


@pytest.mark.parametrize(
    ("verdict", "member", "name", "outcome"),
    [
        ("found", case("installed", "reproduced"), "installed/kernel/cuda:0", "failure"),
        ("found", case("sglang", "reproduced"), "sglang/kernel/cuda:0", "failure"),
        ("found", case("vllm@0.19.1", "reproduced"), "vllm@0.19.1/kernel/cuda:0", "failure"),
        ("failed", case("fixed", "reproduced"), "fixed/model", "failure"),
        ("failed", case("faulty", "clean"), "faulty/model", "failure"),
        ("absent", case("faulty", "clean"), "faulty/model", "skipped"),
        ("proved", case("faulty", "clean"), "faulty/model", ""),
        ("proved", case("installed", "clean"), "installed/kernel/cuda:0", ""),
        ("proved", case("vllm@0.19.1", "reproduced"), "vllm@0.19.1/kernel/cuda:0", ""),
        ("skipped", case("faulty", "skipped", reason="no GPU"), "faulty/model", "skipped"),
        ("error", crashed("vllm@0.19.1"), "vllm@0.19.1/kernel/cuda:0", "error"),
    ],
)
def test_only_cases_with_the_expected_verdict_pass(verdict, member, name, outcome):
    assert _outcomes(scenario(verdict, member)) == {name: outcome}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdict", "outcome"), [("failed", "failure"), ("error", "error"), ("skipped", "skipped")]
)
def test_a_verdict_that_no_case_shows_has_a_test_of_its_own(verdict: str, outcome: str) -> None:
    reason = "vllm@0.20.0 was reproduced, expected clean"
    result = scenario(verdict, case("vllm@0.20.0", "reproduced"), reason=reason)
    assert _outcomes(result) == {"vllm@0.20.0/kernel/cuda:0": "", "verdict": outcome}
    (test,) = (test for test in _root(report(result)).iter("testcase") if test.get("name") == "verdict")
    assert test[0].get("message") == reason


def test_a_crash_has_its_kind_its_message_and_the_end_of_stderr() -> None:
    error = _root(report(scenario("error", crashed("installed")))).find(".//error")
    assert error is not None
    message = "CUDA error: an illegal memory access was encountered"
    assert error.attrib == {"message": message, "type": "illegal_memory_access"}
    assert error.text == f"{message}\nTraceback\n[red]last words[/]"


def test_claims_conclusions_and_facts_are_properties() -> None:
    claim = ClaimResult("it is free", PULL, ClaimVerdict.REFUTED, {"a_us": 3.5}, "it is not")
    result = scenario("found", claims=(claim,), conclusions={"first_fixed": "0.20.0"}, reason="seen", line=3)
    elements = _root(report(result)).iter("property")
    properties = {element.get("name"): element.get("value") for element in elements}
    assert properties[f"claim: it is free ({PULL})"] == "refuted; it is not; a_us = 3.5"
    assert properties["conclusion.first_fixed"] == "0.20.0"
    assert properties["environment.env.VLLM_MOE"] == "1"
    assert (properties["verdict"], properties["reason"]) == ("found", "seen")
    assert properties["file"] == "scenarios/nan_routing.yaml:3"


def test_regressions_fail() -> None:
    suite = _root(report(scenario(), findings=("MD001: worse", "MD002: worse")))[-1]
    assert (suite.get("name"), suite.get("failures")) == ("baseline", "2")
    assert [failure.get("message") for failure in suite.iter("failure")] == ["MD001: worse", "MD002: worse"]


def test_junitparser_reads_it(tmp_path: Path) -> None:
    cases = [
        case("faulty", "reproduced", POINTS[0], seconds=0.25),
        case("installed", "reproduced", POINTS[0]),
        case("vllm@0.18.0", "skipped", reason="give its kernels"),
        crashed("vllm@0.20.0"),
    ]
    path = tmp_path / "junit.xml"
    path.write_text(JunitReporter().render(report(scenario("error", *cases))), encoding="utf-8")
    read = JUnitXml.fromfile(str(path))
    (suite,) = list(read)
    counts = (suite.tests, suite.failures, suite.errors, suite.skipped)
    assert (suite.name, *counts) == ("MD001 nan_routing", 4, 1, 1, 1)
    kinds = [[type(result) for result in test.result] for test in suite]
    assert kinds == [[], [Failure], [Skipped], [Error]]
    assert read.time == pytest.approx(0.25)
