"""`markdown`: a page for an issue on GitHub and for `reports/<machine>/`."""

from __future__ import annotations

from moedoctor.interfaces import Reporter
from moedoctor.reporters.digest import fit
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.pages.machine import make_environment_table, make_origin_table
from moedoctor.reporters.pages.run import Detail, run_page
from moedoctor.results import Report


class MarkdownReporter(Reporter):
    """GitHub's Markdown. Text of the report is escaped: it neither formats, embeds nor notifies anybody."""

    name = "markdown"

    def __init__(self, *, full: bool = False) -> None:
        """Give a digest that fits into an issue, or with `full` every case and the records behind claims."""
        self._full = full

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        page = run_page(report, Detail.RECORDS if self._full else Detail.SHORT)
        page += [*make_environment_table(report.environment), *make_origin_table(report.origin)]
        return to_markdown(page) if self._full else fit(page)
