"""`moedoctor bench --backend` as a table, JSON or Markdown, and its plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import moedoctor
from moedoctor.reporters.bench_backends_json import BackendBench, to_dict
from moedoctor.reporters.markdown import escape
from moedoctor.reporters.plots import Series, line_chart
from moedoctor.reporters.text import figures, one_line

FORMATS = ("table", "json", "markdown")
_HEADER = (
    "backend",
    "tokens",
    "µs",
    "p20–p80",
    "warm",
    "eager",
    "TFLOP/s",
    "GB/s",
    "roofline",
    "moved",
    "workspace",
    "peak",
    "experts",
    "cosine",
    "controls",
)


def render(bench: BackendBench, format: str, *, pictures: Sequence[str] = ()) -> str:
    """The report in one of `FORMATS`; `pictures` are the files that lie beside a Markdown report."""
    if format == "json":
        return json.dumps(to_dict(bench), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    lines = _markdown(bench, pictures) if format == "markdown" else _table(bench)
    return "\n".join(lines) + "\n"


def summary_line(bench: BackendBench) -> str:
    """How many points were timed, and what is wrong."""
    timed = sum("time_us" in row for row in bench.rows)
    wrong = sum(bool(row.get("wrong")) for row in bench.rows)
    untrusted = sum(_is_untrusted(row) for row in bench.rows)
    failed = sum("failed" in row for row in bench.rows) - untrusted
    away = sum("unavailable" in row for row in bench.rows)
    line = f"{timed} points timed, {wrong} wrong, {failed} failed, {away} not available"
    return f"{line}, {untrusted} by a comparison that is not to be trusted" if untrusted else line


def draw(bench: BackendBench, layer: str, path: Path) -> None:
    """The latency of one layer over the number of tokens, a line for each backend, as SVG.

    Raises PlotError where matplotlib is missing or nothing was timed.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in bench.rows:
        # A time of nothing, which noise can make of a very short call, has no place on this axis.
        if row["model"] == layer and "time_us" in row and row["time_us_p20"] > 0:
            lines.setdefault(_label(row), []).append(row)
    series = [
        Series(
            label,
            [row["tokens"] for row in rows],
            [row["time_us"] for row in rows],
            low=[row["time_us_p20"] for row in rows],
            high=[row["time_us_p80"] for row in rows],
        )
        for label, rows in lines.items()
    ]
    if not series:
        return
    line_chart(
        path,
        title=f"One MoE layer of {layer}",
        x_label="tokens",
        y_label="microseconds a call",
        series=series,
        log_x=len({row["tokens"] for rows in lines.values() for row in rows}) > 1,
        log_y=True,
        note=f"{_sizes(bench.layers[layer])}; {bench.routing} routing; {bench.device}. Results that were "
        "wrong are not timed.",
    )


def drawable(bench: BackendBench) -> list[str]:
    """The layers of which something was timed."""
    return [name for name in bench.layers if any(r["model"] == name and "time_us" in r for r in bench.rows)]


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['backend']} {row['quantization']}"


def _sizes(facts: Mapping[str, Any]) -> str:
    return (
        f"hidden {facts['hidden']}, intermediate {facts['intermediate']}, {facts['experts']} experts, "
        f"top {facts['top_k']}, {facts['activation']}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    spread = f"{row['time_us_p20']:.1f}–{row['time_us_p80']:.1f}"
    return [
        _label(row),
        str(row["tokens"]),
        f"{row['time_us']:.1f}",
        spread,
        f"{row['warm_us']:.1f}" if "warm_us" in row else "",
        f"{row['eager_us']:.1f}" if "eager_us" in row else "",
        f"{row['tflops']:.3g}",
        f"{row['gigabytes_per_second']:.4g}",
        f"{row['roofline_share']:.0%}",
        *(_mebibytes(row.get(name)) for name in ("bytes", "workspace_bytes", "peak_memory_bytes")),
        str(row["active_experts"]),
        f"{row['cosine']:.5f}" + ("" if row["deterministic"] else " *"),
        row.get("controls_noticed", ""),
    ]


def _mebibytes(value: float | None) -> str:
    if value is None:
        return ""
    size = value / 2**20
    return f"{size:.1f} MiB" if size >= 1 or not size else f"{size:.2g} MiB"


def _is_untrusted(row: Mapping[str, Any]) -> bool:
    """Whether faults were planted that the comparison did not notice: it says nothing of the backend."""
    return "failed" in row and bool(row.get("controls_missed"))


def _without_empty_columns(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Header and rows, without the columns that hold nothing on this machine."""
    used = [column for column in range(len(_HEADER)) if any(row[column] for row in cells)]
    return [[row[column] for column in used] for row in (_HEADER, *cells)]


def _sections(bench: BackendBench) -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """(layer, cells of what was timed, what was not and why)."""
    for name in bench.layers:
        own = [row for row in bench.rows if row["model"] == name]
        timed = [_cells(row) for row in own if "time_us" in row]
        yield name, timed, list(dict.fromkeys(_not_timed(row) for row in own if "time_us" not in row))


def _not_timed(row: Mapping[str, Any]) -> str:
    where = f"{_label(row)}, {row['tokens']} tokens" if "tokens" in row else _label(row)
    if "unavailable" in row:
        return f"{where}: not available: {one_line(str(row['unavailable']))}"
    if _is_untrusted(row):
        return f"{where}: NOT TRUSTED, so not timed: {one_line(str(row['failed']))}"
    if "failed" in row:
        return f"{where}: FAILED: {one_line(str(row['failed']))}"
    return f"{where}: WRONG, so not timed: {one_line(str(row['wrong']))}"


def _remarks(bench: BackendBench) -> Iterator[str]:
    how = sorted({str(row["timed"]) for row in bench.rows if "timed" in row})
    if how:
        columns = ""
        if any("warm_us" in row for row in bench.rows):
            columns = "; warm: the same without overwriting the L2 cache; eager: launched from Python"
        yield (
            f"µs: median a call ({', '.join(how)}){columns}. Moved: the bytes of the experts that were "
            "chosen, the input and the output; GB/s and roofline go by them."
        )
    if any("peak_memory_bytes" in row for row in bench.rows):
        yield "peak: the GPU memory of a call, with the layer's weights and its input."
    if any("controls_noticed" in row for row in bench.rows):
        where = ""
        if any("controls_missed" in row for row in bench.rows):  # before, a large layer had none in weights
            where = "; those in weights and scales in a layer of few experts where the backend takes one"
        yield f"controls: how many of the planted faults the comparison noticed{where}."
    roofline = bench.roofline
    flops = ", ".join(f"{value / 1e12:.3g} TFLOP/s {name}" for name, value in roofline["flops"].items())
    yield f"Roofline, measured here: {roofline['bytes_per_second'] / 1e9:.4g} GB/s, {flops}."
    if "graph_overhead" in bench.harness:
        yield _harness(bench.harness)
    if any(row.get("deterministic") is False for row in bench.rows):
        yield "* not the same bits in every call."


def _harness(cost: Mapping[str, Any]) -> str:
    """What the harness adds; reports without ``launch_us`` measured that against do_bench."""
    alone = cost["kernel_us"] if "launch_us" in cost else None
    ours = ", ".join(
        f"{cost[name]:.2f} µs {state} ({cost[overhead]:+.1%}"
        + (f"; {cost[name] / alone - 1:+.1%} of the kernel alone)" if alone else ")")
        for name, overhead, state in (
            ("graph_us", "graph_overhead", "warm"),
            ("graph_cold_us", "graph_cold_overhead", "cold"),
        )
    )
    theirs = f"triton.testing.do_bench says {cost['do_bench_us']:.2f} µs"
    if "launch_us" not in cost:
        return f"The harness on a kernel that waits: {ours}, where {theirs}."
    return (
        f"The harness on a kernel of {cost['kernel_us']:.2f} µs by the GPU's own clock, "
        f"{cost['launch_us']:.2f} µs with what the GPU puts between two kernels of a graph: {ours}, "
        f"{'within' if cost['within_limit'] else 'NOT within'} 2 % of kernel and gap; {theirs} "
        f"({cost['do_bench_overhead']:+.1%})."
    )


def _heading(bench: BackendBench) -> str:
    return f"{one_line(bench.device)} · {one_line(bench.routing)} routing"


def _table(bench: BackendBench) -> Iterator[str]:
    yield f"MoE backends: {_heading(bench)}"
    for name, cells, rest in _sections(bench):
        yield ""
        yield f"{one_line(name)}: {_sizes(bench.layers[name])}"
        if cells:
            grid = _without_empty_columns(cells)
            widths = [max(len(row[column]) for row in grid) for column in range(len(grid[0]))]
            for row in grid:
                first, *others = (
                    cell.ljust(width) if column == 0 else cell.rjust(width)
                    for column, (cell, width) in enumerate(zip(row, widths, strict=True))
                )
                yield "  ".join((first, *others)).rstrip()
        yield from rest
    yield ""
    yield from _remarks(bench)


def _markdown(bench: BackendBench, pictures: Sequence[str]) -> Iterator[str]:
    yield f"# moedoctor {escape(moedoctor.__version__)}: bench --backend"
    yield ""
    yield escape(_heading(bench))
    for name, cells, rest in _sections(bench):
        yield from ("", f"## {escape(name)}", "", escape(_sizes(bench.layers[name])), "")
        if cells:
            header, *body = _without_empty_columns(cells)
            yield f"| {' | '.join(header)} |"
            yield f"|{'---|' * len(header)}"
            yield from (f"| {' | '.join(escape(cell) for cell in row)} |" for row in body)
        yield from ("", *(f"- {escape(one)}" for one in rest))
        for picture in pictures:
            if picture.endswith(f"_{slug(name)}.svg"):
                yield from ("", f"![latency of {escape(name)}]({picture})")
    yield ""
    for remark in _remarks(bench):
        yield from (escape(remark), "")
    yield from ("## Environment", "", "| fact | value |", "|---|---|")
    yield from (f"| {escape(name)} | {escape(text)} |" for name, text in figures(bench.environment))


def slug(name: str) -> str:
    """`name` as a part of a file's name."""
    return "".join(one if one.isalnum() or one in ".-" else "-" for one in name)[:60] or "layer"
