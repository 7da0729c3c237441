"""The page model: what a command has to say, as blocks that each format renders.

`moedoctor.reporters.markdown` renders a page for an issue or a file, `moedoctor.reporters.table` for a
terminal. Text in a page is data: the renderers clean and escape it, so no block holds markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.reporters.text import short_value
from moedoctor.results import Evidence


@dataclass(frozen=True)
class Span:
    """A piece of text with a style."""

    text: str
    style: str = ""
    """``bold``, ``dim``, ``code``, ``source`` (holds ``owner/repository#1``), or a verdict or severity."""


Text = str | Span | tuple[str | Span, ...]


def spans(text: Text) -> tuple[Span, ...]:
    """Return `text` as spans."""
    parts = text if isinstance(text, tuple) else (text,)
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the page."""

    text: Text
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph on its own."""

    text: Text


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: Sequence[Text]


@dataclass(frozen=True)
class Item:
    """One finding: a word such as a severity or a verdict, a title, and lines that explain it."""

    word: str
    title: Text
    lines: Sequence[tuple[str, Text]] = ()
    """(label, text); the label may be empty."""


@dataclass(frozen=True)
class Table:
    """Rows under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[Text]]
    align: str = ""
    """``l`` or ``r`` for each column; columns beyond it are left-aligned."""
    grouped: bool = False
    """Rows with the same first cell belong together: a terminal shows that cell once, above them."""


@dataclass(frozen=True)
class Preformatted:
    """Lines that stay as they are, such as the last lines of a log."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A picture beside a Markdown report; a terminal leaves it out."""

    file: str
    title: str


@dataclass(frozen=True)
class Prose:
    """Markdown from the catalogue or from a failure of another project: the only text that is markup."""

    markdown: str


Block = Heading | Paragraph | Bullets | Item | Table | Preformatted | Picture | Prose
Page = Sequence[Block]


def evidence_tables(evidence: Evidence) -> dict[str, Table]:
    """Return the lists of records in `evidence` as tables, by name.

    A median with its percentiles ``_p20`` and ``_p80`` becomes ``1.49 (1.48 to 1.51)``.
    """
    return {str(name): _records_table(value) for name, value in evidence.items() if is_records(value)}


def _records_table(records: Sequence[Mapping[str, Any]]) -> Table:
    keys = list(dict.fromkeys(str(key) for record in records for key in record))
    ends = ("_p20", "_p80")
    shown = [key for key in keys if not any(key.endswith(end) and key[: -len(end)] in keys for end in ends)]

    def cell(record: Mapping[str, Any], key: str) -> str:
        if key not in record:
            return ""
        median = short_value(record[key])
        low, high = (record.get(f"{key}{end}") for end in ends)
        if low is None or high is None:
            return median
        return f"{median} ({short_value(low)} to {short_value(high)})"

    rows = [[cell(record, key) for key in shown] for record in records]
    return Table([key.replace("_", " ") for key in shown], rows)


def without_records(evidence: Evidence) -> dict[str, Any]:
    """Return the rest of `evidence`, for a line of text."""
    return {name: value for name, value in evidence.items() if not is_records(value)}


def is_records(value: Any) -> bool:
    """Return whether `value` is a list of mappings with at least one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)
