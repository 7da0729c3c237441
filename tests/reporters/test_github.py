"""Workflow commands and the job summary of GitHub Actions."""

import pytest
from report_readers import GITHUB_COMMAND
from report_samples import full_report, report, scenario

from moedoctor.reporters.github import MAX_SUMMARY_BYTES, GithubReporter, step_summary
from moedoctor.reporters.markdown import MarkdownReporter
from moedoctor.reporters.text import summarize
from moedoctor.results import Report


def _commands(report: Report) -> list[tuple[str, dict[str, str], str]]:
    """Return the commands as GitHub's runner reads them: level, properties and message, unescaped."""
    *lines, last = GithubReporter().render(report).splitlines()
    assert last == summarize(report)
    commands = []
    for line in lines:
        match = GITHUB_COMMAND.fullmatch(line)
        assert match, line
        pairs = (part.partition("=") for part in match[2].split(","))
        properties = {key: _unescape(value, ":,") for key, _, value in pairs}
        commands.append((match[1], properties, _unescape(match[3], "")))
    return commands


def _unescape(text: str, more: str) -> str:
    for character in ("\r", "\n", *more):
        text = text.replace(f"%{ord(character):02X}", character)
    return text.replace("%25", "%")


@pytest.mark.parametrize(
    ("verdict", "level"),
    [
        *((name, "error") for name in ("found", "failed", "error")),
        ("skipped", "warning"),
        ("absent", "notice"),
    ],
)
def test_each_verdict_has_its_level(verdict: str, level: str) -> None:
    result = scenario(verdict, file="a,b:c%.yaml", reason="why: 5 %0A\r\n::warning::x", line=3)
    place = {"file": "a,b:c%.yaml", "line": "3", "title": f"MD001 nan_routing: {verdict}"}
    assert _commands(report(result)) == [(level, place, f"{result.title}\nwhy: 5 %0A ::warning::x")]


def test_the_job_summary_is_the_markdown() -> None:
    assert step_summary(full_report()) == MarkdownReporter(full=True).render(full_report())


def test_a_job_summary_that_is_too_long_is_cut_at_a_line() -> None:
    text = step_summary(report(scenario("found"), findings=("µ" * 999,) * 700))
    size = len(text.encode("utf-8"))
    assert MAX_SUMMARY_BYTES - 3000 < size <= MAX_SUMMARY_BYTES
    *kept, blank, note = text.splitlines()
    assert (kept[-1], blank) == ("- **regression** " + "µ" * 999, "")
    assert note.startswith("Cut here")
