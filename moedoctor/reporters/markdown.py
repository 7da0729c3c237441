"""`markdown`: the report for an issue on GitHub and for `reports/<machine>/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from moedoctor.interfaces import Reporter
from moedoctor.reporters.evidence_rows import evidence_tables, without_records
from moedoctor.reporters.rows import CrashNote, crash_notes, group_cases, shared_parameters
from moedoctor.reporters.text import clean, figures, one_line, short_evidence, short_parameters, summary_line
from moedoctor.results import ClaimResult, Report, ScenarioResult

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<=\s)#|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_BLOCK_START = re.compile(r"^(\d*)(?=[#+-]|[.)](?:\s|$))")
_MENTION = re.compile(r"(?<![\w`])@(?=\w)")
_REFERENCE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
_FENCE = re.compile("`{3,}")


class MarkdownReporter(Reporter):
    """GitHub's Markdown. Text of the report is escaped: it neither formats, embeds nor notifies anybody."""

    name = "markdown"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return "\n".join(_lines(report)) + "\n"


def escape(text: str) -> str:
    """`text` on one line, safe in a cell, a heading or a list item."""
    return _BLOCK_START.sub(r"\1\\", _inline(one_line(text)))


def source_link(source: str) -> str:
    """`source` with every ``owner/repository#1`` as a link; GitHub leads pull requests on from there."""
    text, parts, end = one_line(source), [], 0
    for match in _REFERENCE.finditer(text):
        link = f"[{_inline(match[0])}](https://github.com/{match[1]}/issues/{match[2]})"
        parts += [_inline(text[end : match.start()]), link]
        end = match.end()
    return "".join((*parts, _inline(text[end:])))


def _inline(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\g<0>", text)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An @ that begins a word would notify the person of that name.
    return _MENTION.sub("@<!-- -->", escaped)


def _lines(report: Report) -> Iterator[str]:
    yield f"# moedoctor {escape(report.version)}: {escape(report.command)}"
    yield ""
    yield f"**{escape(summary_line(report))}**"
    yield ""
    if report.summary.interrupted:
        yield from ("Interrupted: not every case ran.", "")
    if report.findings:
        yield from (
            "## Against the baseline",
            "",
            *(f"- {escape(finding)}" for finding in report.findings),
            "",
        )
    yield from ("## Environment", "")
    yield from _table(("fact", "value"), ((name, text) for name, text in figures(report.environment)))
    for scenario in report.scenarios:
        yield from _scenario(scenario)


def _scenario(scenario: ScenarioResult) -> Iterator[str]:
    yield f"## {escape(scenario.id)} {escape(scenario.name)}: {scenario.verdict.value}"
    yield ""
    yield from (escape(scenario.title), "")
    if scenario.reason:
        yield from (f"**Why:** {escape(scenario.reason)}", "")
    yield from (f"Scenario file: {escape(scenario.file)}, line {scenario.line}", "")
    if shared := shared_parameters(scenario.cases):
        yield from (f"All cases: {escape(short_parameters(shared))}", "")
    if scenario.cases:
        rows = (
            (group.subject, group.tier, group.device, row.label, row.verdict.value, row.figure)
            for group in group_cases(scenario.cases)
            for row in group.rows
        )
        yield from _table(("subject", "tier", "device", "parameters", "verdict", "figure"), rows)
    for note in crash_notes(scenario.cases):
        yield from _crash(note)
    if scenario.claims:
        yield from ("### Claims", "")
        for claim in scenario.claims:
            yield from _claim(claim)
        yield ""
    if scenario.conclusions:
        yield from ("### Conclusions", "")
        yield from (
            f"- {escape(name.replace('_', ' '))}: {escape(text)}"
            for name, text in figures(without_records(scenario.conclusions))
        )
        yield ""
        for table in evidence_tables(scenario.conclusions):
            yield from _table(table.header, table.rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    yield from (_row([escape(cell) for cell in row]) for row in rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _claim(claim: ClaimResult) -> Iterator[str]:
    line = f"- **{claim.verdict.value}**: {escape(claim.text)} ({source_link(claim.source)})"
    if claim.reason:
        line += f": {escape(claim.reason)}"
    rest = without_records(claim.evidence)
    yield f"{line}<br>{escape(short_evidence(rest))}" if rest else line
    for table in evidence_tables(claim.evidence):
        yield ""
        yield from _table(table.header, table.rows)


def _crash(note: CrashNote) -> Iterator[str]:
    more = f" (and {note.others} more the same way)" if note.others else ""
    yield from (f"**Died**: {escape(note.where)}{more}: {escape(f'{note.death}: {note.message}')}", "")
    if note.stderr_tail:
        text = clean("\n".join(note.stderr_tail))
        fence = "`" * (1 + max([2, *(len(run) for run in _FENCE.findall(text))]))
        yield from (f"{fence}text", text, fence, "")
