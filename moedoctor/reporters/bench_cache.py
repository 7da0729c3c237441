"""`moedoctor bench --cache` as a table, JSON or Markdown, and its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.bench.cache.replay import ReplayPoint
from moedoctor.reporters.bench_cache_json import CacheBench, to_dict
from moedoctor.reporters.evidence_rows import EvidenceTable, evidence_tables, lines
from moedoctor.reporters.markdown import escape
from moedoctor.reporters.plots import Series, line_chart
from moedoctor.reporters.terminal_plots import terminal_chart
from moedoctor.reporters.text import figures, one_line

FORMATS = ("table", "json", "markdown")
BOUND = "belady"
BOUND_NAME = "Belady (optimum)"


def render(bench: CacheBench, format: str, *, pictures: Sequence[str] = (), width: int | None = None) -> str:
    """The report in one of `FORMATS`. `pictures` are the files that lie beside a Markdown report; with a
    `width`, in columns, the table is followed by charts for the terminal, in colour.
    """
    if format == "json":
        return json.dumps(to_dict(bench), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    text = _markdown(bench, pictures) if format == "markdown" else _table(bench)
    charts = [] if width is None or format != "table" else list(_terminal(bench, width))
    return "\n".join([*text, *charts]) + "\n"


def write_pictures(bench: CacheBench, beside: Path) -> list[str]:
    """Draw the SVG files of the Markdown report `beside` next to it; their names.

    Raises PlotError where matplotlib is missing, OutputError where a file cannot be written.
    """
    names = []
    for suffix, chart in _charts(bench).items():
        path = beside.with_name(f"{beside.stem}_{suffix}.svg")
        line_chart(path, **chart)
        names.append(path.name)
    return names


def summary_line(bench: CacheBench) -> str:
    """The best causal policy at each capacity, between the least that lru has and the optimum."""
    by_capacity = _by_capacity(bench)
    said = []
    for capacity, row in by_capacity.items():
        causal = {name: point for name, point in row.items() if name != BOUND}
        if not causal:
            continue
        best = max(causal, key=lambda name: causal[name].hit_rate)
        bound = f" of at most {row[BOUND].hit_rate:.1%}" if BOUND in row else ""
        said.append(f"{capacity} slots: {best} {causal[best].hit_rate:.1%}{bound}")
    return "; ".join(said)


def _by_capacity(bench: CacheBench) -> dict[int, dict[str, ReplayPoint]]:
    found: dict[int, dict[str, ReplayPoint]] = {}
    for one in sorted(bench.points, key=lambda point: point.capacity):
        found.setdefault(one.capacity, {})[one.policy] = one
    return found


def _grid(bench: CacheBench) -> tuple[list[str], list[list[str]]]:
    """(header, rows): hit rates, the bound last, then what a token has to load."""
    policies = list(dict.fromkeys(one.policy for one in bench.points))
    order = [one for one in policies if one != BOUND] + [one for one in policies if one == BOUND]
    header = ["slots", "resident", *(BOUND_NAME if one == BOUND else one for one in order)]
    header += ["loads a token, best to optimum" if BOUND in order else "loads a token, best", "overflow"]
    rows = []
    for capacity, row in _by_capacity(bench).items():
        causal = [one.stats.misses for name, one in row.items() if name != BOUND]
        counts = [min(causal)] if causal else []
        counts += [row[BOUND].stats.misses] if BOUND in row else []
        loads = " to ".join(f"{count / bench.facts.tokens:.1f}" for count in counts)
        first = next(iter(row.values()))
        over = f"{first.overflowing / first.stats.calls:.0%} of calls" if first.overflowing else "none"
        rates = [f"{row[name].hit_rate:.1%}" if name in row else "" for name in order]
        share = f"{min(1.0, capacity / bench.facts.num_experts):.0%}"
        rows.append([str(capacity), share, *rates, loads, over])
    return header, rows


def _heading(bench: CacheBench) -> str:
    facts, batch = bench.facts, f"batch {bench.batch}" if bench.batch else "calls as recorded"
    scope = "one cache a layer" if bench.scope == "layer" else "one cache for all layers"
    return (
        f"{one_line(facts.model)} · {facts.layers} layers x {facts.num_experts} experts, top-{facts.top_k} · "
        f"{facts.tokens} tokens, {batch} · {scope}"
    )


def _remarks(bench: CacheBench) -> Iterator[str]:
    facts = bench.facts
    yield (
        f"A layer needs {facts.experts_a_call:.1f} experts a call (most: {facts.most_experts_a_call}); "
        f"{facts.reuse:.0%} of them were needed by the call before; {facts.experts_for_90:.0%} of the "
        "experts take 90 % of the accesses."
    )
    yield (
        "Hit rate: distinct experts of a call that were resident when it came. The unit is a call: it never "
        "evicts what it needs. Caches start empty."
    )
    if any(one.overflowing for one in bench.points):
        yield (
            "Calls that need more experts than there are slots run in groups; there the last column is no "
            "strict optimum."
        )
    if wrong := sum(one.stats.wrong for one in bench.points):
        yield f"WRONG: {wrong} calls would have computed with an expert that is not resident."
    if bench.speed_note:
        yield bench.speed_note


def _table(bench: CacheBench) -> Iterator[str]:
    header, rows = _grid(bench)
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    yield f"expert cache: {_heading(bench)}"
    yield f"trace: {one_line(bench.trace)}"
    yield ""
    for row in (header, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield ""
    yield from _remarks(bench)
    for table in _speed_tables(bench):
        yield from ("", f"{table.name}:")
        yield from lines(table)


def _markdown(bench: CacheBench, pictures: Sequence[str]) -> Iterator[str]:
    header, rows = _grid(bench)
    yield f"# moedoctor {escape(moedoctor.__version__)}: bench --cache"
    yield ""
    yield escape(_heading(bench))
    yield ""
    yield f"Trace: {escape(bench.trace)}"
    yield ""
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(escape(cell) if cell != '---' else cell for cell in row)} |"
    yield ""
    for remark in _remarks(bench):
        yield from (escape(remark), "")
    for name in pictures:
        yield from (f"![{escape(name.removesuffix('.svg').replace('_', ' '))}]({name})", "")
    for table in _speed_tables(bench):
        yield from (f"## {table.name.capitalize()}", "")
        for row in (list(table.header), ["---"] * len(table.header), *map(list, table.rows)):
            yield f"| {' | '.join(escape(cell) if cell != '---' else cell for cell in row)} |"
        yield ""
    if bench.made:
        yield from ("## How the trace was made", "", "| fact | value |", "|---|---|")
        yield from (f"| {escape(name)} | {escape(text)} |" for name, text in figures(bench.made))
        yield ""
    yield from ("## Environment", "", "| fact | value |", "|---|---|")
    yield from (f"| {escape(name)} | {escape(text)} |" for name, text in figures(bench.environment))


def _speed_tables(bench: CacheBench) -> tuple[EvidenceTable, ...]:
    return evidence_tables({"limits": list(bench.limits), "decode": list(bench.speed), **bench.measured})


def _terminal(bench: CacheBench, width: int) -> Iterator[str]:
    for chart in _charts(bench).values():
        known = ("title", "x_label", "y_label", "series", "log_x", "log_y")
        keep = {key: chart[key] for key in known if key in chart}
        yield ""
        yield terminal_chart(**keep, width=min(width, 100))


def _charts(bench: CacheBench) -> dict[str, dict[str, Any]]:
    """Suffix of the file -> what `line_chart` draws."""
    capacities = sorted({one.capacity for one in bench.points})
    note = f"{_heading(bench)}. Event-atomic replay from empty caches."
    charts: dict[str, dict[str, Any]] = {
        "hit_rate": {
            "title": "Hit rate over capacity",
            "x_label": "slots a layer",
            "y_label": "hit rate",
            "series": [
                Series(
                    BOUND_NAME if policy == BOUND else policy,
                    [one.capacity for one in bench.points if one.policy == policy],
                    [one.hit_rate for one in bench.points if one.policy == policy],
                    bound=policy == BOUND,
                )
                for policy in dict.fromkeys(one.policy for one in bench.points)
            ],
            "log_x": len(capacities) > 1,
            "note": note,
            "y_range": (0.0, 1.0),
        }
    }
    timed = [row for row in bench.speed if "tokens_per_second" in row]
    if timed:
        charts["tokens_per_second"] = {
            "title": "Tokens per second over capacity",
            "x_label": "slots a layer",
            "y_label": "tokens per second",
            "series": [
                _speed_series(str(subject), [row for row in timed if row["subject"] == subject])
                for subject in dict.fromkeys(row["subject"] for row in timed)
            ],
            "log_x": len({row["capacity"] for row in timed}) > 1,
            "log_y": True,
            "note": bench.speed_note or None,
        }
    return charts


def _speed_series(subject: str, rows: Sequence[Mapping[str, Any]]) -> Series:
    spread = all("tokens_per_second_p20" in row and "tokens_per_second_p80" in row for row in rows)
    return Series(
        subject,
        [row["capacity"] for row in rows],
        [row["tokens_per_second"] for row in rows],
        low=[row["tokens_per_second_p20"] for row in rows] if spread else (),
        high=[row["tokens_per_second_p80"] for row in rows] if spread else (),
    )
