"""`moedoctor bench --cache`: what it measured as a page and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Picture, Table
from moedoctor.reporters.text import list_figures

BOUND = "belady"
BOUND_NAME = "Belady (optimum)"

Figures = Mapping[str, Any]
Point = Mapping[str, Any]
"""One policy at one capacity, as `moedoctor.bench.cache.replay.ReplayPoint.to_figures` returns it."""


def summarize(figures: Figures) -> str:
    """Return the best causal policy at each capacity, beside the optimum."""
    best = []
    for capacity, points in _group_by_capacity(figures).items():
        rates = {name: point["hit_rate"] for name, point in points.items() if name != BOUND}
        if rates:
            policy = max(rates, key=lambda name: rates[name])
            bound = f" of at most {points[BOUND]['hit_rate']:.1%}" if _is_optimal(points) else ""
            best.append(f"{capacity} slots: {policy} {rates[policy]:.1%}{bound}")
    return "; ".join(best)


def list_reasons(figures: Figures) -> list[str]:
    """Return what would be wrong."""
    return [
        f"{point['policy']} with {point['capacity']} slots: {point['wrong_calls']} calls would compute with "
        "an expert that is not resident"
        for point in figures["points"]
        if point["wrong_calls"]
    ]


def list_blocks(figures: Figures, *, full: bool = False) -> list[Block]:
    """Return the hit rates with their picture. `full` adds how the trace was made."""
    page: list[Block] = [
        Paragraph(summarize(figures)),
        _make_table(figures),
        Paragraph(_describe_trace(figures)),
        Paragraph(f"Trace: {figures['trace']['source']}"),
        Bullets(list(_list_remarks(figures))),
        *map(Picture, list_charts(figures)),
    ]
    if full and (made := figures["trace"]["made"]):
        page += [Heading("How the trace was made"), Table(("fact", "value"), list(list_figures(made)))]
    return page


def _group_by_capacity(figures: Figures) -> dict[int, dict[str, Point]]:
    points: dict[int, dict[str, Point]] = {}
    for point in sorted(figures["points"], key=lambda point: point["capacity"]):
        points.setdefault(point["capacity"], {})[point["policy"]] = point
    return points


def _is_optimal(points: Mapping[str, Point]) -> bool:
    """Return True if Belady's hit rate is a bound: calls that overflow run in groups, of which it is none."""
    return BOUND in points and not points[BOUND]["overflowing_calls"]


def _make_table(figures: Figures) -> Table:
    """Return a row a capacity: hit rates, the bound last, then the experts that a token has to load."""
    policies = dict.fromkeys(point["policy"] for point in figures["points"])
    order = sorted(policies, key=lambda policy: policy == BOUND)
    names = [BOUND_NAME if policy == BOUND else policy for policy in order]
    loads_of = "loads a token, best to optimum" if BOUND in order else "loads a token, best"
    header = ["slots", "resident", *names, loads_of, "overflow"]
    rows = []
    for capacity, points in _group_by_capacity(figures).items():
        causal = [point["misses"] for name, point in points.items() if name != BOUND]
        counts = [min(causal)] if causal else []
        counts += [points[BOUND]["misses"]] if BOUND in points else []
        loads = " to ".join(f"{count / figures['trace']['tokens']:.1f}" for count in counts)
        first = next(iter(points.values()))
        overflow = first["overflowing_calls"]
        over = f"{overflow / first['layer_calls']:.0%} of calls" if overflow else "none"
        rates = [f"{points[name]['hit_rate']:.1%}" if name in points else "" for name in order]
        share = f"{min(1.0, capacity / figures['trace']['num_experts']):.0%}"
        rows.append([str(capacity), share, *rates, loads, over])
    return Table(header, rows, "r" * len(header))


def _describe_trace(figures: Figures) -> str:
    facts, batch = figures["trace"], f"batch {figures['batch']}" if figures["batch"] else "calls as recorded"
    scope = "one cache a layer" if figures["scope"] == "layer" else "one cache for all layers"
    return (
        f"{facts['model']} · {facts['layers']} layers x {facts['num_experts']} experts, "
        f"top-{facts['top_k']} · {facts['tokens']} tokens, {batch} · {scope}"
    )


def _list_remarks(figures: Figures) -> Iterator[str]:
    facts = figures["trace"]
    yield (
        f"A layer needs {facts['experts_a_call']:.1f} experts a call (most: {facts['most_experts_a_call']}); "
        f"{facts['reuse']:.0%} of them were needed by the call before; {facts['experts_for_90']:.0%} of the "
        "experts take 90 % of the accesses."
    )
    yield (
        "Hit rate: distinct experts of a call that were resident when it came. The unit is a call: it never "
        "evicts what it needs. Caches start empty."
    )
    if any(point["overflowing_calls"] for point in figures["points"]):
        yield (
            "Calls that need more experts than there are slots run in groups; for them Belady is no "
            "strict optimum."
        )
    if wrong := sum(point["wrong_calls"] for point in figures["points"]):
        yield f"WRONG: {wrong} calls would have computed with an expert that is not resident."


def list_charts(figures: Figures) -> list[Chart]:
    """Return the hit rate over the capacity, beside the optimum."""
    lines: dict[str, list[Point]] = {}
    for point in sorted(figures["points"], key=lambda point: int(point["capacity"])):
        lines.setdefault(point["policy"], []).append(point)
    rates = []
    for policy, points in lines.items():
        name = BOUND_NAME if policy == BOUND else policy
        line = Series.from_records(name, points, "capacity", "hit_rate")
        rates.append(replace(line, bound=policy == BOUND))
    caption = f"{_describe_trace(figures)}. A call is replayed as a whole, from empty caches."
    return [
        Chart(
            "hit_rate",
            _make_title(figures),
            series=tuple(rates),
            caption=caption,
            log_x=len({point["capacity"] for point in figures["points"]}) > 1,
            y_range=(0.0, 1.02),
            x_label="slots a layer",
            y_label="hit rate (share of the experts of a call)",
        )
    ]


def _make_title(figures: Figures) -> str:
    """Return which policy comes nearest to the optimum where not every expert fits, and how near."""
    shares: dict[str, list[float]] = {}
    for capacity, points in _group_by_capacity(figures).items():
        best = points[BOUND]["hit_rate"] if _is_optimal(points) else 0.0
        for name, point in points.items():
            if name != BOUND and best > 0 and capacity < figures["trace"]["num_experts"]:
                shares.setdefault(name, []).append(point["hit_rate"] / best)
    if not shares:
        return "Hit rate over capacity"
    name = max(shares, key=lambda name: min(shares[name]))
    reach = " to ".join(dict.fromkeys(f"{end(shares[name]):.0%}" for end in (min, max)))
    return f"{name} reaches {reach} of the optimum's hit rate"
