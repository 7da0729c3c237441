"""An HTML report is well-formed, has no reference to anything outside it, and text in it stays text."""

import base64
import hashlib
import re
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hostile import TEXTS, problem
from hypothesis import example, given
from hypothesis import strategies as st
from report_readers import MOST_HTML_BYTES, check_html, get_html_text, list_stored_runs, parse_html
from report_samples import case, report, scenario

from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.html import HtmlReporter, put_answer_first, to_html
from moedoctor.reporters.page import (
    Answer,
    Block,
    Bullets,
    Fold,
    Heading,
    Item,
    Paragraph,
    Picture,
    Preformatted,
    Prose,
    Span,
    Step,
    Table,
)
from moedoctor.results import load_report
from moedoctor.text import clean, join_lines

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "script", "section", "div", "figure"),
    *("figcaption", "h1", "h2", "h3", "h4", "p", "ul", "li", "dl", "dt", "dd", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td", "a", "strong", "span", "code", "pre"),
}
CHART = Chart("c", "ours is best", "tokens", "µs", (Series("ours", [1, 2], [3.0, 4.0]),), caption="how")

texts = (
    st.text(max_size=20)
    | st.text(alphabet="<>&\"'`/=a \n;#-![](){}%\x1b\u202e\x9b", max_size=20)
    | st.sampled_from([text[:60] for text in TEXTS])
).map(lambda text: text.replace("\ufffe", "").replace("\uffff", ""))  # which XML cannot hold
styles = st.sampled_from(("", "bold", "dim", "code", "source", "section", "error", "clean"))
inlines = texts | st.lists(st.builds(Span, texts, styles), max_size=3).map(tuple)
cells = st.lists(st.tuples(inlines, inlines), max_size=3)
simple = (
    st.builds(Heading, inlines, st.integers(1, 4))
    | st.builds(Paragraph, inlines)
    | st.builds(Step, inlines)
    | st.builds(Bullets, st.lists(inlines, max_size=3))
    | st.builds(Item, texts, inlines, st.lists(st.tuples(texts, inlines), max_size=2))
    | st.builds(Table, st.tuples(texts, texts), cells, align=st.sampled_from(["", "lr"]))
    | st.builds(Preformatted, texts)
    | st.builds(lambda title: Picture(replace(CHART, title=title)), texts)
    | st.builds(Answer, *[st.lists(inlines, max_size=2)] * 3)
)
blocks = simple | st.builds(Fold, inlines, st.lists(simple, max_size=3), st.booleans())


def unmarked(text: str) -> str:
    """Return a line of text without the backticks that become code on a page, and without spaces."""
    return "".join(join_lines(text).replace("`", "").split())


@given(st.lists(blocks, max_size=4))
@example([Paragraph("::error::x"), Preformatted("::error::x\n ::y\n##[z]"), Heading("<script>x</script>")])
@example([Heading("a"), Heading("a"), Paragraph(Span("a", "section")), Heading("a-2")])
@example([Paragraph("a `b` `c"), Table(("", ""), [("", "`${x}`")])])
def test_any_page_is_well_formed_and_plain_text(page: list[Block]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)  # drawing takes long
        text = to_html(page)
    assert not problem(text)
    root = check_html(text)
    assert {element.tag for element in root.iter()} <= TAGS
    tables = [block for block in page if isinstance(block, Table)]
    found = get_html_text(text)
    bare = "".join(found.replace("`", "").split())
    for block in page:
        if isinstance(block, Paragraph) and isinstance(block.text, str):
            assert unmarked(block.text) in bare
        if isinstance(block, Preformatted):
            assert " ".join(clean(block.text).split()) in found
    for table in tables:
        for row in table.rows:
            assert all(unmarked(cell) in bare for cell in row if isinstance(cell, str))


def test_the_policy_names_the_hash_of_the_only_script() -> None:
    text = to_html([Heading("a", 1)])
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    others = ["style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"]
    assert policy[1].split("; ") == ["default-src 'none'", f"script-src 'sha256-{digest}'", *others]
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_the_answer_comes_first_and_has_every_step_once() -> None:
    page = [
        Heading("check of a machine", 1),
        Paragraph("1 error"),
        Item("error", "MD001", [("why", "NaN"), ("next", "do `this`")]),
        Fold("more", [Step("do that"), Item("error", "MD002", [("next", "do `this`")])]),
    ]
    whole = put_answer_first(page, {"environment": {"gpu": "H200"}, "origin": {"date": "today"}}, ["1 error"])
    head, answer, *rest = whole
    assert head == page[0]
    assert answer == Answer(["check of a machine", "gpu H200"], ["1 error"], ["do `this`", "do that"])
    assert Paragraph("1 error") not in rest
    text = get_html_text(to_html(whole))
    assert text.index("Looked at") < text.index("Found") < text.index("What to do") < text.index("NaN")
    assert "do this" in text
    assert "today" in text


def test_cases_that_show_the_same_share_a_row_and_have_their_evidence_behind_it() -> None:
    same = [case("faulty", "reproduced", {"k": k}, figure="3 of 8", evidence={"rows": 8}) for k in (1, 2, 3)]
    other = case("faulty", "reproduced", {"k": 4}, figure="3 of 8", evidence={"rows": 9})
    root = parse_html(HtmlReporter().render(report(scenario("proved", *same, other))))
    behind = [element for element in root.iter("details") if element.get("class") == "evidence"]
    shown = [" ".join("".join(element.itertext()).split()) for element in behind]
    assert shown == ["3 of 8 evidencevalue rows8 k=1k=2k=3", "3 of 8 evidencevalue rows9"]


def test_a_failure_in_the_overview_leads_to_its_section() -> None:
    root = parse_html(HtmlReporter().render(report(scenario("found", case("installed", "reproduced")))))
    (link,) = [element for element in root.iter("a") if element.get("href") != "#answer"]
    (section,) = [element for element in root.iter("details") if f"#{element.get('id')}" == link.get("href")]
    assert section.get("open") is not None
    assert "".join(section.find("summary").itertext()).startswith(str(link.text))  # type: ignore[union-attr]


def test_a_picture_is_part_of_the_page_in_its_colours() -> None:
    pytest.importorskip("matplotlib")
    other = replace(CHART, title="theirs is best")
    root = check_html(to_html([Heading("a", 1), Picture(CHART), Picture(other)]))
    drawn = list(root.iter("svg"))
    assert len(drawn) == 2
    assert ["".join(text.itertext()) for text in drawn[0].iter("text")].count("ours is best") == 1
    assert "var(--line-1)" in ET.tostring(drawn[0], encoding="unicode")
    assert "#0060a0" not in ET.tostring(root, encoding="unicode")
    assert [element.text for element in root.iter("figcaption")] == ["how", "how"]


def test_without_matplotlib_the_page_says_so_and_lacks_only_the_picture(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = to_html([Heading("a", 1), Picture(CHART), Paragraph("after it")])
    check_html(text)
    assert "<svg" not in text
    assert "No picture: " in get_html_text(text)
    assert "pip install matplotlib" in get_html_text(text)
    assert "after it" in get_html_text(text)


def test_prose_is_formatted_and_html_in_it_stays_text() -> None:
    text = to_html([Prose("**bold** <b>x</b> `c`\n\n<script>y</script>\n")])
    root = check_html(text)
    assert [element.text for element in root.iter("strong")] == ["bold"]
    assert "<b>x</b>" in get_html_text(text)
    assert "<script>y</script>" in get_html_text(text)


def test_the_largest_stored_run_fits_and_is_made_in_seconds() -> None:
    stored = load_report(list_stored_runs()[-1])
    start = time.perf_counter()
    text = HtmlReporter().render(stored)
    assert time.perf_counter() - start < 20
    assert len(text.encode()) <= MOST_HTML_BYTES
    check_html(text)
    found = get_html_text(text)
    for each in stored.scenarios:
        assert join_lines(each.title) in found
        assert all(join_lines(claim.text) in found for claim in each.claims)
        assert all(join_lines(shown_case.figure) in found for shown_case in each.cases)
