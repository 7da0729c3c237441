"""The page model: what a command has to say, as blocks that each format renders.

`moedoctor.reporters.markdown_page` renders a page for an issue or a file, `moedoctor.reporters.html` for a
browser and `moedoctor.reporters.table` for a terminal. Text in a page is data: the renderers clean and escape
it, so no block holds markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from moedoctor.reporters.chart import Chart
from moedoctor.reporters.text import SIZES, TIMES, Unit, choose_unit, format_facts, format_value, is_unsteady
from moedoctor.results import VERDICTS, Evidence
from moedoctor.text import join_lines


@dataclass(frozen=True)
class Span:
    """A piece of text with a style."""

    text: str
    style: str = ""
    """``bold``, ``dim``, ``code``, ``source`` (holds ``owner/repository#1``), ``section`` (the title of a
    heading of the same page), or a verdict or severity, which are the keys of `TONES`."""


TONES = {
    **{verdict: look.tone for verdict, look in VERDICTS.items()},
    **dict.fromkeys(("affected", "regression", "damage", "missing"), "bad"),
    "warning": "warn",
    **dict.fromkeys(("note", "remark"), "info"),
    "not tested": "quiet",
}
"""Verdict or severity -> how a format sets it apart: good, bad, warn, info, quiet or odd."""

Text = str | Span | tuple[str | Span, ...]


def split_spans(text: Text) -> tuple[Span, ...]:
    parts = text if isinstance(text, tuple) else (text,)
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


def strip_styles(text: Text) -> str:
    """Return `text` without styles, on one line."""
    return join_lines("".join(span.text for span in split_spans(text)))


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
    tone: str = ""
    """A key of `TONES`, if the word is none."""


@dataclass(frozen=True)
class Table:
    """Rows under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[Text]]
    align: str = ""
    """``l`` or ``r`` for each column; columns beyond it are left-aligned."""
    grouped: bool = False
    """Rows with the same first cell belong together: a terminal shows that cell once, above them."""
    behind: Sequence[Page] = ()
    """For each row, what HTML shows behind a click on its last cell; empty for none."""


@dataclass(frozen=True)
class Preformatted:
    """Lines that stay as they are, such as the last lines of a log."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A picture: within HTML, or as a file beside a Markdown report. A terminal leaves it out."""

    chart: Chart
    file: str = ""
    """The name of the file; Markdown leaves a picture out if it is empty."""


@dataclass(frozen=True)
class Step:
    """An action to take next."""

    text: Text


@dataclass(frozen=True)
class Answer:
    """The first thing that a report says."""

    looked_at: Sequence[Text]
    found: Sequence[Text]
    to_do: Sequence[Text]


@dataclass(frozen=True)
class Fold:
    """Blocks under a title that a click shows; a terminal shows them under a heading.

    If it is `open`, it begins unfolded; Markdown shows it under a heading, too.
    """

    title: Text
    blocks: Page
    open: bool = False


@dataclass(frozen=True)
class Prose:
    """Markdown from the catalogue or from a failure of another project: the only text that is markup."""

    markdown: str
    in_answer: bool = False
    """True if the answer of the page says it, too: it is for formats without an answer."""


def list_section(title: Text, items: Sequence[Text], level: int = 2) -> list[Block]:
    """Return a heading with a list under it; nothing without items."""
    return [Heading(title, level), Bullets(items)] if items else []


def show_table(
    title: Text, header: Sequence[str], rows: Sequence[Sequence[Text]], align: str = "", level: int = 2
) -> list[Block]:
    """Return a heading with a table under it; nothing without rows."""
    return [Heading(title, level), Table(header, rows, align)] if rows else []


NOTHING_TO_DO = "nothing that this report knows of"

Block = Heading | Paragraph | Bullets | Item | Table | Preformatted | Picture | Prose | Step | Answer | Fold
Page: TypeAlias = "Sequence[Block]"


def walk_blocks(page: Page) -> Iterator[Block]:
    """Give every block of a page in order, also those in folds and behind the rows of tables."""
    for block in page:
        yield block
        if isinstance(block, Fold):
            yield from walk_blocks(block.blocks)
        elif isinstance(block, Table):
            for blocks in block.behind:
                yield from walk_blocks(blocks)


_STEP_LABELS = ("next", "do")
_LOOKED_AT = "Looked at: "
"""The beginning of a paragraph about what was read."""


def report_answer(page: Page, document: Mapping[str, Any], found: Sequence[str]) -> Answer:
    """Return the answer of a command's page: its own, or its title, machine, `found`, and each step once.

    `document` is the report as JSON.
    """
    for block in page:
        if isinstance(block, Answer):
            return block
    sources, under = [], ""
    for block in page:
        if isinstance(block, Heading) and block.level > 1:
            under = f"{strip_styles(block.text)}: "
        elif isinstance(block, Paragraph) and is_source(block):
            sources.append(under + strip_styles(block.text).removeprefix(_LOOKED_AT))
    messages: list[Text] = []
    steps: list[Text] = []
    for block in walk_blocks(page):
        if isinstance(block, Picture):
            messages += [block.chart.title, *block.chart.also]
        elif isinstance(block, Step):
            steps.append(block.text)
        elif isinstance(block, Item):
            steps += [text for label, text in block.lines if label in _STEP_LABELS]
    facts = format_facts(document.get("environment") or {})
    looked_at: list[Text] = [find_title(page, document).text]
    looked_at += [*sources, *([facts] if facts else [])]
    return Answer(looked_at, list(dict.fromkeys([*found, *messages])), list(dict.fromkeys(steps)))


def omit_answer(page: Page, answered: Answer) -> list[Block]:
    """Return the blocks of a page without those that only repeat its answer."""
    found = {strip_styles(text) for text in answered.found}
    found |= {f"{text}." for text in found}

    def repeats(block: Block) -> bool:
        if isinstance(block, Paragraph):
            return strip_styles(block.text) in found
        if isinstance(block, Bullets) and block in page[:2]:  # a list in a section stays under its heading
            return {*map(strip_styles, block.items)} <= found
        return isinstance(block, Answer) or (isinstance(block, Prose) and block.in_answer)

    return [block for block in page if not repeats(block)]


def is_source(block: Paragraph) -> bool:
    """Return whether a paragraph says what was read."""
    return strip_styles(block.text).startswith(_LOOKED_AT)


def find_title(page: Page, document: Mapping[str, Any]) -> Heading:
    """Return the heading that names the whole page, or one that names the command."""
    first = [block for block in page if isinstance(block, Heading) and block.level == 1]
    second = [block for block in page if isinstance(block, Heading) and block.level == 2]
    if first or len(second) == 1:
        return (first or second)[0]
    return Heading(f"moedoctor {document.get('moedoctor', '')}: {document.get('command', 'report')}", 1)


def make_evidence_tables(evidence: Evidence, *, measured: bool = False) -> dict[str, Table]:
    """Return the lists of records in `evidence` as tables, by name.

    A median with its percentiles ``_p20`` and ``_p80`` becomes ``1.49 (1.48 to 1.51)``. With `measured`,
    times and bytes have the unit in which people read them, and ``!`` marks a median with a spread that makes
    it worthless.
    """
    return {
        str(name): _make_records_table(value, measured)
        for name, value in evidence.items()
        if is_records(value)
    }


def _make_records_table(records: Sequence[Mapping[str, Any]], measured: bool) -> Table:
    keys = list(dict.fromkeys(str(key) for record in records for key in record))
    ends = ("_p20", "_p80")
    shown = [key for key in keys if not any(key.endswith(end) and key[: -len(end)] in keys for end in ends)]

    def write_cell(record: Mapping[str, Any], key: str) -> str:
        if key not in record:
            return ""
        unit = units.get(key)
        median = _format_number(record[key], unit)
        low, high = (record.get(f"{key}{end}") for end in ends)
        if low is None or high is None:
            return median
        mark = " !" if measured and is_unsteady(record[key], low, high) else ""
        return f"{median} ({_format_number(low, unit)} to {_format_number(high, unit)}){mark}"

    units = {key: unit for key in shown if measured and (unit := _find_unit(key, records))}
    rows = [[write_cell(record, key) for key in shown] for record in records]
    header = [units[key][0] if key in units else key.replace("_", " ") for key in shown]
    return Table(header, rows)


def _format_number(value: Any, unit: Unit | None) -> str:
    """Return a number in a unit, and anything else as it is."""
    if unit is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return format_value(value)
    _, size, decimals = unit
    return f"{value / size:.{decimals}f}"


_ENDS = {"_us": (TIMES, 1.0), "_ms": (TIMES, 1e3), "_s": (TIMES, 1e6), "_bytes": (SIZES, 1.0)}
"""End of a key -> the units that people read, and the size of the key's unit in the least of them."""


def _find_unit(key: str, records: Sequence[Mapping[str, Any]]) -> Unit | None:
    """Return the title with the unit of a column of times or bytes, the unit's size in the records, decimals.

    None for other columns, and rates such as GB/s.
    """
    numbers = [value for record in records if isinstance(value := record.get(key), (int, float))]
    end = next((end for end in _ENDS if key.endswith(end)), None)
    if not numbers or end is None or key.endswith("_gb_s"):
        return None
    units, scale = _ENDS[end]
    name, size, decimals = choose_unit([value * scale for value in numbers], units)
    return f"{key.removesuffix(end).replace('_', ' ')} ({name})", size / scale, decimals


def omit_records(evidence: Evidence) -> dict[str, Any]:
    """Return the rest of `evidence`, for a line of text."""
    return {name: value for name, value in evidence.items() if not is_records(value)}


def is_records(value: Any) -> bool:
    """Return whether `value` is a list of mappings with at least one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)
