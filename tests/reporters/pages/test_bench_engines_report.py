"""The report of `bench --engine`: its picture, and a title that says no more than the figures."""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine_rows import engine_document, engine_row

from moedoctor.reporters.pages.bench_engines import charts, from_dict
from moedoctor.reporters.plots import svg


def message(*rows: dict[str, Any]) -> str:
    (chart,) = charts(from_dict(engine_document(rows)))
    return chart.title


@pytest.mark.parametrize(
    ("second", "title"),
    [
        (None, "marlin, fix moe: 200 tokens/s at batch 8"),
        (100.0, "marlin, fix moe is fastest at batch 8: 200 tokens/s, the next 100"),
        (197.0, "marlin, fix moe and triton, fix none are equally fast at batch 8, within their spread"),
        (300.0, "triton, fix none is fastest at batch 8: 300 tokens/s, the next 200"),
    ],
)
def test_the_title_names_the_fastest_only_beyond_the_spread(second: float | None, title: str) -> None:
    others = [] if second is None else [engine_row("triton", "none", 8, second)]
    # At batch 1 it is another one: the title is about the largest batch.
    first = engine_row("cutlass", "none", 1, 900.0)
    assert message(first, engine_row("marlin", "moe", 8, 200.0), *others) == title


def test_each_engine_is_a_line_with_bars_and_wrong_ones_are_not_drawn() -> None:
    pytest.importorskip("matplotlib")
    names, batches = ("marlin", "triton"), (1, 8)
    rows = [engine_row(name, "none", batch, 50.0 * batch) for name in names for batch in batches]
    rows.append({"moe_backend": "cutlass", "fix": "none", "batch": 1, "wrong": "token 3 is another one"})
    (chart,) = charts(from_dict(engine_document(rows)))
    assert [line.name for line in chart.series] == ["marlin, fix none", "triton, fix none"]
    assert [(list(line.x), list(line.low)) for line in chart.series] == [([1, 8], [49.0, 392.0])] * 2
    words = re.findall(r">([^<>]+)</text>", svg(chart, caption=True))
    assert {"marlin, fix none", "triton, fix none", "batch (sequences) (log scale)", "1", "8"} <= set(words)


def test_without_a_timed_engine_there_is_no_picture() -> None:
    row = {"moe_backend": "cutlass", "fix": "none", "batch": 1, "failed": "no kernel image"}
    assert charts(from_dict(engine_document([row]))) == []
