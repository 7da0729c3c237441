"""`html`: one file for a browser, without a reference to anything outside it.

The templates in `templates/` escape every text. The page is whole without its script, which only sorts,
filters and folds; a policy in the page allows that script by its hash and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moedoctor.interfaces import Reporter
from moedoctor.reporters.page import (
    NOTHING_TO_DO,
    TONES,
    Answer,
    Block,
    Fold,
    Heading,
    Page,
    Paragraph,
    Picture,
    Step,
    find_title,
    is_source,
    omit_answer,
    report_answer,
    split_spans,
    strip_styles,
    walk_blocks,
)
from moedoctor.results import Report
from moedoctor.text import COMMAND, clean, join_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_REFERENCE = re.compile(
    r"(?<![\w.-])(?:https://[\w.-]{1,100}/[\w./#-]{0,300}[\w/]|([\w.-]{1,100}/[\w.-]{1,100})#(\d+))", re.ASCII
)
_CODE = re.compile(r"`([^`]+)`")
_NOT_IN_ID = re.compile(r"[^a-z0-9]+")
_NOT_SHOWN = re.compile(r"<(metadata|style)\b(?:(?!<\1\b).)*?</\1>", re.DOTALL)
_NAMESPACES = re.compile(r' xmlns(?::xlink)?="[^"]*"')
_GROUP_ID = re.compile(r'<g id="[^"]*"')
_ID = re.compile(r'( id="|href="#|url\(#)([mp][0-9a-f]{8,})')
_SIZE = re.compile(r' (?:width|height)="[^"]*"')


class HtmlReporter(Reporter):
    """One HTML file: the answer, the list of failures, and the cases with their evidence behind a click."""

    name = "html"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        from moedoctor.reporters.pages.machine import make_environment_table
        from moedoctor.reporters.pages.run import Detail, list_answers, run_page

        page = [*run_page(report, Detail.EVIDENCE), *make_environment_table(report.environment)]
        document = {"environment": report.environment, "origin": report.origin}
        return to_html(put_answer_first(page, document, list_answers(report)))


def put_answer_first(page: Page, document: Mapping[str, Any], found: Sequence[str]) -> list[Block]:
    """Return `page` with its title and its answer first, and last how the report was made.

    `document` is the report as JSON, and `found` are the lines that sum it up. What the answer says is not
    repeated in a paragraph.
    """
    from moedoctor.reporters.pages.machine import make_origin_table

    title, answered = find_title(page, document), report_answer(page, document, found)
    rest = [
        block
        for block in omit_answer(page, answered)
        if block is not title
        and not isinstance(block, Step)
        and not (isinstance(block, Paragraph) and is_source(block))
    ]
    return [Heading(title.text, 1), answered, *rest, *make_origin_table(document.get("origin"))]


def to_html(page: Page) -> str:
    """Return the page as an HTML document that ends with a line end."""
    from markupsafe import Markup

    environment = _load_templates()
    title = next(
        (strip_styles(block.text) for block in walk_blocks(page) if isinstance(block, Heading)), "moedoctor"
    )
    ids = _Ids(page)
    script = _read_source(environment, "page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    document = environment.get_template("page.html").render(
        title=title,
        sections=_split_sections(page),
        ids=ids,
        first_answer=next((block for block in page if isinstance(block, Answer)), None),
        picture=functools.partial(_draw_picture, itertools.count(1)),
        script=Markup(script),  # our own file: the policy names its hash
        style=Markup(_read_source(environment, "page.css")),
        digest=digest,
    )
    # A CI server that reads the page in a log must not see a command; a browser shows the same text.
    harmless = COMMAND.sub(lambda match: f"{match[1] or ''}&#{ord(match[0][-1])};", document.strip("\n"))
    return harmless + "\n"


@functools.cache
def _load_templates() -> Environment:
    """Return the templates, which escape everything that is not Markup."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("moedoctor.reporters", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "one_line": join_lines,
        "clean": clean,
        "spans": split_spans,
        "kind": lambda block: type(block).__name__,
        "pieces": _split_links,
        "prose": _render_prose,
        "coded": _split_code,
    }
    environment.globals |= {"tones": TONES, "nothing_to_do": NOTHING_TO_DO}
    return environment


def _read_source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _split_sections(page: Page) -> Sequence[tuple[Heading | Fold | None, Page]]:
    """Return the blocks of the page by section: a heading of level 2 or a fold starts one.

    The first one has no heading; a title of level 1 is part of it.
    """
    sections: list[tuple[Heading | Fold | None, list[Block]]] = [(None, [])]
    for block in page:
        if isinstance(block, Fold):
            sections += [(block, list(block.blocks)), (None, [])]
        elif isinstance(block, Heading) and block.level == 2:
            sections.append((block, []))
        else:
            sections[-1][1].append(block)
    return [(head, blocks) for head, blocks in sections if head is not None or blocks]


class _Ids:
    """An id for each heading and fold of a page, and the id that a text of the style ``section`` leads to."""

    def __init__(self, page: Page) -> None:
        self._ids: dict[int, str] = {}
        self._by_name: dict[str, str] = {}
        used: set[str] = {"answer"}
        for block in walk_blocks(page):
            if isinstance(block, (Heading, Fold)):
                text = block.title if isinstance(block, Fold) else block.text
                name = strip_styles(split_spans(text)[0]) if split_spans(text) else ""
                stem = _NOT_IN_ID.sub("-", name.lower())[:60].strip("-") or "section"
                number, mark = 1, stem
                while mark in used:
                    number += 1
                    mark = f"{stem}-{number}"
                used.add(mark)
                self._ids[id(block)] = mark
                self._by_name.setdefault(name, mark)

    def find_id(self, block: Heading | Fold) -> str:
        return self._ids[id(block)]

    def find_target(self, name: str) -> str | None:
        return self._by_name.get(join_lines(name))


def _draw_picture(numbers: Iterator[int], picture: Picture) -> dict[str, Any]:
    """Return ``svg`` as markup, or the ``problem`` in words, with the texts of the next picture of a page.

    Without matplotlib the page says so, and the rest of it stays.
    """
    from markupsafe import Markup

    from moedoctor.reporters.plots import PlotError, draw_svg

    chart = picture.chart
    shown = {"title": chart.title, "caption": chart.caption, "svg": None}
    try:
        drawn = _inline_svg(draw_svg(chart, caption=False), next(numbers), chart.title)
    except PlotError as error:
        return {**shown, "problem": str(error)}
    return {**shown, "svg": Markup(drawn)}  # matplotlib escapes every text of the chart


def _inline_svg(drawn: str, number: int, title: str) -> str:
    """Return the SVG as a part of a page, with the page's colors and ids that no other picture has."""
    from markupsafe import escape

    from moedoctor.reporters.plots import COLORS, GRID, INK, QUIET

    _, mark, text = drawn.partition("<svg")
    tag, end, text = text.partition(">")
    text = _NOT_SHOWN.sub("", text)
    label = f' role="img" focusable="false" aria-label="{escape(join_lines(title))}"'
    text = _NAMESPACES.sub("", f"{mark}{label}{_SIZE.sub('', tag)}{end}{text}").rstrip()
    for index, colour in enumerate(COLORS):
        text = text.replace(colour, f"var(--line-{index + 1})")
    for name, colour in (("ink", INK), ("quiet", QUIET), ("rule", GRID)):
        text = text.replace(colour, f"var(--{name})")
    text = _GROUP_ID.sub("<g", text).replace("xlink:href", "href")
    return _ID.sub(rf"\1picture-{number}-\2", text)


def _split_links(text: str) -> list[tuple[str, str]]:
    """Return (text, address): the parts of a text, with the address of ``owner/repository#1`` on GitHub.

    What begins with ``https://`` is its own address.
    """
    line, parts, end = join_lines(text), [], 0
    for match in _REFERENCE.finditer(line):
        address = match[0] if match[1] is None else f"https://github.com/{match[1]}/issues/{match[2]}"
        parts += [(line[end : match.start()], ""), (match[0], address)]
        end = match.end()
    return [*parts, (line[end:], "")]


def _split_code(text: str) -> list[tuple[str, bool]]:
    """Return (text, whether it is code) for a step: what is between two ` is code."""
    return [(part, index % 2 == 1) for index, part in enumerate(_CODE.split(join_lines(text))) if part]


def _render_prose(markdown: str) -> Markup:
    """Return Markdown of the catalogue as HTML; HTML within it stays text."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(clean(markdown)))
