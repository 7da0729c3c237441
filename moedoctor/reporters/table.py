"""`table`: a page for a person at a terminal."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moedoctor.interfaces import Reporter
from moedoctor.reporters import page as blocks
from moedoctor.reporters.pages.run import Detail, run_page
from moedoctor.reporters.text import format_environment
from moedoctor.results import Report
from moedoctor.text import clean, escape_commands, join_lines

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as Grid
    from rich.text import Text as Line

DEFAULT_WIDTH = 120
"""Columns of the report of a run in a file or a log."""
MOST_LINES = 120
"""Lines of the report of a run without ``-v``, if its failures fit with a line for each."""
MIN_WIDTH = 50
"""A narrower terminal wraps our lines itself: words would have to be broken to fit."""

_PROSE_WIDTH = 110
_INDENT = 2
_STEPS = 16
_MORE = "add -v for every case and every claim, or `moedoctor explain ID` for one failure"
_NO_WIDTH = 100_000
_GAP = 2
"""Columns between two columns of a table."""
_LONGEST_WORD = 32
"""A longer word may break, such as a path."""
_LOOKED_AT = 40
"""Rows of a table that decide the widths of its columns."""
_COUNTED = 200
"""Words of a cell that decide the width of its column: what follows would cost seconds and decide nothing."""
_WIDEST = 10_000
"""A wider page does not wrap: there is no width to choose."""
_SIDE_BY_SIDE = 6
"""Rows that a table on its side may have: they become columns."""
_COLORS = {
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
    "info": "cyan",
    "quiet": "dim",
    "odd": "magenta",
}
_STYLES = {word: _COLORS[tone] for word, tone in blocks.TONES.items()} | {"bold": "bold", "dim": "dim"}


class TableReporter(Reporter):
    """Tables drawn by rich. Everything from the report is passed as plain text, never as markup."""

    name = "table"

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        detail = Detail.CASES if self._verbose else Detail.SHORT
        items: int | None = None  # every scenario whole; if that is too long, a few lines for each
        while True:
            _, *page = run_page(report, detail, items=items)  # without its title, which the last line has
            page.append(blocks.Paragraph(blocks.Span(format_environment(report), "dim")))
            if not self._verbose:
                page.append(blocks.Step(_MORE))
            text = to_text(page, colour=colour, width=width or DEFAULT_WIDTH)
            if self._verbose or items == 0 or text.count("\n") <= MOST_LINES:
                return text
            items = len(report.scenarios) if items is None else items - max(1, items // _STEPS)


def to_text(page: blocks.Page, *, colour: bool = False, width: int | None = None) -> str:
    """Return the page as lines of at most `width` columns; without a width, lines do not wrap."""
    from rich.console import Console

    out = io.StringIO()
    # Nothing depends on the environment: the same page gives the same text everywhere.
    console = Console(
        file=out,
        width=max(width or _NO_WIDTH, MIN_WIDTH),
        height=25,
        force_terminal=colour,
        force_jupyter=False,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    before: blocks.Block | None = None
    for block in _flatten(page):
        if before is not None and not _close(before, block):
            console.print()
        if isinstance(block, blocks.Prose):
            console.print(_draw_prose(block.markdown, drawn=width is not None))
        for part in _draw_block(block, console.width):
            console.print(part)
        before = block
    return escape_commands("\n".join(line.rstrip() for line in out.getvalue().split("\n")))


def _flatten(page: blocks.Page) -> Iterator[blocks.Block]:
    """Give the blocks that a terminal shows: no pictures, no answer at the top, and folds as sections."""
    for block in page:
        if isinstance(block, blocks.Fold):
            yield blocks.Heading(block.title)
            yield from _flatten(block.blocks)
        elif not isinstance(block, (blocks.Picture, blocks.Answer)):
            yield block


def _close(before: blocks.Block, block: blocks.Block) -> bool:
    """Return whether the two follow each other without an empty line."""
    if isinstance(before, blocks.Heading):
        return not isinstance(block, blocks.Heading)
    if isinstance(block, (blocks.Paragraph, blocks.Step)):
        return isinstance(before, (blocks.Paragraph, blocks.Step))
    return isinstance(block, blocks.Item) and isinstance(before, blocks.Item)


def _draw_block(block: blocks.Block, columns: int) -> Iterator[RenderableType]:
    if isinstance(block, blocks.Heading):
        yield _make_line(block.text, "bold")
    elif isinstance(block, blocks.Paragraph):
        yield _make_line(block.text)
    elif isinstance(block, blocks.Step):
        yield _make_line((blocks.Span("Next: ", "bold"), *blocks.split_spans(block.text)))
    elif isinstance(block, blocks.Bullets):
        grid = _make_grid(1)
        for item in block.items:
            grid.add_row("-", _make_line(item))
        yield grid
    elif isinstance(block, blocks.Item):
        yield _draw_item(block)
    elif isinstance(block, blocks.Table):
        yield from _fit_table(block, columns)
    elif isinstance(block, blocks.Preformatted):
        yield _indent(_make_plain_line(clean(block.text)))


def _make_grid(gap: int, width: int | None = None) -> Grid:
    """Return two columns without lines: labels, which break only if they are wider than half, and text."""
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, gap, 0, 0))
    grid.add_column(width=width, overflow="fold")
    grid.add_column(overflow="fold")
    return grid


def _draw_item(item: blocks.Item) -> Grid:
    grid, labels = _make_grid(2, max(len("reproduced"), len(join_lines(item.word)))), _make_grid(1)
    grid.add_row(_make_line(blocks.Span(item.word, item.word)), _make_line(item.title))
    for label, text in item.lines:
        if label:
            labels.add_row(_make_line(f"{label}:"), _make_line(text))
        else:
            grid.add_row("", _make_line(text))
    if labels.row_count:
        grid.add_row("", labels)
    return grid


def _fit_table(table: blocks.Table, columns: int) -> Iterator[RenderableType]:
    """Draw a table so that no word breaks: as it is, on its side, or each row as a list of its cells."""
    if not table.header:
        return
    shapes = [_put_under_groups(table) if table.grouped else table]
    if len(table.rows) <= _SIDE_BY_SIDE and not table.grouped:
        first, *others = zip(table.header, *table.rows, strict=True)
        shapes.append(blocks.Table(first, others))
    for shape in shapes:
        indent = _INDENT if shape.grouped else 0
        if widths := _choose_widths(shape, columns - indent):
            yield _draw_table(shape, [widths[0] + indent, *widths[1:]])
            return
    for number, row in enumerate(table.rows):
        if number:
            yield ""
        grid, mark = _make_grid(1), ""
        for name, cell in zip(table.header, row, strict=True):
            title, text = _make_line(name).plain, _make_line(cell).plain
            if not title:
                mark = f"{text} "
            elif text:
                grid.add_row(_make_plain_line(f"{title}:"), _make_line((mark, *blocks.split_spans(cell))))
                mark = ""
        yield grid


def _put_under_groups(table: blocks.Table) -> blocks.Table:
    """Return a table whose groups have a row of their own with the group's name, above their other cells."""
    rows: list[Sequence[blocks.Text]] = []
    for group, members in itertools.groupby(table.rows, key=lambda row: row[0]):
        name, inside = blocks.Span(blocks.strip_styles(group), "bold"), [row[1:] for row in members]
        if len(inside) == 1 and not blocks.strip_styles(inside[0][0]):
            rows.append((name, *inside[0][1:]))
        else:
            rows += [
                (name, *[""] * (len(table.header) - 2)),
                *((blocks.strip_styles(row[0]), *row[1:]) for row in inside),
            ]
    return blocks.Table(table.header[1:], rows, table.align[1:], grouped=True)


def _choose_widths(table: blocks.Table, columns: int) -> list[int]:
    """Return the width of each column in which no word breaks; nothing if there is not enough room.

    A verdict is one word. What is left goes where it saves most lines.
    """
    from rich.cells import cell_len

    least, most, words = [], [], []
    for name, *cells in zip(table.header, *table.rows, strict=True):
        texts = [_make_line(text).plain for text in (name, *cells)]
        split = [[text] if texts[0] == "verdict" else text.split() for text in texts]
        words.append([[cell_len(word) for word in each] for each in split])
        least.append(min(max((length for each in words[-1] for length in each), default=0), _LONGEST_WORD))
        most.append(max(least[-1], *map(cell_len, texts)))
    spare = columns - _GAP * (len(least) - 1) - sum(least)
    if spare < 0 or columns > _WIDEST or sum(most) <= sum(least) + spare:
        return [] if spare < 0 else most

    @functools.cache  # each step below asks again about most widths of most columns
    def count_lines(index: int, width: int) -> list[int]:
        return [_count_lines(each[:_COUNTED], width) for each in words[index][:_LOOKED_AT]]

    heights = [count_lines(index, width) for index, width in enumerate(least)]
    while spare > 0:
        tall = sum(map(max, zip(*heights, strict=True)))
        best = (0.0, 0, 0)
        for index, width in enumerate(least):
            for more in range(1, min(spare, most[index] - width) + 1):
                changed = [*heights[:index], count_lines(index, width + more), *heights[index + 1 :]]
                saved = tall - sum(map(max, zip(*changed, strict=True)))
                best = max(best, (saved / more, -more, index))
        _, less, index = best
        if not less:  # no column alone saves a line: the longest text gets what is left
            index = max(range(len(least)), key=lambda place: most[place] - least[place])
            less = -min(spare, most[index] - least[index])
        least[index] -= less
        spare += less
        heights[index] = count_lines(index, least[index])
    return least


def _count_lines(words: Sequence[int], width: int) -> int:
    """Return the lines that words of these lengths take."""
    count, used = 1, 0
    for length in words:
        if used and used + 1 + length > width:
            count, used = count + 1, 0
        used += length + bool(used)
        count, used = count + (used - 1) // max(width, 1) if used > width else count, min(used, width)
    return count


def _draw_table(table: blocks.Table, widths: Sequence[int]) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for index, (name, width) in enumerate(zip(table.header, widths, strict=True)):
        grid.add_column(
            _indent(_make_line(name)) if table.grouped and not index else _make_line(name),
            justify="right" if table.align[index : index + 1] == "r" else "left",
            width=width,
            overflow="fold",
        )
    for first, *others in table.rows:
        inside = table.grouped and not isinstance(first, blocks.Span)
        grid.add_row(_indent(_make_line(first)) if inside else _make_line(first), *map(_make_line, others))
    return grid


def _draw_prose(markdown: str, *, drawn: bool) -> RenderableType:
    """Draw Markdown for a terminal; a file or a pipe gets it as it is written."""
    from rich.constrain import Constrain
    from rich.markdown import Markdown

    text = clean(markdown).strip()
    return Constrain(Markdown(text, hyperlinks=False), _PROSE_WIDTH) if drawn else _make_plain_line(text)


def _indent(text: Line) -> RenderableType:
    """Indent `text` with the lines that it wraps into."""
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, _INDENT), expand=False)


def _make_line(text: blocks.Text, style: str = "") -> Line:
    """Return cleaned text on one line, which rich takes as it is."""
    from rich.text import Text as Line

    line = Line(style=style, overflow="fold")
    for span in blocks.split_spans(text):
        left = " " if span.text[:1].isspace() and len(line) else ""
        right = " " if span.text[-1:].isspace() and span.text.strip() else ""
        line.append(f"{left}{join_lines(span.text)}{right}", _STYLES.get(span.style, ""))
    return line


def _make_plain_line(text: str) -> Line:
    from rich.text import Text as Line

    return Line(text, overflow="fold")
