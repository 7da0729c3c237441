"""`junit`: JUnit XML for CI servers.

One testsuite a scenario, one testcase a case. What passes and what fails:

| case | |
|---|---|
| `faulty` reproduced, any other subject clean | passes |
| `installed` or `fixed` reproduced | failure |
| named release (``vllm@0.19.1``) reproduced | passes, with a line in system-out |
| `faulty` clean | failure, in an `absent` scenario skipped |
| `faulty` or `fixed` in a `proved` or `found` scenario | passes, the scenario file expected it |
| skipped, error | skipped, error |

If a scenario is `found`, `failed`, `error` or `skipped` and no case shows it, a testcase called ``verdict``
does. A testsuite ``baseline`` holds one failure for each regression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from moedoctor.comparison import expected_verdict
from moedoctor.interfaces import Reporter
from moedoctor.reporters.run import crash_notes
from moedoctor.reporters.text import (
    clean,
    deciding_figure,
    figures,
    one_line,
    short_evidence,
    short_parameters,
)
from moedoctor.results import CaseResult, CaseVerdict, Report, ScenarioResult, ScenarioVerdict, plain

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PROVEN = (ScenarioVerdict.PROVED, ScenarioVerdict.FOUND)
_SCENARIO_OUTCOMES = {
    ScenarioVerdict.FOUND: "failure",
    ScenarioVerdict.FAILED: "failure",
    ScenarioVerdict.ERROR: "error",
    ScenarioVerdict.SKIPPED: "skipped",
}


@dataclass(frozen=True)
class _Test:
    """One testcase element."""

    classname: str
    name: str
    seconds: float = 0.0
    outcome: str = ""
    """``failure``, ``error``, ``skipped``, or empty if it passes."""
    kind: str = ""
    """The `type` attribute of a failure or error."""
    message: str = ""
    details: str = ""
    output: str = ""


class JunitReporter(Reporter):
    """JUnit XML as Jenkins, GitLab and GitHub's actions read it."""

    name = "junit"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        root = ET.Element("testsuites", name="moedoctor")
        for scenario in report.scenarios:
            properties = [(f"environment.{name}", text) for name, text in figures(report.environment)]
            properties += list(_properties(scenario))
            _suite(root, f"{scenario.id} {scenario.name}", _tests(scenario), properties)
        if report.findings:
            tests = [
                _Test("moedoctor.baseline", f"regression {number}", 0.0, "failure", "regression", finding)
                for number, finding in enumerate(report.findings, 1)
            ]
            _suite(root, "baseline", tests, [])
        for count in ("tests", "failures", "errors", "skipped"):
            root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
        root.set("time", _seconds(sum(float(suite.get("time", "0")) for suite in root)))
        ET.indent(root)
        text = ET.tostring(root, encoding="unicode")
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite(root: ET.Element, name: str, tests: list[_Test], properties: list[tuple[str, str]]) -> None:
    suite = ET.SubElement(root, "testsuite", name=_xml(one_line(name)), tests=str(len(tests)))
    for attribute, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(test.outcome == outcome for test in tests)))
    suite.set("time", _seconds(sum(test.seconds for test in tests)))
    if properties:
        holder = ET.SubElement(suite, "properties")
        for key, value in properties:
            ET.SubElement(holder, "property", name=_xml(one_line(key)), value=_xml(one_line(value)))
    for test in tests:
        element = ET.SubElement(suite, "testcase", classname=_xml(test.classname), name=_xml(test.name))
        element.set("time", _seconds(test.seconds))
        if test.outcome:
            result = ET.SubElement(element, test.outcome, message=_xml(one_line(test.message)))
            if test.kind:
                result.set("type", _xml(test.kind))
            result.text = _xml(clean(test.details)) or None
        if test.output:
            ET.SubElement(element, "system-out").text = _xml(test.output)


def _tests(scenario: ScenarioResult) -> list[_Test]:
    tests = [_test(scenario, case) for case in scenario.cases]
    outcome = _SCENARIO_OUTCOMES.get(scenario.verdict)
    if outcome and all(test.outcome != outcome for test in tests):
        why = scenario.reason or f"the scenario is {scenario.verdict.value}"
        tests.append(_Test(_classname(scenario), "verdict", 0.0, outcome, scenario.verdict.value, why))
    return tests


def _test(scenario: ScenarioResult, case: CaseResult) -> _Test:
    outcome, kind, message = _judge(scenario, case)
    subject = f"{case.subject}/{case.tier.value}" + ("" if case.device == "cpu" else f"/{case.device}")
    evidence = json.dumps(plain(case.evidence), ensure_ascii=False)
    last_words = "\n".join(line for note in crash_notes([case]) for line in (note.message, *note.stderr_tail))
    return _Test(
        classname=_classname(scenario),
        name=one_line(f"{subject} {short_parameters(case.parameters)}"),
        seconds=case.seconds,
        outcome=outcome,
        kind=kind if outcome in ("failure", "error") else "",
        message=message,
        details=last_words,
        output="" if outcome == "skipped" else f"{case.verdict.value}: {deciding_figure(case)}\n{evidence}",
    )


def _judge(scenario: ScenarioResult, case: CaseResult) -> tuple[str, str, str]:
    """Return the outcome of a case, its type and its message."""
    figure = deciding_figure(case)
    if case.verdict is CaseVerdict.SKIPPED:
        return "skipped", "", figure
    if case.verdict is CaseVerdict.ERROR:
        return "error", one_line(str(case.evidence.get("death", "error"))), case.reason or figure
    expected = expected_verdict(case.subject)
    behaved = case.subject in ("faulty", "fixed") and scenario.verdict in _PROVEN
    if behaved or expected in (None, case.verdict):
        return "", "", ""
    if expected is CaseVerdict.REPRODUCED and scenario.verdict is ScenarioVerdict.ABSENT:
        return "skipped", "", f"absent: {scenario.reason or figure}"
    return "failure", case.verdict.value, f"{case.subject} is {case.verdict.value}: {figure}"


def _properties(scenario: ScenarioResult) -> Iterator[tuple[str, str]]:
    yield "verdict", scenario.verdict.value
    if scenario.reason:
        yield "reason", scenario.reason
    yield "file", f"{scenario.file}:{scenario.line}"
    for claim in scenario.claims:
        parts = (claim.verdict.value, claim.reason or "", short_evidence(claim.evidence))
        yield f"claim: {claim.text} ({claim.source})", "; ".join(part for part in parts if part)
    for name, text in figures(scenario.conclusions):
        yield f"conclusion.{name}", text


def _classname(scenario: ScenarioResult) -> str:
    return one_line(f"moedoctor.{scenario.id}.{scenario.name}")


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _xml(text: str) -> str:
    return _NOT_XML.sub("", text)
