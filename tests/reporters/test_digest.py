"""The digest of a report: it fits into an issue, and what differs is in it."""

import re
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import HOSTILE, ORIGIN, full_report

from moedoctor.reporters import page as blocks
from moedoctor.reporters.digest import MOST_CHARACTERS, fit, make_digest
from moedoctor.reporters.markdown import MarkdownReporter
from moedoctor.reporters.markdown_page import escape
from moedoctor.reporters.pages.run import list_answers
from moedoctor.results import load_report

_STORED = (Path(__file__).parents[2] / "reports").glob("*/*.json")
REPORTS = sorted(file for file in _STORED if file.parent.name != "sources")

_texts = st.sampled_from(("", "short", HOSTILE, "x" * 2_000, "word " * 500, "<details>" * 100, "```\n" * 50))
_blocks = st.recursive(
    st.one_of(
        st.builds(blocks.Heading, _texts),
        st.builds(blocks.Paragraph, _texts),
        st.builds(blocks.Bullets, st.lists(_texts, max_size=12)),
        st.builds(blocks.Item, _texts, _texts, st.lists(st.tuples(_texts, _texts), max_size=6)),
        st.builds(
            lambda cells, rows: blocks.Table(["a"] * len(cells), [cells] * rows),
            st.lists(_texts, min_size=1, max_size=4),
            st.integers(0, 20),
        ),
        st.builds(blocks.Preformatted, _texts),
        st.builds(blocks.Prose, _texts),
    ),
    lambda inner: st.builds(blocks.Fold, _texts, st.lists(inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=15)
@given(st.lists(_blocks, max_size=12), st.sampled_from((2_000, MOST_CHARACTERS)))
def test_any_page_fits_and_folds_what_it_opens(page: list[Any], most: int) -> None:
    text = fit(page, most)
    assert len(text) <= most


def test_the_largest_stored_report_fits_and_its_failures_are_all_named() -> None:
    file = max(REPORTS, key=lambda path: path.stat().st_size)
    stored = load_report(file)
    text = MarkdownReporter().render(stored)
    assert len(text) <= MOST_CHARACTERS < len(MarkdownReporter(full=True).render(stored))
    for judged in stored.scenarios:
        title = f"{judged.id} {judged.name}: {judged.verdict.value}"
        assert f"<summary>{title}</summary>" in text or f"## {title}" in text
    assert text.count("<details>") == text.count("</details>") > 1


def test_a_run_begins_with_the_answer_and_folds_what_is_as_expected() -> None:
    whole = full_report()
    text = MarkdownReporter().render(whole)
    assert text.split("\n\n")[1].splitlines() == [f"- {escape(line)}" for line in list_answers(whole)]
    folded = "".join(re.findall(r"<details>.*?</details>", text, re.DOTALL))
    for differing in ("MD001 nan_routing: error", "a launch costs 30 %", "last words"):
        assert differing in text
        assert differing not in folded
    for expected in ("MD005 untraceable_offload", "env.VLLM_MOE", ORIGIN["again"][1]):
        assert expected in folded


def test_equal_rows_are_counted_and_the_environment_is_folded() -> None:
    rows = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "1")]
    facts = blocks.Table(("fact", "value"), [("gpu", "none")])
    first = (blocks.Heading("title", 1), blocks.Table(("x", "y"), rows))
    page = [*first, blocks.Fold("Environment", [facts]), blocks.Heading("After")]
    text = make_digest(page, blocks.Answer(["title", "a GPU"], ["one thing", "because"], ["do `it`"]))
    lines = ("- **Looked at:** title; a GPU", "- **Found:** one thing; because", "- **To do:** do `it`")
    assert text.startswith("\n".join(("# title", "", *lines, "", "")))
    assert "| a | 1 | 3 |" in text
    assert "| b | 2 |  |" in text
    assert re.search(r"<details><summary>Environment</summary>\n\n.*gpu.*</details>\n\n## After", text, re.S)


def test_what_is_left_out_is_counted_and_the_environment_stays() -> None:
    parts = [blocks.Fold(f"part {number}", [blocks.Preformatted("x" * 900)]) for number in range(100)]
    page = [blocks.Heading("title", 1), *parts, blocks.Fold("Environment", [blocks.Paragraph("the machine")])]
    text = fit(page, 5_000)
    assert "the machine" in text
    shown = len(re.findall("part", text)) - 1  # the note has the word too
    assert f"{101 - shown - 1} parts cut or left out: --full has everything." in text
