"""The report of `bench --engine`: its picture, and a title that says no more than the figures."""

import re
from typing import Any

import pytest
from engine_rows import engine_document, speed_row

from moedoctor.reporters.pages.bench_engines import list_charts
from moedoctor.reporters.plots import draw_svg


def message(*rows: dict[str, Any]) -> str:
    (chart,) = list_charts(engine_document(rows)["bench"]["engines"])
    return chart.title


@pytest.mark.parametrize(
    ("second", "title"),
    [
        (None, "marlin+moe: 200 tokens/s at batch 8"),
        (100.0, "marlin+moe is fastest at batch 8: 200 tokens/s, the next 100"),
        (197.0, "marlin+moe and triton are equally fast at batch 8, within their spread"),
        (300.0, "triton is fastest at batch 8: 300 tokens/s, the next 200"),
    ],
)
def test_the_title_names_the_fastest_only_beyond_the_spread(second: float | None, title: str) -> None:
    others = [] if second is None else [speed_row("triton", 8, second)]
    # At batch 1 it is another one: the title is about the largest batch.
    first = speed_row("cutlass", 1, 900.0)
    assert message(first, speed_row("marlin+moe", 8, 200.0), *others) == title


def test_each_engine_is_a_line_with_bars_and_wrong_ones_are_not_drawn() -> None:
    pytest.importorskip("matplotlib")
    names, batches = ("marlin", "triton"), (1, 8)
    rows = [speed_row(name, batch, 50.0 * batch) for name in names for batch in batches]
    wrong = {"variant": "cutlass", "wrong": "0 of 9 clear prompts"}
    (chart,) = list_charts(engine_document(rows, wrong)["bench"]["engines"])
    assert [line.name for line in chart.series] == ["marlin", "triton"]
    assert [(list(line.x), list(line.low)) for line in chart.series] == [([1, 8], [49.0, 392.0])] * 2
    words = re.findall(r">([^<>]+)</text>", draw_svg(chart, caption=True))
    assert {"marlin", "triton", "batch (sequences) (log scale)", "1", "8"} <= set(words)


def test_without_a_timed_engine_or_a_second_batch_there_is_no_picture() -> None:
    failed = {"variant": "cutlass", "failed": "no kernel image"}
    for rows in ([], [speed_row("triton", 8, 100.0), speed_row("marlin", 8, 90.0)]):
        assert list_charts(engine_document(rows, failed)["bench"]["engines"]) == []
