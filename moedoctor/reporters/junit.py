"""`junit`: JUnit XML for CI servers.

One testsuite a scenario, one testcase a case. What passes and what fails:

| case | |
|---|---|
| `faulty` reproduced, any other subject clean | passes |
| `installed` or `fixed` reproduced | failure |
| named release (``vllm@0.19.1``) reproduced | failure if `found` and its file does not expect it |
| `faulty` clean | failure, in an `absent` scenario skipped |
| `faulty` or `fixed` in a `proved` or `found` scenario | passes, the scenario file expected it |
| skipped, error | skipped, error |

If a scenario is `found`, `failed`, `error` or `skipped` and no case shows it, a testcase called ``verdict``
does. A testsuite ``baseline`` holds one failure for each regression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from moedoctor.comparison import expect_verdict
from moedoctor.interfaces import Reporter
from moedoctor.reporters.findings import Findings
from moedoctor.reporters.pages.run import crash_notes
from moedoctor.reporters.text import explain_case, format_evidence, format_parameters, list_figures
from moedoctor.results import (
    VERDICTS,
    CaseResult,
    CaseVerdict,
    Report,
    ScenarioResult,
    ScenarioVerdict,
    to_json,
)
from moedoctor.text import COMMAND, clean, join_lines

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PROVEN = (ScenarioVerdict.PROVED, ScenarioVerdict.FOUND)


class JunitReporter(Reporter):
    """JUnit XML as Jenkins, GitLab and GitHub's actions read it."""

    name = "junit"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        root = ET.Element("testsuites", name="moedoctor")
        facts = [(f"environment.{name}", text) for name, text in list_figures(report.environment)]
        for scenario in report.scenarios:
            suite = _add_scenario(root, scenario, facts)
            _count(suite, sum(case.seconds for case in scenario.cases))
        if report.findings:
            suite = ET.SubElement(root, "testsuite", name="baseline")
            for number, finding in enumerate(report.findings, 1):
                name = f"regression {number}"
                _test(
                    suite, "moedoctor.baseline", name, outcome="failure", kind="regression", message=finding
                )
            _count(suite)
        return _write_document(root)


def to_junit(findings: Findings) -> str:
    """Return one testsuite for a command: a testcase for each finding, each check that passed or was skipped.

    A note does not fail.
    """
    root = ET.Element("testsuites", name="moedoctor")
    suite = _add(root, "testsuite", name=f"moedoctor {findings.command}")
    classname = f"moedoctor.{findings.command}"
    for finding in findings.found:
        place = f"{finding.file}:{finding.line}" if finding.line else finding.file
        name = finding.item or f"{finding.rule} {finding.title}"
        if finding.level == "note":
            _test(suite, classname, name)
            _add(suite[-1], "system-out", join_lines(finding.message))
        else:
            message, kind = f"{place}: {finding.message}", finding.level
            _test(suite, classname, name, outcome="failure", kind=kind, message=message)
    for name in findings.passed:
        _test(suite, classname, name)
    for name, why in findings.skipped:
        _test(suite, classname, name, outcome="skipped", message=why)
    _count(suite)
    return _write_document(root)


def _write_document(root: ET.Element) -> str:
    _count(root, sum(float(suite.get("time", "0")) for suite in root))
    ET.indent(root)
    text = COMMAND.sub(
        lambda match: f"{match[0][:-1]}&#{ord(match[0][-1])};", ET.tostring(root, encoding="unicode")
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _count(element: ET.Element, seconds: float = 0.0) -> None:
    """Set the numbers and the time of the testcases in a testsuite, or in all of them."""
    tags = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, tag in tags.items():
        element.set(attribute, str(sum(1 for _ in element.iter(tag))))
    element.set("time", f"{seconds:.3f}")


def _add_scenario(root: ET.Element, scenario: ScenarioResult, facts: list[tuple[str, str]]) -> ET.Element:
    suite = _add(root, "testsuite", name=f"{scenario.id} {scenario.name}")
    properties = _add(suite, "properties")
    for key, value in (*facts, *_list_properties(scenario)):
        _add(properties, "property", name=key, value=value)
    classname = f"moedoctor.{scenario.id}.{scenario.name}"
    for case in scenario.cases:
        _add_case(suite, classname, scenario, case)
    outcome = VERDICTS[scenario.verdict].junit
    if outcome and suite.find(f"testcase/{outcome}") is None:
        why = scenario.reason or f"the scenario is {scenario.verdict.value}"
        _test(suite, classname, "verdict", outcome=outcome, kind=scenario.verdict.value, message=why)
    return suite


def _add_case(suite: ET.Element, classname: str, scenario: ScenarioResult, case: CaseResult) -> None:
    outcome, kind, message = _judge(scenario, case)
    subject = f"{case.subject}/{case.tier.value}" + ("" if case.device == "cpu" else f"/{case.device}")
    name = f"{subject} {format_parameters(case.parameters)}"
    last_words = "\n".join(line for note in crash_notes([case]) for line in (note.message, *note.stderr_tail))
    _test(suite, classname, name, case.seconds, outcome, kind, message, last_words)
    if outcome != "skipped":
        output = f"{case.verdict.value}: {explain_case(case)}\n{to_json(case.evidence, lines=0)}"
        _add(suite[-1], "system-out", output.rstrip())


def _test(
    suite: ET.Element,
    classname: str,
    name: str,
    seconds: float = 0.0,
    outcome: str = "",
    kind: str = "",
    message: str = "",
    details: str = "",
) -> None:
    """Add a testcase. `outcome` is ``failure``, ``error``, ``skipped``, or empty if it passes."""
    test = _add(suite, "testcase", classname=classname, name=name, time=f"{seconds:.3f}")
    if outcome:
        type = {"type": kind} if kind and outcome != "skipped" else {}
        _add(test, outcome, clean(details), message=message, **type)


def _judge(scenario: ScenarioResult, case: CaseResult) -> tuple[str, str, str]:
    """Return the outcome of a case, its type and its message."""
    figure = explain_case(case)
    outcome = VERDICTS[case.verdict].junit
    if case.verdict is CaseVerdict.SKIPPED:
        return outcome, "", figure
    if case.verdict is CaseVerdict.ERROR:
        return outcome, join_lines(str(case.evidence.get("death", "error"))), case.reason or figure
    expected = expect_verdict(case.subject)
    behaved = case.subject in ("faulty", "fixed") and scenario.verdict in _PROVEN
    affected = case.affected and scenario.verdict is ScenarioVerdict.FOUND
    if behaved or (expected in (None, case.verdict) and not affected):
        return "", "", ""
    if expected is CaseVerdict.REPRODUCED and scenario.verdict is ScenarioVerdict.ABSENT:
        return "skipped", "", f"absent: {scenario.reason or figure}"
    return "failure", case.verdict.value, f"{case.subject} is {case.verdict.value}: {figure}"


def _list_properties(scenario: ScenarioResult) -> Iterator[tuple[str, str]]:
    yield "verdict", scenario.verdict.value
    if scenario.reason:
        yield "reason", scenario.reason
    yield "file", f"{scenario.file}:{scenario.line}"
    for claim in scenario.claims:
        parts = (claim.verdict.value, claim.reason or "", format_evidence(claim.evidence))
        yield f"claim: {claim.text} ({claim.source})", "; ".join(part for part in parts if part)
    for name, text in list_figures(scenario.conclusions):
        yield f"conclusion.{name}", text


def _add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    """Add an element without the characters that XML cannot hold; each attribute is on one line."""
    shown = {name: _NOT_XML.sub("", join_lines(value)) for name, value in attributes.items()}
    element = ET.SubElement(parent, tag, shown)
    element.text = _NOT_XML.sub("", text) or None
    return element
