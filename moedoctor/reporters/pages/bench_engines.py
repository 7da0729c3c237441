"""`moedoctor bench --engine`: what it measured as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.page import Block, Bullets, Paragraph, Picture, make_evidence_tables
from moedoctor.reporters.text import UNSTEADY_REMARK, has_unsteady

Figures = Mapping[str, Any]
"""``engines`` and ``speeds`` have the fields of `moedoctor.bench["engines"]`: `EngineRow` and `SpeedRow`."""


def summarize(figures: Figures) -> str:
    """Return the fastest engine at each batch size, and how many are wrong or failed."""
    best = []
    for batch in dict.fromkeys(row["batch"] for row in figures["speeds"]):
        rows = (row for row in figures["speeds"] if row["batch"] == batch)
        fastest = max(rows, key=lambda row: float(row["tokens_per_second"]))
        best.append(f"batch {batch}: {fastest['variant']}, {fastest['tokens_per_second']:.1f} tokens/s")
    for key in ("wrong", "failed"):
        if count := sum(key in row for row in figures["engines"]):
            best.append(f"{count} {key}")
    if unsteady := sum(map(has_unsteady, figures["speeds"])):
        best.append(f"{unsteady} with a spread that makes figures worthless")
    return "; ".join(best)


def list_reasons(figures: Figures) -> list[str]:
    """Return a line for each engine that is wrong or failed."""
    return [
        f"{row['variant']}: {key}: {row[key]}"
        for row in figures["engines"]
        for key in ("wrong", "failed")
        if key in row
    ]


def list_blocks(figures: Figures, *, full: bool = False) -> list[Block]:
    """Return the answer, the engines and their speeds; all kinds take `full`."""
    return [
        Paragraph(summarize(figures)),
        Bullets(list_reasons(figures)),
        *map(Picture, list_charts(figures)),
        *make_evidence_tables({key: figures[key] for key in ("engines", "speeds")}, measured=True).values(),
        Bullets(list(_list_remarks(figures))),
    ]


def _list_remarks(figures: Figures) -> Iterator[str]:
    yield (
        f"{figures['model']}: {figures['tokens']} new tokens for each sequence, drawn at temperature 1 from "
        "fixed seeds; medians with the 20th and 80th percentile. Ratios are against the first engine that "
        "answered; gpu ratio compares GPU times of a decode step."
    )
    yield (
        "tokens same: prompts with the first engine's greedy tokens, of those that it decides clearly. An "
        "engine with fewer than eight in ten is wrong and is not timed."
    )
    if any("tokens_of" not in row and "failed" not in row for row in figures["engines"]):
        yield "Tokens were not compared: the first engine decides too few prompts clearly."
    if any("control_same" in row for row in figures["engines"]):
        yield "control same: the same count while every router has the rows of other experts."
    if any("load_peak_bytes" in row for row in figures["engines"]):
        yield (
            "load peak: what torch held at most while weights were loaded and repacked, beyond what they "
            "take afterwards (MD026); planned peak: the same as `moedoctor plan` computes it without offload."
        )
    if figures["together"]:
        yield "All engines were up at once and took turns, so the KV cache has a fixed size."
    if any(map(has_unsteady, figures["speeds"])):
        yield UNSTEADY_REMARK
    yield from (f"Argument of every engine: {name}={value}" for name, value in figures["arguments"].items())


def list_charts(figures: Figures) -> list[Chart]:
    """Return tokens per second over the batch, a line for each engine; none for one batch: a table has it."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(figures["speeds"], key=lambda row: int(row["batch"])):
        lines.setdefault(row["variant"], []).append(row)
    if len({row["batch"] for row in figures["speeds"]}) < 2:
        return []
    return [
        Chart(
            "tokens_per_second",
            _make_title(figures["speeds"]),
            x_label="batch (sequences)",
            y_label="tokens per second",
            series=tuple(
                Series.from_records(name, rows, "batch", "tokens_per_second") for name, rows in lines.items()
            ),
            caption=f"{figures['model']}: {figures['tokens']} new tokens for each sequence. Medians, bars "
            "from p20 to p80.",
            log_x=True,
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
