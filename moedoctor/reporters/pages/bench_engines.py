"""`moedoctor bench --engine`: what it measured as a record, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.page import Block, Bullets, Paragraph, Picture, make_evidence_tables
from moedoctor.reporters.text import UNSTEADY_REMARK, has_unsteady
from moedoctor.results import from_json


@dataclass(frozen=True)
class EngineBench:
    """Everything that `moedoctor bench --engine` measured."""

    model: str
    tokens: int
    """New tokens of each sequence."""
    arguments: Mapping[str, Any]
    """Arguments of `vllm.LLM` that the user gave."""
    together: bool
    """Whether all engines were up at once and took turns."""
    engines: tuple[Mapping[str, Any], ...]
    """Fields of `moedoctor.bench.engines.EngineRow`."""
    speeds: tuple[Mapping[str, Any], ...]
    """Fields of `moedoctor.bench.engines.SpeedRow`."""
    environment: Mapping[str, Any]
    exit_code: int = 0
    origin: Mapping[str, Any] | None = None
    """Where the report comes from, as `moedoctor.origin.Origin`."""


def make_figures(bench: EngineBench) -> dict[str, Any]:
    """Return the figures as JSON has them."""
    facts = ("model", "tokens", "arguments", "together", "engines", "speeds")
    return {name: getattr(bench, name) for name in facts}


def read_figures(figures: Any, common: Mapping[str, Any]) -> EngineBench:
    """Return the record of `figures` with the fields that all kinds have. Raises ReportError."""
    return from_json(EngineBench, {**figures, **common})


def summarize(bench: EngineBench) -> str:
    """Return the fastest engine at each batch size, and how many are wrong or failed."""
    best = []
    for batch in dict.fromkeys(row["batch"] for row in bench.speeds):
        fastest = max(
            (row for row in bench.speeds if row["batch"] == batch),
            key=lambda row: float(row["tokens_per_second"]),
        )
        best.append(f"batch {batch}: {fastest['variant']}, {fastest['tokens_per_second']:.1f} tokens/s")
    for key in ("wrong", "failed"):
        if count := sum(key in row for row in bench.engines):
            best.append(f"{count} {key}")
    if unsteady := sum(map(has_unsteady, bench.speeds)):
        best.append(f"{unsteady} with a spread that makes figures worthless")
    return "; ".join(best)


def list_reasons(bench: EngineBench) -> list[str]:
    """Return a line for each engine that is wrong or failed."""
    return [
        f"{row['variant']}: {key}: {row[key]}"
        for row in bench.engines
        for key in ("wrong", "failed")
        if key in row
    ]


def list_blocks(bench: EngineBench, *, full: bool = False) -> list[Block]:
    """Return the answer, the engines and their speeds; all kinds take `full`."""
    return [
        Paragraph(summarize(bench)),
        Bullets(list_reasons(bench)),
        *(Picture("", chart.title, chart) for chart in list_charts(bench)),
        *make_evidence_tables({"engines": bench.engines}, measured=True).values(),
        *make_evidence_tables({"speeds": bench.speeds}, measured=True).values(),
        Bullets(list(_list_remarks(bench))),
    ]


def _list_remarks(bench: EngineBench) -> Iterator[str]:
    yield (
        f"{bench.model}: {bench.tokens} new tokens for each sequence, drawn at temperature 1 from fixed "
        "seeds; medians with the 20th and 80th percentile. Ratios are against the first engine that "
        "answered; gpu ratio compares GPU times of a decode step."
    )
    yield (
        "tokens same: prompts with the first engine's greedy tokens, of those that it decides clearly. An "
        "engine with fewer than eight in ten is wrong and is not timed."
    )
    if any("tokens_of" not in row and "failed" not in row for row in bench.engines):
        yield "Tokens were not compared: the first engine decides too few prompts clearly."
    if any("control_same" in row for row in bench.engines):
        yield "control same: the same count while every router has the rows of other experts."
    if bench.together:
        yield "All engines were up at once and took turns, so the KV cache has a fixed size."
    if any(map(has_unsteady, bench.speeds)):
        yield UNSTEADY_REMARK
    yield from (f"Argument of every engine: {name}={value}" for name, value in bench.arguments.items())


def list_charts(bench: EngineBench) -> list[Chart]:
    """Return tokens per second over the batch, a line for each engine; none if nothing was timed."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(bench.speeds, key=lambda row: int(row["batch"])):
        lines.setdefault(row["variant"], []).append(row)
    if not lines:
        return []
    return [
        Chart(
            "tokens_per_second",
            _make_title(bench.speeds),
            x_label="batch (sequences)",
            y_label="tokens per second",
            series=tuple(
                Series.from_records(name, rows, "batch", "tokens_per_second") for name, rows in lines.items()
            ),
            caption=f"{bench.model}: {bench.tokens} new tokens for each sequence. Medians, bars from p20 to "
            "p80.",
            log_x=len({row["batch"] for row in bench.speeds}) > 1,
        )
    ]


def _make_title(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which engine is fastest at the largest batch, if its spread does not reach the next one's."""
    batch, rate = max(row["batch"] for row in rows), "tokens_per_second"
    ranked = sorted((row for row in rows if row["batch"] == batch), key=lambda row: float(row[rate]))
    best = ranked[-1]
    if len(ranked) == 1:
        return f"{best['variant']}: {best[rate]:.0f} tokens/s at batch {batch}"
    second = ranked[-2]
    if best[f"{rate}_p20"] <= second[f"{rate}_p80"]:
        pair = f"{best['variant']} and {second['variant']}"
        return f"{pair} are equally fast at batch {batch}, within their spread"
    rates = f"{best[rate]:.0f} tokens/s, the next {second[rate]:.0f}"
    return f"{best['variant']} is fastest at batch {batch}: {rates}"
