"""`moedoctor bench --engine`: what it measured as a record, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import moedoctor
from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Picture, evidence_tables
from moedoctor.reporters.pages.machine import environment_table
from moedoctor.reporters.text import UNSTEADY_REMARK, has_unsteady
from moedoctor.results import ReportError, ScenarioVerdict, from_json


@dataclass(frozen=True)
class EngineBench:
    """Everything that `moedoctor bench --engine` measured."""

    model: str
    tokens: int
    """New tokens for each prompt."""
    max_lead: float
    """How far logprobs of a step may be from the reference's."""
    arguments: Mapping[str, Any]
    """Arguments of `vllm.LLM` that the user gave."""
    rows: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]
    exit_code: int = 0
    max_far: float = 0.0
    """The share of steps that may be farther. In reports without it the first difference decided."""
    origin: Mapping[str, Any] | None = None
    """Where the report comes from, as `moedoctor.origin.Origin`; None in reports of older releases."""


_FACTS = ("model", "tokens", "max_lead", "max_far", "arguments", "rows")


def bench_document(bench: EngineBench) -> dict[str, Any]:
    """Return the JSON document: the shape of every report, and `bench`."""
    return {
        "moedoctor": moedoctor.__version__,
        "command": "bench",
        "origin": bench.origin,
        "environment": bench.environment,
        "scenarios": [],
        "bench": {"engines": {name: getattr(bench, name) for name in _FACTS}},
        "summary": {**{verdict.value: 0 for verdict in ScenarioVerdict}, "exit_code": bench.exit_code},
    }


def from_dict(document: Any) -> EngineBench:
    """Return the record that `bench_document` wrote. Raises ReportError that names what is wrong."""
    try:
        record = {
            **document["bench"]["engines"],
            "environment": document["environment"],
            "exit_code": document["summary"]["exit_code"],
            "origin": document.get("origin"),
        }
    except (KeyError, TypeError) as error:
        raise ReportError("report", f"is not from `bench --engine`: {error}") from None
    return from_json(EngineBench, record)


def summary_line(bench: EngineBench) -> str:
    """Return the fastest engine at each batch size, and how many are wrong or failed."""
    best = []
    for batch in dict.fromkeys(row["batch"] for row in bench.rows):
        timed = [row for row in bench.rows if row["batch"] == batch and "tokens_per_second" in row]
        if timed:
            fastest = max(timed, key=lambda row: float(row["tokens_per_second"]))
            rate = f"{fastest['tokens_per_second']:.1f} tokens/s"
            best.append(f"batch {batch}: {fastest['moe_backend']}, fix {fastest['fix']}, {rate}")
    for key in ("wrong", "failed"):
        if count := sum(key in row for row in bench.rows):
            best.append(f"{count} {key}")
    if unsteady := sum(map(has_unsteady, bench.rows)):
        best.append(f"{unsteady} with a spread that makes figures worthless")
    return "; ".join(best)


def reasons(bench: EngineBench) -> list[str]:
    """Return a line for each engine that is wrong or failed."""
    lines = (
        f"{row['moe_backend']}, fix {row['fix']}: {key}: {row[key]}"
        for row in bench.rows
        for key in ("wrong", "failed")
        if key in row
    )
    return list(dict.fromkeys(lines))


def bench_page(bench: EngineBench, *, full: bool = False) -> list[Block]:
    """Return the table of engines, and with `full` the environment."""
    page: list[Block] = [
        Heading(f"moedoctor {moedoctor.__version__}: bench --engine", 1),
        Paragraph(
            f"{bench.model}: {bench.tokens} new tokens for each prompt, greedy. Medians with the 20th and "
            "80th percentile. The first engine that answered is the reference: the tokens of the others are "
            "compared with those of its nearest run, and ratio is the rate over its rate."
        ),
        *(Picture("", chart.title, chart) for chart in charts(bench)),
        *evidence_tables({"engines": bench.rows}, measured=True).values(),
        Bullets(
            [
                f"An engine is wrong if {_wrong(bench)}. A wrong engine is not timed. Rounding alone does "
                "that to a step if it sends the token to other experts, most of all with random weights: "
                "`moedoctor run PARITY` compares backends with a float32 reference.",
                *(
                    ["The reference was started again after the others, and its row has both runs."]
                    if _reference_ran_again(bench.rows)
                    else []
                ),
                *([UNSTEADY_REMARK] if any(map(has_unsteady, bench.rows)) else []),
                *(f"Argument of every engine: {name}={value}" for name, value in bench.arguments.items()),
            ]
        ),
    ]
    return [*page, *environment_table(bench.environment)] if full else page


def _wrong(bench: EngineBench) -> str:
    if not bench.max_far:
        return (
            f"the reference prefers its own token by more than {bench.max_lead:g} in logprob at the first "
            "token that differs"
        )
    return (
        f"more than {bench.max_far:.0%} of the steps, up to the first token that differs, have a logprob "
        f"that differs from the reference's by more than {bench.max_lead:g}"
    )


def _reference_ran_again(rows: Sequence[Mapping[str, Any]]) -> bool:
    return len({row["starts"] for row in rows if "starts" in row}) > 1


def charts(bench: EngineBench) -> list[Chart]:
    """Return tokens per second over the batch, a line for each engine; none if nothing was timed."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(bench.rows, key=lambda row: int(row["batch"])):
        if row.get("tokens_per_second", 0) > 0:
            lines.setdefault(_name(row), []).append(row)
    if not lines:
        return []
    return [
        Chart(
            "tokens_per_second",
            _message([row for rows in lines.values() for row in rows]),
            x_label="batch (sequences)",
            y_label="tokens per second",
            series=tuple(Series.of(name, rows, "batch", "tokens_per_second") for name, rows in lines.items()),
            caption=f"{bench.model}: {bench.tokens} new tokens for each prompt, greedy. Medians, bars from "
            "p20 to p80.",
            log_x=len({row["batch"] for rows in lines.values() for row in rows}) > 1,
        )
    ]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['moe_backend']}, fix {row['fix']}"


def _message(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which engine is fastest at the largest batch, if its spread does not reach the next one's."""
    batch = max(row["batch"] for row in rows)
    ranked = sorted(
        (row for row in rows if row["batch"] == batch), key=lambda row: float(row["tokens_per_second"])
    )
    best, rate = ranked[-1], "tokens_per_second"
    if len(ranked) == 1:
        return f"{_name(best)}: {best[rate]:.0f} tokens/s at batch {batch}"
    second = ranked[-2]
    if best.get(f"{rate}_p20", best[rate]) <= second.get(f"{rate}_p80", second[rate]):
        return f"{_name(best)} and {_name(second)} are equally fast at batch {batch}, within their spread"
    return (
        f"{_name(best)} is fastest at batch {batch}: {best[rate]:.0f} tokens/s, the next {second[rate]:.0f}"
    )
