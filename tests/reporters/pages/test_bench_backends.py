import json
import re

import pytest

from moedoctor.reporters.json import to_document, to_json
from moedoctor.reporters.markdown_page import to_markdown
from moedoctor.reporters.pages.backend_charts import write_messages
from moedoctor.reporters.pages.bench import Bench, make_bench_page
from moedoctor.reporters.pages.bench_backends import list_charts, make_slug, summarize
from moedoctor.reporters.table import to_text
from moedoctor.results import from_json

TIMED = {
    "backend": "MARLIN", "quantization": "nvfp4", "model": "m|1", "tokens": 8, "right": True, "wrong": None,
    "cosine": 0.99999, "deterministic": True, "active_experts": 5, "bytes": 7 << 20, "flops": 2000,
    "timed": "graph, cold L2", "time_us": 12.5, "time_us_p20": 12.0, "time_us_p80": 13.0,
    "warm_us": 9.0, "eager_us": 99.0, "tflops": 1.5, "gigabytes_per_second": 2345.0, "roofline_share": 0.61,
    "workspace_bytes": 3 << 20, "peak_memory_bytes": 5 << 30, "controls_noticed": "11 of 11",
    "controls_missed": [],
}  # fmt: skip
AWAY = {"backend": "VLLM_CUTLASS", "quantization": "nvfp4", "model": "m|1", "unavailable": "vLLM says: no"}
WRONG = {**{k: TIMED[k] for k in ("backend", "quantization", "model", "tokens")}, "wrong": "cosine 0.1"}
LAYER = {"hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2, "activation": "silu", "source": "x"}
HARNESS = {
    "graph_us": 20.0, "graph_overhead": -0.01, "graph_cold_us": 20.1, "graph_cold_overhead": 0.015,
    "do_bench_us": 20.2,
}  # fmt: skip
FIGURES = {
    "layers": {"m|1": LAYER},
    "routing": "balanced",
    "device": "NVIDIA H200",
    "rows": [TIMED, {**TIMED, "tokens": 64, "deterministic": False}, AWAY],
    "roofline": {"bytes_per_second": 4.0e12, "flops": {"bf16": 6e14}},
    "harness": HARNESS,
}


def change(**figures: object) -> Bench:
    return Bench.from_figures("backends", {**FIGURES, **figures}, {"torch": "2.11"})


def render(bench: Bench, format: str) -> str:
    if format == "json":
        return to_json(to_document(bench))
    page = make_bench_page(bench, full=format == "markdown")
    return to_markdown(page) if format == "markdown" else to_text(page)


UNTRUSTED = {
    **{k: TIMED[k] for k in ("backend", "quantization", "model", "tokens")},
    "wrong": None, "failed": "the comparison did not notice stale_row", "controls_missed": ["stale_row"],
}  # fmt: skip


def test_a_comparison_that_missed_a_control_is_a_failure_but_not_of_the_backend() -> None:
    bench = change(rows=[UNTRUSTED, {**AWAY, "failed": "x"}])
    text = render(bench, "table")
    assert "NOT TRUSTED" in text
    assert "WRONG" not in text
    assert summarize(bench.bench["backends"]).startswith("0 points timed, 0 wrong, 1 failed")
    assert render(from_json(Bench, json.loads(render(bench, "json"))), "table") == text


def test_the_picture_shows_latency_against_the_limit() -> None:
    (chart,) = list_charts(FIGURES, "m|1")
    latency, limit = chart.series
    assert (latency.name, limit.name) == ("MARLIN nvfp4", "limit nvfp4")
    assert (latency.x, latency.y, latency.low, latency.high) == ([8, 64], [12.5] * 2, [12.0] * 2, [13.0] * 2)
    assert limit.bound
    assert limit.y == pytest.approx([12.5 * 0.61] * 2)


def timed(backend: str, *times: float, quantization: str = "nvfp4") -> list[dict[str, object]]:
    """Return rows at 1, 8 and 64 tokens, with a spread of 2 % up and down."""
    return [
        {**TIMED, "backend": backend, "quantization": quantization, "tokens": tokens}
        | {"time_us": time, "time_us_p20": time * 0.98, "time_us_p80": time * 1.02}
        for tokens, time in zip((1, 8, 64), times, strict=True)
    ]


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ({"OURS": (1, 1, 1), "MARLIN": (2, 2, 2)}, "OURS beats MARLIN from 1 to 64 tokens (nvfp4)"),
        (
            {"OURS": (1, 3, 1), "MARLIN": (2, 2, 2)},
            "OURS beats MARLIN at 1 and at 64 tokens, MARLIN beats OURS at 8 tokens (nvfp4)",
        ),
        ({"OURS": (3, 2, 2), "MARLIN": (2, 2, 2)}, "MARLIN beats OURS at 1 token (nvfp4)"),
        ({"OURS": (2, 2, 2), "MARLIN": (2.01, 2, 2)}, "OURS is as fast as MARLIN within the spread (nvfp4)"),
        ({"OURS": (1, 1, 1), "EMULATION": (2, 2, 2)}, "OURS nvfp4 is fastest from 1 to 64 tokens"),
        ({"A": (1, 1, 3), "B": (2, 2, 2)}, "time of a call over the number of tokens"),
    ],
)
def test_the_title_says_what_the_times_say_beyond_their_spread(times, text):
    rows = [row for backend, values in times.items() for row in timed(backend, *values)]
    assert write_messages("m", rows) == [f"m: {text}"]


def test_a_title_compares_only_backends_of_the_same_quantization_and_the_answer_has_the_others() -> None:
    rows = timed("OURS", 1, 1, 1) + timed("MARLIN", 2, 2, 2)
    rows += timed("OURS", 3, 3, 3, quantization="bf16") + timed("TRITON", 2, 2, 2, quantization="bf16")
    assert write_messages("m", rows) == [
        "m: OURS beats MARLIN from 1 to 64 tokens (nvfp4)",
        "m: TRITON beats OURS from 1 to 64 tokens (bf16)",
    ]


def test_a_time_of_zero_is_left_out_of_the_pictures() -> None:
    zero = {**TIMED, "tokens": 64, "time_us_p20": 0.0}
    (chart,) = list_charts(change(rows=[TIMED, zero]).bench["backends"], "m|1")
    assert chart.series[0].x == [8]


def test_a_slug_is_a_file_name() -> None:
    assert make_slug("../a b/ü|1") == "..-a-b-ü-1"
    assert make_slug("") == "layer"


@pytest.mark.parametrize(("factor", "time"), [(0.01, "125"), (1, "12.5"), (1000, "12.500"), (1e5, "1.250")])
def test_times_have_a_unit_for_people_the_same_in_every_column(factor: float, time: str) -> None:
    row = {name: value * factor if "_us" in name else value for name, value in TIMED.items()}
    text = render(change(rows=[row, {**row, "tokens": 64}]), "table")
    unit = {0.01: "ns", 1: "µs", 1000: "ms", 1e5: "s"}[factor]
    assert all(f"{title} ({unit})" in text for title in ("time", "p20–p80", "warm", "eager"))
    assert len(re.findall(rf"\s{re.escape(time)}\s", text)) == 2


def test_a_spread_that_makes_a_time_worthless_is_flagged() -> None:
    """The limit is 20 % of the median between p20 and p80."""
    steady = {**TIMED, "time_us_p20": 11.3, "time_us_p80": 13.7}
    wild = {**TIMED, "time_us_p20": 11.2, "time_us_p80": 13.8}
    assert " !" not in render(change(rows=[steady]), "table")
    assert "worthless" not in summarize(change(rows=[steady]).bench["backends"])
    bench = change(rows=[steady, wild])
    assert "12.5 !" in render(bench, "table")
    assert "! p20 and p80 differ by more than 20% of the median" in render(bench, "markdown")
    assert summarize(bench.bench["backends"]).endswith("1 with a spread that makes the time worthless")
