"""Functions for text that all formats use."""

import pytest
from report_samples import HOSTILE, case, crashed

from moedoctor.reporters.text import explain_case, format_value
from moedoctor.text import clean, join_lines


def test_cleaning_keeps_the_text() -> None:
    assert clean("\x1b[1;31merror\x1b[0m: x\r\ny\rz\tt") == "error: x\ny\nz   t"
    linked = "\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\ and \x1b]0;title\x07more"
    assert clean(linked) == "link and more"
    assert clean("\x1b]0;never ended, and\nwhat follows") == "0;never ended, and\nwhat follows"
    assert clean("naïve Ω 漢字 µs") == "naïve Ω 漢字 µs"
    assert join_lines(HOSTILE).startswith("[red]no markup[/] | `code` <b>&bold</b> red :smile:")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"), (True, "true"), (13, "13"), (3.43125, "3.431"), (1234567.0, "1234567"),
        (12345.67, "12345.7"), (0.00001234, "1.234e-05"), (float("nan"), "nan"), ("two\nlines", "two lines"),
        ([1, 2], "[1, 2]"), (list(range(20)), "[0, 1, 2, 3, 4, 5, … 20 in all]"), ({"a": 1.0}, "{a: 1}"),
        ("x" * 1000, "x" * 140 + "… (1000 characters)"),
    ],
)  # fmt: skip
def test_values_are_shortened(value: object, text: str) -> None:
    assert format_value(value) == text


def test_the_figure_that_decides() -> None:
    for verdict, fields, expected in (
        ("reproduced", {"figure": "13 rows"}, "13 rows"),
        ("reproduced", {"figure": "13 rows", "reason": "odd"}, "13 rows: odd"),
        ("skipped", {"figure": "none", "reason": "no GPU"}, "no GPU"),
        ("error", {"figure": "", "reason": "boom"}, "boom"),
        ("clean", {"figure": "", "evidence": {"rows": 1}}, "rows = 1"),
    ):
        assert explain_case(case("faulty", verdict, **fields)) == expected
    assert explain_case(crashed("installed")) == "illegal memory access"
