"""The interface of a report format."""

from __future__ import annotations

from abc import ABC, abstractmethod

from moedoctor.results import Report


class Reporter(ABC):
    """One format. Made without arguments; imports no torch and nothing heavy at module level."""

    name: str
    """What `--format` calls it."""

    @abstractmethod
    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        """The report as text that ends with a line end; the same text for the same report.

        `colour` asks for ANSI colours and `width`, in columns, for lines that fit; formats for
        machines ignore both. Text of the report is data: nothing in it may act as markup.
        """
