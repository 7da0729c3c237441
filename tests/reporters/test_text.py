"""Functions for text that all formats use."""

from __future__ import annotations

import pytest
from report_samples import ENVIRONMENT, HOSTILE, case, crashed, full_report, report

from moedoctor.reporters.text import (
    explain_case,
    format_environment,
    format_evidence,
    format_parameters,
    format_value,
    list_figures,
    summarize,
)
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


def test_parameters_and_figures_as_text() -> None:
    parameters = {"tokens": 128, "bias": False, "scoring": "softmax"}
    assert format_parameters(parameters) == "tokens=128 bias=false scoring=softmax"
    assert list(list_figures({"a": {"b": 1, "c": {}}, "d": "x"})) == [("a.b", "1"), ("d", "x")]
    assert format_evidence({"kernel_us": 3.43125, "rows": 13}) == "kernel_us = 3.431, rows = 13"


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


def test_the_line_of_counts() -> None:
    assert summarize(report()) == (
        "0 proved · 0 found · 0 absent · 0 failed · 0 skipped · 0 error — "
        "cases: 0 reproduced, 0 clean, 0 skipped"
    )
    assert summarize(full_report()) == (
        "0 proved · 0 found · 1 absent · 0 failed · 0 skipped · 1 error — "
        "cases: 8 reproduced, 6 clean, 4 skipped, 1 error"
    )


def test_the_line_of_facts() -> None:
    assert format_environment(report(environment={**ENVIRONMENT, "python": "3.11.4"})) == (
        "moedoctor 0.1.0 run · gpu NVIDIA H200 · driver 580.159 · torch 2.11.0 · vllm 0.21.0 · "
        "flashinfer none · python 3.11.4"
    )
    assert format_environment(report(environment={})) == "moedoctor 0.1.0 run"
