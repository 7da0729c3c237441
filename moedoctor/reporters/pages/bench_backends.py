"""`moedoctor bench --backend`: what it measured as a page and as pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moedoctor.reporters.chart import Chart
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Picture, Table
from moedoctor.reporters.pages.backend_charts import make_label, make_layer_charts
from moedoctor.reporters.text import UNSTEADY_REMARK, choose_unit, is_unsteady

Figures = Mapping[str, Any]


def summarize(figures: Figures) -> str:
    """Return how many points were timed, and what is wrong."""
    timed = sum("time_us" in row for row in figures["rows"])
    wrong = sum(bool(row.get("wrong")) for row in figures["rows"])
    untrusted = sum(_is_untrusted(row) for row in figures["rows"])
    failed = sum("failed" in row for row in figures["rows"]) - untrusted
    away = sum("unavailable" in row for row in figures["rows"])
    line = f"{timed} points timed, {wrong} wrong, {failed} failed, {away} not available"
    if unsteady := sum(map(_is_unsteady, figures["rows"])):
        line += f", {unsteady} with a spread that makes the time worthless"
    return f"{line}, {untrusted} by a comparison that is not to be trusted" if untrusted else line


def list_reasons(figures: Figures) -> list[str]:
    """Return a line for each point that is wrong or failed."""
    bad = (row for row in figures["rows"] if row.get("wrong") or "failed" in row)
    return list(dict.fromkeys(f"{row['model']}: {_describe_untimed(row)}" for row in bad))


def list_blocks(figures: Figures, *, full: bool = False) -> list[Block]:
    """Return a table and pictures for each layer; all kinds take `full`."""
    page: list[Block] = [Paragraph(f"{figures['device']} · {figures['routing']} routing")]
    for name, facts in figures["layers"].items():
        own = [row for row in figures["rows"] if row["model"] == name]
        page += [Heading(name), Paragraph(_describe_sizes(facts))]
        page += map(Picture, list_charts(figures, name))
        unit = choose_unit([float(row["time_us"]) for row in own if "time_us" in row])
        timed = [_format_cells(row, unit) for row in own if "time_us" in row]
        if timed:
            # A column that is empty on this machine is left out.
            header = [title for title in _COLUMNS if any(row[title] for row in timed)]
            rows = [[row[title] for title in header] for row in timed]
            header = [f"{title} ({unit[0]})" if title in _TIMES else title for title in header]
            page.append(Table(header, rows, "l" + "r" * (len(header) - 1)))
        page += _list_tiles(own, unit)
        if rest := list(dict.fromkeys(_describe_untimed(row) for row in own if "time_us" not in row)):
            page.append(Bullets(rest))
    if "tuned" in figures:
        written = [f"written: {name}; VLLM_TUNED_CONFIG_FOLDER names its folder" for name in figures["tuned"]]
        page.append(Bullets(written or ["no file is written: no tiles tried are 2 % faster than vLLM's"]))
    page.append(Bullets(list(_list_remarks(figures))))
    return page


def _list_tiles(rows: Sequence[Mapping[str, Any]], unit: tuple[str, float, int]) -> Iterator[Block]:
    """Yield the table of what vLLM's rule for tiles costs; nothing if nothing was tuned."""
    tuned = [row for row in rows if "tiles" in row]
    if not tuned:
        return
    name, size, decimals = unit
    cells = []
    for row in tuned:
        tiles, keys = row["tiles"], ("rule_us", "file_us", "found_us")
        times = [f"{tiles[key] / size:.{decimals}f}" if key in tiles else "none" for key in keys]
        ratios = [f"{tiles[key]:.2f}" if key in tiles else "" for key in ("file_ratio", "ratio")]
        found, rule = tiles["found"], tiles["rule"]
        changed = ", ".join(f"{key} {found[key]}" for key in found if rule.get(key) != found[key])
        sizes = (str(row["quantization"]), str(row["tokens"]))
        cells.append([*sizes, *times, *ratios, changed or "the rule's"])
    header = [
        "TRITON",
        "tokens",
        f"rule ({name})",
        "vLLM's file",
        "found",
        "file is",
        "found is",
        "tiles found",
    ]
    yield Table(header, cells, "lrrrrrrl")
    yield Paragraph(
        "file is, found is: times as fast as vLLM's rule for tiles, in turn with a cold L2 cache."
    )


def list_charts(figures: Figures, layer: str) -> list[Chart]:
    """Return the charts of one layer, latency first; none if nothing was timed, or tiles were tried."""
    sizes = _describe_sizes(figures["layers"][layer])
    caption = f"{sizes}; {figures['routing']} routing; {figures['device']}"
    rows = [row for row in figures["rows"] if row["model"] == layer and "time_us" in row]
    if any("tiles" in row for row in rows):
        return []
    return make_layer_charts(layer, rows, name=make_slug(layer), caption=caption)


def make_slug(name: str) -> str:
    """Return `name` as a part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)[:60] or "layer"


def _describe_sizes(facts: Mapping[str, Any]) -> str:
    return (
        f"hidden {facts['hidden']}, intermediate {facts['intermediate']}, {facts['experts']} experts, "
        f"top {facts['top_k']}, {facts['activation']}"
    )


_COLUMNS = {
    "backend": "{backend} {quantization}",
    "tokens": "{tokens}",
    "time": "{time_us}{mark}",
    "p20–p80": "{time_us_p20}–{time_us_p80}",
    "warm": "{warm_us}",
    "eager": "{eager_us}",
    "TFLOP/s": "{tflops:.3g}",
    "GB/s": "{gigabytes_per_second:.4g}",
    "roofline": "{roofline_share:.0%}",
    "moved": "{bytes}",
    "workspace": "{workspace_bytes}",
    "peak": "{peak_memory_bytes}",
    "experts": "{active_experts}",
    "cosine": "{cosine:.5f}{bits}",
    "controls": "{controls_noticed}",
}
_TIMES = ("time", "p20–p80", "warm", "eager")


def _format_cells(row: Mapping[str, Any], unit: tuple[str, float, int]) -> dict[str, str]:
    """Return the text of each column; it is empty if the row lacks a figure of it."""
    _, size, decimals = unit
    values = {
        name: _format_mebibytes(value) if name.endswith("bytes") else value
        for name, value in row.items()
        if value is not None
    }
    for name in ("time_us", "time_us_p20", "time_us_p80", "warm_us", "eager_us"):
        if name in values:
            values[name] = f"{row[name] / size:.{decimals}f}"
    values["mark"] = " !" if _is_unsteady(row) else ""
    values["bits"] = "" if row["deterministic"] else " *"
    cells = dict.fromkeys(_COLUMNS, "")
    for title, text in _COLUMNS.items():
        with contextlib.suppress(KeyError):
            cells[title] = text.format_map(values)
    return cells


def _is_unsteady(row: Mapping[str, Any]) -> bool:
    return "time_us" in row and is_unsteady(row["time_us"], row["time_us_p20"], row["time_us_p80"])


def _format_mebibytes(value: float) -> str:
    size = value / 2**20
    return f"{size:.1f} MiB" if size >= 1 or not size else f"{size:.2g} MiB"


def _is_untrusted(row: Mapping[str, Any]) -> bool:
    """Return whether the comparison missed planted faults: then it says nothing about the backend."""
    return "failed" in row and bool(row.get("controls_missed"))


def _describe_untimed(row: Mapping[str, Any]) -> str:
    where = f"{make_label(row)}, {row['tokens']} tokens" if "tokens" in row else make_label(row)
    if "unavailable" in row:
        return f"{where}: not available: {row['unavailable']}"
    if _is_untrusted(row):
        return f"{where}: NOT TRUSTED, so not timed: {row['failed']}"
    if "failed" in row:
        return f"{where}: FAILED: {row['failed']}"
    return f"{where}: WRONG, so not timed: {row['wrong']}"


def _list_remarks(figures: Figures) -> Iterator[str]:
    how = sorted({str(row["timed"]) for row in figures["rows"] if "timed" in row})
    if how:
        columns = ""
        if any("warm_us" in row for row in figures["rows"]):
            columns = "; warm: the same without overwriting the L2 cache; eager: launched from Python"
        yield (
            f"time: median of a call ({', '.join(how)}){columns}. Moved: the bytes of the experts that were "
            "chosen, the input and the output; GB/s and roofline are computed from them."
        )
    if any(map(_is_unsteady, figures["rows"])):
        yield UNSTEADY_REMARK
    if any("peak_memory_bytes" in row for row in figures["rows"]):
        yield "peak: the GPU memory of a call, with the layer's weights and its input."
    if any("controls_noticed" in row for row in figures["rows"]):
        where = ""  # older reports planted none in large layers
        if any("controls_missed" in row for row in figures["rows"]):
            where = "; those in weights and scales in a layer of few experts if the backend takes one"
        yield f"controls: how many of the planted faults the comparison noticed{where}."
    roofline = figures["roofline"]
    flops = ", ".join(f"{value / 1e12:.3g} TFLOP/s {name}" for name, value in roofline["flops"].items())
    yield f"Roofline, measured here: {roofline['bytes_per_second'] / 1e9:.4g} GB/s, {flops}."
    if "graph_overhead" in figures["harness"]:
        yield _describe_harness(figures["harness"])
    if any(row.get("deterministic") is False for row in figures["rows"]):
        yield "* the bits differ from call to call."


def _describe_harness(cost: Mapping[str, Any]) -> str:
    """Return what the harness adds; reports without ``launch_us`` compare it with do_bench."""
    alone = cost["kernel_us"] if "launch_us" in cost else None
    ours = ", ".join(
        f"{cost[name]:.2f} µs {state} ({cost[overhead]:+.1%}"
        + (f"; {cost[name] / alone - 1:+.1%} of the kernel alone)" if alone else ")")
        for name, overhead, state in (
            ("graph_us", "graph_overhead", "warm"),
            ("graph_cold_us", "graph_cold_overhead", "cold"),
        )
    )
    theirs = f"triton.testing.do_bench measures {cost['do_bench_us']:.2f} µs"
    if "launch_us" not in cost:
        return f"The harness on a kernel that waits: {ours}; {theirs}."
    return (
        f"The harness on a kernel of {cost['kernel_us']:.2f} µs by the GPU's own clock, "
        f"{cost['launch_us']:.2f} µs with what the GPU puts between two kernels of a graph: {ours}, "
        f"{'within' if cost['within_limit'] else 'NOT within'} 2 % of kernel and gap; {theirs} "
        f"({cost['do_bench_overhead']:+.1%})."
    )
