"""Every kind of block in Markdown and at a terminal: readable, and its text is never markup."""

import re

from hostile import TEXTS, problem
from hypothesis import example, given
from hypothesis import strategies as st
from report_readers import MARKDOWN
from report_samples import HOSTILE
from rich.cells import cell_len

from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.page import (
    Block,
    Bullets,
    Heading,
    Item,
    Paragraph,
    Picture,
    Preformatted,
    Prose,
    Span,
    Table,
    is_records,
    make_evidence_tables,
    omit_records,
)
from moedoctor.reporters.table import MIN_WIDTH, to_text
from moedoctor.reporters.text import has_unsteady
from moedoctor.text import join_lines

STYLES = ("", "bold", "dim", "code", "source", "error")
texts = (
    st.text(max_size=20)
    | st.text(alphabet="*_`|[]()<>&#-+.1~!\\@a \n$=:;\x1b\u202e\u2067\x9b\x7f\x85", max_size=20)
    | st.sampled_from([text[:40] for text in TEXTS])
)
inlines = texts | st.lists(st.builds(Span, texts, st.sampled_from(STYLES)), max_size=3).map(tuple)
labelled = st.lists(st.tuples(texts, inlines), max_size=2)
rows = st.lists(st.tuples(inlines, inlines), max_size=3)


def make_picture(file: str, title: str) -> Picture:
    """Return a picture in a file."""
    return Picture(Chart("c", title, "x", "y", (Series("a", [1.0], [2.0]),), "caption"), file)


blocks = (
    st.builds(Heading, inlines, st.integers(1, 3))
    | st.builds(Paragraph, inlines)
    | st.builds(Bullets, st.lists(inlines, min_size=1, max_size=3))
    | st.builds(Item, texts, inlines, labelled)
    | st.builds(Table, st.tuples(texts, texts), rows, grouped=st.booleans())
    | st.builds(Preformatted, texts)
    | st.builds(make_picture, texts.filter(bool), texts)
)


@given(st.lists(blocks, max_size=4))
@example(
    [Paragraph("::error::x"), Preformatted("::error::x\n \t::y\n##[z]"), Paragraph(Span("##[z]", "code"))]
)
@example([make_picture("a) <b> [x](y\n.svg", "a](b) ![c")])
def test_any_page_is_plain_text_in_markdown(page: list[Block]) -> None:
    text = to_markdown(page)
    assert not problem(text)
    tokens = MARKDOWN.parse(text)
    inner = [child for token in tokens for child in token.children or ()]
    kinds = {child.type for child in inner}
    plain = {"text", "text_special", "softbreak", "strong_open", "strong_close", "code_inline"}
    assert kinds <= plain | {"html_inline", "link_open", "link_close", "image"}
    assert {child.content for child in inner if child.type == "html_inline"} <= {"<!-- -->"}
    for child in inner:
        if child.type == "link_open":
            assert str(child.attrs["href"]).startswith("https://github.com/")
    pictures = sum(isinstance(block, Picture) for block in page)
    assert sum(child.type == "image" for child in inner) == pictures
    tables = [block for block in page if isinstance(block, Table)]
    assert sum(token.type == "td_open" for token in tokens) == sum(2 * len(table.rows) for table in tables)
    fences = sum(isinstance(block, Preformatted) for block in page)
    assert sum(token.type == "fence" for token in tokens) == fences


@given(st.lists(blocks, max_size=4), st.integers(1, 220), st.booleans())
def test_any_page_fits_a_terminal_of_any_width(page: list[Block], width: int, colour: bool) -> None:
    text = to_text(page, colour=colour, width=width)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert not problem(plain)
    assert max(map(cell_len, plain.split("\n"))) <= max(width, MIN_WIDTH)
    if not colour:
        assert plain == text
        assert not any(line.endswith(" ") for line in text.split("\n"))


PAGE = (
    Heading("a # title", 1),
    Paragraph((Span("bold", "bold"), " and ", Span("moedoctor run", "code"))),
    Bullets(["one", "- two"]),
    Item("error", ("text (", Span("a/b#1", "source"), ")"), [("next", "do this"), ("", "more")]),
    Item("note", "second"),
    Table(("name", "size"), [("x", "1"), ("y|z", "22")], "lr"),
    Table(("group", "label", "n"), [("g", "a", "1"), ("g", "b", "2"), ("alone", "", "3")], grouped=True),
    Preformatted("a  ```\nb"),
    make_picture("plot.svg", "a [plot]"),
    Prose("*as it is*"),
)


def test_a_page_at_a_terminal() -> None:
    assert (
        to_text(PAGE)
        == """\
a # title
bold and moedoctor run

- one
- - two

error       text (a/b#1)
            more
            next: do this
note        second

name  size
──────────
x        1
y|z     22

  label  n
──────────
g
  a      1
  b      2
alone    3

  a  ```
  b

*as it is*
"""
    )


def test_nothing_in_a_page_is_markup_at_a_terminal() -> None:
    item = Item("error", HOSTILE, [("[b]", "[/b]")])
    text = to_text((Heading(HOSTILE), Paragraph("[red]x[/] :smile:"), item))
    assert text.count(join_lines(HOSTILE)) == 2
    assert "[red]x[/] :smile:" in text
    assert "[b]: [/b]" in text


RECORDS = [
    {"shape": "128x128", "ours_us": 1.4567, "ours_us_p20": 1.45, "ours_us_p80": 1.46, "correct": True},
    {"shape": "8192x128", "correct": False},
]


def test_records_become_a_table_with_the_median_beside_its_percentiles() -> None:
    (table,) = make_evidence_tables({"rows": RECORDS, "top_k": 8}).values()
    assert table.header == ["shape", "ours us", "correct"]
    assert table.rows == [["128x128", "1.457 (1.45 to 1.46)", "true"], ["8192x128", "", "false"]]
    assert make_evidence_tables({"rows": [{"ours_us_p20": 1.0}]})["rows"].header == ["ours us p20"]


def test_measured_records_have_units_for_people_and_a_mark_for_a_worthless_spread() -> None:
    rows = [
        {
            "step_us": 2500.0,
            "step_us_p20": 2400.0,
            "step_us_p80": 2450.0,
            "load_s": 0.25,
            "gpu_bytes": 3 << 30,
        },
        {"step_us": 4000.0, "step_us_p20": 1000.0, "step_us_p80": 9000.0, "miss_gb_s": 51.5, "correct": True},
    ]
    table = make_evidence_tables({"rows": rows}, measured=True)["rows"]
    assert table.header == ["step (ms)", "load (ms)", "gpu (GiB)", "miss gb s", "correct"]
    assert table.rows[0] == ["2.500 (2.400 to 2.450)", "250.000", "3.00", "", ""]
    assert table.rows[1:] == [["4.000 (1.000 to 9.000) !", "", "", "51.5", "true"]]
    assert [has_unsteady(row) for row in rows] == [False, True]


def test_other_evidence_stays_for_a_line_of_text() -> None:
    assert omit_records({"rows": RECORDS, "top_k": 8}) == {"top_k": 8}
    for value in ([], [1], {"a": {}}, "text", [{"a": 1}, 2]):
        assert not is_records(value)
