"""Reports to and from JSON (schema_version 1, `reporters/report.schema.json`).

Writing is strict JSON: a float that is not finite becomes the text ``nan``, ``inf`` or ``-inf``, and
stays text when read back. Reading tolerates unknown keys, so that a later minor version's report can
still be compared, and refuses everything else that is not as the schema says.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from moedoctor.json_text import JsonError, JsonPath, line_of, parse
from moedoctor.json_value import Node, ShapeError, plain
from moedoctor.results import (
    SCHEMA_VERSION,
    CaseResult,
    CaseVerdict,
    ClaimResult,
    ClaimVerdict,
    Report,
    ScenarioResult,
    ScenarioVerdict,
    Summary,
    Tier,
)
from moedoctor.text import escape

MAX_REPORT_BYTES = 64 * 1024 * 1024
_COUNTS = ("proved", "found", "absent", "failed", "skipped", "error")


class ReportError(Exception):
    """A report file that cannot be used; `str()` is one line, ``file:line: what is wrong``."""

    def __init__(self, file: str, line: int, message: str) -> None:
        super().__init__(escape(f"{file}:{line}: {message}"))
        self.file = file
        self.line = line
        self.message = message


def report_to_dict(report: Report) -> dict[str, Any]:
    """The report as plain JSON values, in the documented order of keys.

    Equal reports give equal results. Raises `ShapeError` for a value that JSON cannot hold (a tensor,
    a set), with its path.
    """
    summary = report.summary
    return {
        "schema_version": report.schema_version,
        "moedoctor": report.version,
        "command": report.command,
        "environment": plain(report.environment, ("environment",)),
        "scenarios": [_scenario(one, ("scenarios", i)) for i, one in enumerate(report.scenarios)],
        "findings": [plain(one) for one in report.findings],
        "summary": {
            **{name: getattr(summary, name) for name in _COUNTS},
            "exit_code": summary.exit_code,
            "cases": plain(summary.cases, ("summary", "cases")),
            "interrupted": summary.interrupted,
        },
    }


def report_from_dict(data: Any) -> Report:
    """The report that `report_to_dict` wrote. Raises `ShapeError` (a ValueError) naming what is wrong."""
    root = Node(data, ())
    version = root["schema_version"]
    if version.integer() != SCHEMA_VERSION:
        raise version.wrong(f"this moedoctor reads schema_version {SCHEMA_VERSION}; make the report again")
    return Report(
        command=root["command"].text(),
        environment=root["environment"].mapping(),
        scenarios=tuple(_read_scenario(one) for one in root["scenarios"].elements()),
        summary=_read_summary(root["summary"]),
        version=root["moedoctor"].text(),
        findings=tuple(one.text() for one in root.get("findings", []).elements()),
    )


def load_report(path: Path | str) -> Report:
    """The report in a file. Raises `ReportError` for anything else than a readable, valid report."""
    file = os.fspath(path)
    text = _read_text(file)
    try:
        data = parse(text)
    except JsonError as error:
        raise ReportError(file, error.line, str(error)) from error
    try:
        return report_from_dict(data)
    except ShapeError as error:
        raise ReportError(file, line_of(text, error.path), str(error)) from error


def _scenario(scenario: ScenarioResult, path: JsonPath) -> dict[str, Any]:
    return {
        "id": scenario.id,
        "name": scenario.name,
        "title": plain(scenario.title),
        "verdict": scenario.verdict.value,
        "file": plain(scenario.file),
        "line": scenario.line,
        "reason": plain(scenario.reason),
        "cases": [_case(one, (*path, "cases", i)) for i, one in enumerate(scenario.cases)],
        "claims": [_claim(one, (*path, "claims", i)) for i, one in enumerate(scenario.claims)],
        "conclusions": plain(scenario.conclusions, (*path, "conclusions")),
    }


def _case(case: CaseResult, path: JsonPath) -> dict[str, Any]:
    return {
        "subject": case.subject,
        "tier": case.tier.value,
        "device": case.device,
        "parameters": plain(case.parameters, (*path, "parameters")),
        "verdict": case.verdict.value,
        "figure": plain(case.figure),
        "evidence": plain(case.evidence, (*path, "evidence")),
        "reason": plain(case.reason),
        "seconds": Node(case.seconds, (*path, "seconds")).number(),
    }


def _claim(claim: ClaimResult, path: JsonPath) -> dict[str, Any]:
    return {
        "text": plain(claim.text),
        "source": plain(claim.source),
        "verdict": claim.verdict.value,
        "evidence": plain(claim.evidence, (*path, "evidence")),
        "reason": plain(claim.reason),
    }


def _read_scenario(node: Node) -> ScenarioResult:
    return ScenarioResult(
        id=node["id"].text(),
        name=node["name"].text(),
        title=node["title"].text(),
        verdict=node["verdict"].member(ScenarioVerdict),
        file=node["file"].text(),
        line=node.get("line", 1).integer(minimum=1),
        reason=node.get("reason").text_or_none(),
        cases=tuple(_read_case(one) for one in node["cases"].elements()),
        claims=tuple(_read_claim(one) for one in node["claims"].elements()),
        conclusions=node.get("conclusions", {}).mapping(),
    )


def _read_case(node: Node) -> CaseResult:
    return CaseResult(
        subject=node["subject"].text(),
        tier=node["tier"].member(Tier),
        device=node.get("device", "cpu").text(),
        parameters={key: node["parameters"][key].scalar() for key in node["parameters"].mapping()},
        verdict=node["verdict"].member(CaseVerdict),
        figure=node.get("figure", "").text(),
        evidence=node["evidence"].mapping(),
        reason=node.get("reason").text_or_none(),
        seconds=node["seconds"].number(),
    )


def _read_claim(node: Node) -> ClaimResult:
    return ClaimResult(
        text=node["text"].text(),
        source=node["source"].text(),
        verdict=node["verdict"].member(ClaimVerdict),
        evidence=node["evidence"].mapping(),
        reason=node.get("reason").text_or_none(),
    )


def _read_summary(node: Node) -> Summary:
    cases = node.get("cases", {})
    return Summary(
        **{name: node[name].integer() for name in _COUNTS},
        exit_code=node["exit_code"].integer(),
        cases={key: cases[key].integer() for key in cases.mapping()},
        interrupted=node.get("interrupted", False).boolean(),
    )


def _read_text(file: str) -> str:
    try:
        mode = os.stat(file).st_mode
        if stat.S_ISDIR(mode):
            raise ReportError(file, 1, "a folder, expected a report that `moedoctor run --format json` wrote")
        if not stat.S_ISREG(mode):
            raise ReportError(file, 1, "not a regular file")
        with open(file, "rb") as stream:
            data = stream.read(MAX_REPORT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ReportError(file, 1, f"cannot be read: {reason}") from error
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError(
            file, 1, f"more than {MAX_REPORT_BYTES // 2**20} MB, which is no report of moedoctor"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ReportError(file, line, f"not UTF-8 at byte {error.start}, expected JSON in UTF-8") from error
