"""The picture of `moedoctor bench --backend`: latency against the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.reporters.chart import Chart, Series, describe_spans
from moedoctor.reporters.text import choose_unit

Row = Mapping[str, Any]

_NO_RIVALS = ("OURS", "REFERENCE", "EMULATION")
"""Backends that ours is not compared with: a reference and a stand-in are slow by design."""


def make_layer_charts(layer: str, rows: Sequence[Row], *, name: str, caption: str) -> list[Chart]:
    """Return the chart of one layer; none if nothing was timed.

    `rows` are those of the layer, `name` is the first part of the names of the charts, and `caption` names
    the layer's sizes, the routing and the device.
    """
    lines: dict[str, list[Row]] = {}
    # Noise can make 0 of a very short call, and 0 has no place on a logarithmic axis.
    for row in sorted(rows, key=lambda row: int(row.get("tokens", 0))):
        if row.get("time_us_p20", 0) > 0:
            lines.setdefault(make_label(row), []).append(row)
    if not lines:
        return []
    unit, size, _ = choose_unit([float(row["time_us"]) for each in lines.values() for row in each])
    log_x = len({row["tokens"] for each in lines.values() for row in each}) > 1
    what = f"One MoE layer of {layer}: {caption}."
    spread = "Median of a call, bars from p20 to p80."
    title, *also = write_messages(layer, rows)
    latency = Chart(
        name,
        title,
        also=tuple(also),
        y_label=f"time of a call ({unit})",
        series=(
            *(Series.from_records(key, each, "tokens", "time_us", size) for key, each in lines.items()),
            *_limit(lines, size),
        ),
        caption=f"{what} {spread} The limit is what the measured bandwidth and arithmetic allow.",
        x_label="tokens",
        log_x=log_x,
        log_y=True,
    )
    return [latency]


def make_label(row: Row) -> str:
    """Return the backend with its quantization."""
    return f"{row['backend']} {row['quantization']}"


def write_messages(layer: str, rows: Sequence[Row]) -> list[str]:
    """Return what the times of a layer say: where ours is faster, else which backend is fastest.

    The first message is about the first quantization, each other one about another. A time is shorter if its
    p80 is below the p20 of the other.
    """
    timed = [row for row in rows if row.get("time_us_p20", 0) > 0]
    kinds = dict.fromkeys(row["quantization"] for row in timed if row["backend"] == "OURS")
    parts = [part for part in (_compare_ours(kind, timed) for kind in kinds) if part]
    if parts:
        return [f"{layer}: {part}" for part in parts]
    fastest = {}
    for tokens in {row["tokens"] for row in timed}:
        ordered = sorted((row for row in timed if row["tokens"] == tokens), key=lambda row: row["time_us"])
        if len(ordered) == 1 or ordered[0]["time_us_p80"] < ordered[1]["time_us_p20"]:
            fastest[tokens] = make_label(ordered[0])
    names = set(fastest.values())
    counts = sorted({row["tokens"] for row in timed})
    if len(names) == 1 and len({make_label(row) for row in timed}) > 1:
        return [f"{layer}: {names.pop()} is fastest {describe_spans(counts, list(fastest))}"]
    return [f"{layer}: time of a call over the number of tokens"]


def _compare_ours(quantization: str, rows: Sequence[Row]) -> str:
    """Return where ours is faster than all others of a quantization, and where not; empty without another."""
    own = {row["tokens"]: row for row in rows if make_label(row) == f"OURS {quantization}"}
    rivals = [row for row in rows if row["quantization"] == quantization and row["backend"] not in _NO_RIVALS]
    counts = sorted(own.keys() & {row["tokens"] for row in rivals})
    if not counts:
        return ""
    names = list(dict.fromkeys(row["backend"] for row in rivals))
    others = names[0] if len(names) == 1 else "every other backend"
    wins, losses = [], []
    for tokens in counts:
        beside = [row for row in rivals if row["tokens"] == tokens]
        if all(own[tokens]["time_us_p80"] < row["time_us_p20"] for row in beside):
            wins.append(tokens)
        elif any(row["time_us_p80"] < own[tokens]["time_us_p20"] for row in beside):
            losses.append(tokens)
    winner = others if len(names) == 1 else "another backend"
    parts = [f"OURS beats {others} {describe_spans(counts, wins)}"] if wins else []
    parts += [f"{winner} beats OURS {describe_spans(counts, losses)}"] if losses else []
    if parts:
        return f"{', '.join(parts)} ({quantization})"
    return f"OURS is as fast as {others} within the spread ({quantization})"


def _limit(lines: Mapping[str, Sequence[Row]], size: float) -> list[Series]:
    """Return the shortest time that the machine's limits allow, a line for each quantization."""
    limits: dict[str, dict[int, float]] = {}
    for rows in lines.values():
        for row in rows:
            if row["roofline_share"] > 0:
                times = limits.setdefault(row["quantization"], {})
                times[row["tokens"]] = row["time_us"] * row["roofline_share"] / size
    return [Series(f"limit {key}", list(row), list(row.values()), bound=True) for key, row in limits.items()]
