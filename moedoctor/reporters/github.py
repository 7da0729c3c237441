"""`github`: workflow commands that GitHub Actions shows as annotations, and its job summary."""

from __future__ import annotations

from collections.abc import Iterator

from moedoctor.interfaces import Reporter
from moedoctor.reporters.findings import ENVIRONMENT, Findings
from moedoctor.reporters.markdown import MarkdownReporter
from moedoctor.reporters.text import summarize
from moedoctor.results import VERDICTS, Report
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
    """Return Markdown for the file that ``$GITHUB_STEP_SUMMARY`` names: whole lines, up to 1 MiB."""
    text = MarkdownReporter(full=True).render(report)
    data = text.encode("utf-8")
    if len(data) <= MAX_SUMMARY_BYTES:
        return text
    kept = data[: MAX_SUMMARY_BYTES - len(_CUT)]
    return kept[: kept.rfind(b"\n") + 1].decode("utf-8") + _CUT


def to_commands(findings: Findings) -> str:
    """Return an annotation for each finding of a command, and the line of counts."""
    lines = []
    for each in findings.found:
        title, message = f"{each.rule}: {each.title}", join_lines(each.message)
        lines.append(_write_command(each.level, each.file, each.line or 1, title, message))
    return "\n".join((*lines, join_lines(findings.summary))) + "\n"


def _write_commands(report: Report) -> Iterator[str]:
    for scenario in report.scenarios:
        if level := VERDICTS[scenario.verdict].sarif:
            title = f"{scenario.id} {scenario.name}: {scenario.verdict.value}"
            message = "\n".join(join_lines(part) for part in (scenario.title, scenario.reason or "") if part)
            yield _write_command(level, scenario.file, scenario.line, title, message)
    for finding in report.findings:
        title = "moedoctor: worse than the baseline"
        yield _write_command("error", ENVIRONMENT, 1, title, join_lines(finding))


def _write_command(level: str, file: str, line: int, title: str, message: str) -> str:
    names = (_escape(join_lines(text)) for text in (file, title))
    file, title = (text.replace(":", "%3A").replace(",", "%2C") for text in names)
    place = "" if file == ENVIRONMENT else f"file={file},line={line},"  # an environment is no file
    return f"::{_LEVELS.get(level, level)} {place}title={title}::{_escape(message)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
