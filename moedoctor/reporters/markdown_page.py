"""A page of blocks as the Markdown of GitHub. Its text is escaped: it formats, embeds and notifies none."""

from __future__ import annotations

import html
import re
from urllib.parse import quote

from moedoctor.reporters import page as blocks
from moedoctor.text import clean, escape_commands, join_lines

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<=\s)#|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_BLOCK_START = re.compile(r"^(\d*)(?=[#+-]|[.)](?:\s|$)|::)")
_MENTION = re.compile(r"(?<![A-Za-z0-9])@(?=\w)")
_REFERENCE = re.compile(r"(?<![\w.-])([\w.-]{1,100}/[\w.-]{1,100})#(\d+)")
_TICKS = re.compile("`+")
_IN_TICKS = re.compile(r"(?<!`)(`(?!`)[^`|]+`)(?!`)")
"""Code; a cell of a table would end at |, also inside it."""


def to_markdown(page: blocks.Page) -> str:
    """Return the page as Markdown that ends with a line end."""
    parts: list[str] = []
    shown = [
        block
        for block in page
        if not isinstance(block, blocks.Answer) and not (isinstance(block, blocks.Picture) and not block.file)
    ]
    for index, block in enumerate(shown):
        if index:
            # The items of one list follow each other without an empty line.
            together = isinstance(block, blocks.Item) and isinstance(shown[index - 1], blocks.Item)
            parts.append("\n" if together else "\n\n")
        parts.append(_write_block(block))
    return escape_commands("".join(parts)) + "\n"


def escape(text: str) -> str:
    """Return `text` on one line, safe in a cell, a heading or a list item."""
    return _BLOCK_START.sub(r"\1\\", _write_inline(join_lines(text)))


def link_source(source: str) -> str:
    """Return `source` with each ``owner/repository#1`` as a link; GitHub redirects to pull requests."""
    text, parts, end = join_lines(source), [], 0
    for match in _REFERENCE.finditer(text):
        link = f"[{_write_inline(match[0])}](https://github.com/{match[1]}/issues/{match[2]})"
        parts += [_write_inline(text[end : match.start()]), link]
        end = match.end()
    return "".join((*parts, _write_inline(text[end:])))


def _write_inline(text: str) -> str:
    """Return text between single backticks as code, in which nothing acts, and the rest escaped."""
    parts = _IN_TICKS.split(text)
    return "".join(part if index % 2 else _escape_inline(part) for index, part in enumerate(parts))


def _escape_inline(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\g<0>", text)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An @ that begins a word would notify the person of that name.
    return _MENTION.sub("@<!-- -->", escaped)


def _write_text(text: blocks.Text) -> str:
    line = ""
    for span in blocks.split_spans(text):
        line += _write_span(span.text, span.style, first=not line.strip())
    return line


def _write_span(text: str, style: str, *, first: bool) -> str:
    """Only what comes first on a line can start a block, so only that needs the full escape."""
    line = join_lines(text)
    # The spaces around a span keep it apart from its neighbors; one_line removed them.
    left = " " if line and not first and text[:1].isspace() else ""
    right = " " if text[-1:].isspace() and not (first and not line) else ""
    # A cell of a table ends at | even inside code.
    if style == "code" and line and "|" not in line and "`" not in line:
        return f"{left}`{line}`{right}"
    escaped = link_source(line) if style == "source" else _write_inline(line)
    if first:
        escaped = _BLOCK_START.sub(r"\1\\", escaped)
    return f"{left}**{escaped}**{right}" if style == "bold" and escaped else f"{left}{escaped}{right}"


def _write_block(block: blocks.Block) -> str:
    if isinstance(block, blocks.Heading):
        return f"{'#' * block.level} {_write_text(block.text)}"
    if isinstance(block, blocks.Paragraph):
        return _write_text(block.text)
    if isinstance(block, blocks.Step):
        return _write_text((blocks.Span("Next: ", "bold"), *blocks.split_spans(block.text)))
    if isinstance(block, blocks.Fold):
        inside = to_markdown(block.blocks)
        if block.open:
            return f"## {_write_text(block.title)}\n\n{inside}".rstrip()
        # GitHub reads Markdown within HTML only after an empty line.
        title = html.escape(blocks.strip_styles(block.title))
        return f"<details><summary>{title}</summary>\n\n{inside}\n</details>"
    if isinstance(block, blocks.Bullets):
        return "\n".join(f"- {_write_text(item)}" for item in block.items)
    if isinstance(block, blocks.Item):
        lines = [f"- **{escape(block.word)}** {_write_text(block.title)}"]
        lines += [
            f"  - {escape(label) + ': ' if label else ''}{_write_text(text)}" for label, text in block.lines
        ]
        return "\n".join(lines)
    if isinstance(block, blocks.Table):
        marks = ["---:" if mark == "r" else "---" for mark in block.align.ljust(len(block.header), "l")]
        rows = [[escape(name) for name in block.header], marks]
        rows += [[_write_text(cell) for cell in row] for row in block.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if isinstance(block, blocks.Preformatted):
        text = clean(block.text)
        fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(text)), default=0))
        return f"{fence}text\n{text}\n{fence}"
    if isinstance(block, blocks.Prose):
        return clean(block.markdown).strip()
    assert isinstance(block, blocks.Picture)
    return f"![{escape(block.chart.title)}]({quote(block.file, errors='replace')})"
