"""The table at a terminal."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import full_report
from rich.cells import cell_len

from moedoctor.reporters.page import Table
from moedoctor.reporters.table import MIN_WIDTH, TableReporter, to_text
from moedoctor.results import Report

WIDTHS = (60, 80, 120, 200)


def _render(report: Report, width: int | None = None, colour: bool = False) -> str:
    """Return the whole report, as with ``-v``; the short page has tests of its own."""
    return TableReporter(verbose=True).render(report, colour=colour, width=width)


@pytest.mark.parametrize("width", WIDTHS)
def test_lines_fit_and_verdicts_stay_whole(width: int) -> None:
    lines = _render(dataclasses.replace(full_report(), findings=(), capsule=None), width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)
    found = "\n".join(lines[lines.index("MD001 nan_routing: error") :]).split()
    # The four skips share a row, and the heading has one more `error`.
    assert [found.count(word) for word in ("reproduced", "clean", "skipped")] == [8, 6, 1]
    assert found.count("error") == 1 + 1
    for word in ("confirmed", "refuted", "untested"):
        assert word in found


def test_colour_is_used_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = full_report()
    plain = _render(whole)
    assert "\x1b" not in plain
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    assert _render(whole) == plain
    monkeypatch.setenv("NO_COLOR", "1")  # only the command line decides
    coloured = _render(whole, colour=True)
    assert "\x1b[33mreproduced\x1b[0m" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.split("\n")] == plain.split("\n")


LONG = (
    ("", "backend", "why"),
    [("+", "FLASHINFER_CUTEDSL_BATCHED", "would work; something_long_without_a_gap comes before it")],
)
OVERVIEW = (
    ("verdict", "failure", "control", "our fix", "your vLLM"),
    [("reproduced", "MD005 untraceable_offload", "0/2", "not shown", "not tested")] * 20,
)
RATES = (("slots", *(f"policy{n}" for n in range(9))), [("8", *["23.3%"] * 9), ("16", *["36.6%"] * 9)])


@pytest.mark.parametrize("table", [LONG, OVERVIEW, RATES], ids=["cards", "words", "on its side"])
@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_no_word_breaks_at_sixty_columns(table, width):
    header, rows = table
    text = to_text([Table(header, rows)], width=width)
    assert max(map(cell_len, text.splitlines())) <= (width or 1000)
    words = {word for row in (header, *rows) for cell in row for word in cell.split()}
    found = text.replace(":", " ").split()
    assert not [word for word in words if word not in found], text
    assert sum(found.count(word) for word in {"23.3%", "MD005", "FLASHINFER_CUTEDSL_BATCHED"}) in (1, 9, 20)


@given(
    st.integers(1, 5).flatmap(
        lambda count: st.lists(st.tuples(*[st.text("ab ", max_size=30)] * count), min_size=1, max_size=5)
    ),
    st.integers(MIN_WIDTH, 120),
    st.booleans(),
    st.sampled_from((1, 40, 90)),
)
def test_no_cell_of_a_table_is_lost_at_any_width(rows, width, grouped, longest):
    header = ("group", *(f"{number}" * longest for number in range(len(rows[0]))))
    text = to_text([Table(header, [("g", *row) for row in rows], grouped=grouped)], width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    cells = "".join(cell for row in rows for cell in row)
    assert sum(map(text.count, "ab")) == sum(map(cells.count, "ab"))
