"""The digest of a page: what fits into an issue. The answer comes first, and equal rows are counted.

`make_digest` shortens the page of any command; the page of a run needs only `fit`. GitHub takes 65,536
characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.page import (
    NOTHING_TO_DO,
    Answer,
    Block,
    Bullets,
    Fold,
    Heading,
    Item,
    Page,
    Paragraph,
    Preformatted,
    Prose,
    Span,
    Table,
    Text,
    omit_answer,
    split_spans,
    strip_styles,
)
from moedoctor.reporters.text import count_of
from moedoctor.text import join_lines, shorten

MOST_CHARACTERS = 60_000
_ABSTRACT_LINE = 300
"""Characters of a line of the abstract."""
_NOTE = 120
"""Characters that the note about what is left out may take."""
_CELL = 300
_LINE = 600


def make_digest(page: Page, answered: Answer) -> str:
    """Return the page of a command as Markdown of at most `MOST_CHARACTERS`.

    The abstract is what the page says for itself, or else `answered` in three lines.
    """
    blocks = [_collapse(block) for block in omit_answer(page, answered)]
    titles = 1 if blocks and isinstance(blocks[0], Heading) and blocks[0].level == 1 else 0
    own: list[Block] = [block for block in page if isinstance(block, Prose) and block.in_answer]
    lines = (
        ("Looked at", answered.looked_at),
        ("Found", answered.found or ["nothing"]),
        ("To do", answered.to_do or [NOTHING_TO_DO]),
    )
    bullets: list[Text] = [
        (Span(f"{name}: ", "bold"), shorten("; ".join(map(strip_styles, texts)), _ABSTRACT_LINE))
        for name, texts in lines
    ]
    abstract = own or [Bullets(bullets)]
    return fit([*blocks[:titles], *abstract, *blocks[titles:]])


def fit(page: Page, most: int = MOST_CHARACTERS) -> str:
    """Return the page as Markdown of at most `most` characters; what does not fit is left out and counted.

    What is folded comes last: it gives way to what is not, and of the folded blocks the last ones, the
    environment, have their place before the others.
    """
    whole = to_markdown(page)
    if len(whole) <= most:
        return whole
    open_blocks = [index for index, block in enumerate(page) if not isinstance(block, Fold)]
    folded = [index for index, block in enumerate(page) if isinstance(block, Fold)]
    room, chosen = most - _NOTE, {}
    for index in [*open_blocks, *folded[-2:], *folded[:-2]]:
        for block in _shorten(page[index]):
            size = len(to_markdown([block])) + 2
            if size <= room:
                chosen[index] = block
                room -= size
                break
    left = sum(1 for index, block in enumerate(page) if chosen.get(index) is not block)
    note = Paragraph(Span(f"{count_of(left, 'part')} cut or left out: --full has everything.", "dim"))
    return to_markdown([*(chosen[index] for index in sorted(chosen)), note])


def _shorten(block: Block) -> Iterator[Block]:
    """Give the block, then shorter versions of it."""
    yield block
    if isinstance(block, Table):
        for rows in _list_halves(len(block.rows)):
            note = Span(f"… {len(block.rows) - rows} more rows", "dim")
            last: list[Text] = [note, *([""] * (len(block.header) - 1))]
            yield replace(
                block, rows=[*([_cut(cell) for cell in row] for row in block.rows[:rows]), last], behind=()
            )
    elif isinstance(block, Fold):
        for count in _list_halves(len(block.blocks)):
            yield replace(block, blocks=[*block.blocks[:count], Paragraph("… the rest is left out")])
        for first in block.blocks[:1]:
            yield from (replace(block, blocks=[shorter]) for shorter in _shorten(first))
    elif isinstance(block, Preformatted):
        yield Preformatted(block.text[: _LINE * 4] + "\n…")
    elif isinstance(block, Bullets):
        for number in _list_halves(len(block.items)):
            items = [_cut(item) for item in block.items[:number]]
            yield Bullets([*items, f"… {len(block.items) - number} more"])
    elif isinstance(block, Item):
        yield Item(
            shorten(block.word, _CELL),
            _cut(block.title),
            [(label, _cut(text)) for label, text in block.lines[:8]],
        )
    elif isinstance(block, (Heading, Paragraph)):
        yield replace(block, text=_cut(block.text))
    elif isinstance(block, Prose):
        yield Paragraph(shorten(join_lines(block.markdown), _LINE))


def _list_halves(count: int) -> Iterator[int]:
    """Give half of a number, then half of that, down to 1."""
    while count := count // 2:
        yield count


def _cut(text: Any) -> Any:
    """Return a text of at most `_CELL` characters, without its styles if it has to be cut."""
    words = strip_styles(text)
    return text if len(words) <= _CELL else shorten(words, _CELL)


def _collapse(block: Block) -> Block:
    """Return a table with each row once, and how often it is there."""
    if not isinstance(block, Table) or block.grouped:
        return block
    keys = [tuple(tuple(split_spans(cell)) for cell in row) for row in block.rows]
    counts = Counter(keys)
    if len(counts) == len(keys):
        return block
    rows = dict(zip(keys, block.rows, strict=True))
    counted = [(*row, str(counts[key]) if counts[key] > 1 else "") for key, row in rows.items()]
    align = block.align.ljust(len(block.header), "l") + "r"
    return replace(block, header=(*block.header, "times"), rows=counted, align=align, behind=())
