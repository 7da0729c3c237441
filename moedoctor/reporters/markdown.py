"""`markdown`: a page for an issue on GitHub and for `reports/<machine>/`."""

from __future__ import annotations

from moedoctor.interfaces import Reporter
from moedoctor.reporters.digest import run_digest
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.page import Heading, Paragraph
from moedoctor.reporters.pages.machine import origin_table
from moedoctor.reporters.pages.run import run_page
from moedoctor.reporters.text import summary_line
from moedoctor.results import Report


class MarkdownReporter(Reporter):
    """GitHub's Markdown. Text of the report is escaped: it neither formats, embeds nor notifies anybody."""

    name = "markdown"

    def __init__(self, *, full: bool = False) -> None:
        """Give a digest that fits into an issue, or with `full` every case and the records behind claims."""
        self._full = full

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        if not self._full:
            return run_digest(report)
        title = Heading(f"moedoctor {report.version}: {report.command}", 1)
        return to_markdown(
            [
                title,
                Paragraph((summary_line(report),)),
                *run_page(report, full=True),
                *origin_table(report.origin),
            ]
        )
