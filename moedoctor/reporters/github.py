"""`github`: workflow commands that GitHub Actions shows as annotations, and its job summary."""

from __future__ import annotations

from collections.abc import Iterator

from moedoctor.interfaces import Reporter
from moedoctor.reporters.findings import Findings
from moedoctor.reporters.markdown import MarkdownReporter
from moedoctor.reporters.text import summarize
from moedoctor.results import VERDICTS, Report, ScenarioResult
from moedoctor.text import join_lines

MAX_SUMMARY_BYTES = 1024 * 1024
"""GitHub refuses the whole summary of a step if it is longer than 1 MiB."""

_LEVELS = {"note": "notice"}
"""The level of a finding or a verdict -> GitHub's, if that has another name."""
_CUT = "\nCut here: GitHub allows 1 MiB. The JSON report has the rest.\n"


class GithubReporter(Reporter):
    """An annotation for each scenario that is not proved and for each regression, and the counts."""

    name = "github"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return "\n".join((*_write_commands(report), summarize(report))) + "\n"


def step_summary(report: Report) -> str:
    """Return Markdown for the file that ``$GITHUB_STEP_SUMMARY`` names, as long as GitHub allows."""
    return _cut_to_bytes(MarkdownReporter(full=True).render(report), MAX_SUMMARY_BYTES)


def _cut_to_bytes(text: str, limit: int) -> str:
    """Return `text` if its UTF-8 fits into `limit` bytes, else whole lines of it that fit, and a note."""
    data = text.encode("utf-8")
    if len(data) <= limit:
        return text
    kept = data[: limit - len(_CUT)]
    return kept[: kept.rfind(b"\n") + 1].decode("utf-8") + _CUT


def to_commands(findings: Findings) -> str:
    """Return an annotation for each finding of a command, and the line of counts."""
    lines = [
        f"::{_LEVELS.get(finding.level, finding.level)} file={_escape_property(join_lines(finding.file))},"
        f"line={finding.line or 1},title={_escape_property(join_lines(f'{finding.rule}: {finding.title}'))}"
        f"::{_escape_data(join_lines(finding.message))}"
        for finding in findings.found
    ]
    return "\n".join((*lines, join_lines(findings.summary))) + "\n"


def _write_commands(report: Report) -> Iterator[str]:
    for scenario in report.scenarios:
        if level := VERDICTS[scenario.verdict].sarif:
            yield _write_scenario(scenario, _LEVELS.get(level, level))
    for finding in report.findings:
        title = _escape_property("moedoctor: worse than the baseline")
        yield f"::error title={title}::{_escape_data(join_lines(finding))}"


def _write_scenario(scenario: ScenarioResult, level: str) -> str:
    title = _escape_property(join_lines(f"{scenario.id} {scenario.name}: {scenario.verdict.value}"))
    message = "\n".join(join_lines(part) for part in (scenario.title, scenario.reason or "") if part)
    file = _escape_property(join_lines(scenario.file))
    return f"::{level} file={file},line={scenario.line},title={title}::{_escape_data(message)}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
