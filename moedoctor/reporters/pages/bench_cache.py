"""`moedoctor bench --cache`: what it measured as a record, as JSON, as a page and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moedoctor.bench.cache.replay import ReplayPoint, TraceFacts
from moedoctor.reporters.chart import Chart, Series
from moedoctor.reporters.page import Block, Bullets, Heading, Paragraph, Picture, Table
from moedoctor.reporters.text import list_figures
from moedoctor.results import from_json

BOUND = "belady"
BOUND_NAME = "Belady (optimum)"


@dataclass(frozen=True)
class CacheBench:
    """Everything that `moedoctor bench --cache` measured."""

    trace: str
    """The file, or what a synthetic trace was made of."""
    facts: TraceFacts
    made: Mapping[str, Any]
    """How the trace was made."""
    scope: str
    batch: int | None
    """Sequences side by side; None for the trace's own calls."""
    points: tuple[ReplayPoint, ...]
    environment: Mapping[str, Any]
    exit_code: int = 0
    origin: Mapping[str, Any] | None = None
    """Where the report comes from, as `moedoctor.origin.Origin`; None in reports of older releases."""


def make_figures(bench: CacheBench) -> dict[str, Any]:
    """Return the figures as JSON has them."""
    points = [
        {
            "policy": point.policy,
            "capacity": point.capacity,
            "share_resident": point.capacity / bench.facts.num_experts,
            "hit_rate": point.hit_rate,
            "hits": point.stats.hits,
            "misses": point.stats.misses,
            "wrong_calls": point.stats.wrong,
            "overflowing_calls": point.overflowing,
            "layer_calls": point.stats.calls,
            "misses_per_token": point.stats.misses / bench.facts.tokens,
            "hit_rate_by_layer": point.hit_rate_by_layer,
        }
        for point in bench.points
    ]
    return {
        "trace": {"source": bench.trace, **asdict(bench.facts), "made": bench.made},
        "scope": bench.scope,
        "batch": bench.batch,
        "replay_unit": "call",
        "points": points,
    }


def read_figures(figures: Any, common: Mapping[str, Any]) -> CacheBench:
    """Return the record of `figures` with the fields that all kinds have. Raises ReportError, KeyError."""
    points = [
        {
            **point,
            "stats": {
                "calls": point["layer_calls"],
                "hits": point["hits"],
                "misses": point["misses"],
                "wrong": point["wrong_calls"],
            },
            "overflowing": point["overflowing_calls"],
        }
        for point in figures["points"]
    ]
    trace = figures["trace"]
    record = {"trace": trace["source"], "facts": trace, "made": trace["made"], "points": points}
    return from_json(CacheBench, {**figures, **record, **common})


def summarize(bench: CacheBench) -> str:
    """Return the best causal policy at each capacity, beside the optimum."""
    best = []
    for capacity, points in _group_by_capacity(bench).items():
        rates = {name: point.hit_rate for name, point in points.items() if name != BOUND}
        if rates:
            policy = max(rates, key=lambda name: rates[name])
            bound = f" of at most {points[BOUND].hit_rate:.1%}" if _is_optimal(points) else ""
            best.append(f"{capacity} slots: {policy} {rates[policy]:.1%}{bound}")
    return "; ".join(best)


def list_reasons(bench: CacheBench) -> list[str]:
    """Return what would be wrong."""
    return [
        f"{point.policy} with {point.capacity} slots: {point.stats.wrong} calls would compute with an expert "
        "that is not resident"
        for point in bench.points
        if point.stats.wrong
    ]


def list_blocks(bench: CacheBench, *, full: bool = False) -> list[Block]:
    """Return the hit rates with their picture. `full` adds how the trace was made."""
    page: list[Block] = [
        Paragraph(summarize(bench)),
        _make_table(bench),
        Paragraph(_describe_trace(bench)),
        Paragraph(f"Trace: {bench.trace}"),
        Bullets(list(_list_remarks(bench))),
        *(Picture("", chart.title, chart) for chart in list_charts(bench)),
    ]
    if full and bench.made:
        page += [Heading("How the trace was made"), Table(("fact", "value"), list(list_figures(bench.made)))]
    return page


def _group_by_capacity(bench: CacheBench) -> dict[int, dict[str, ReplayPoint]]:
    points: dict[int, dict[str, ReplayPoint]] = {}
    for point in sorted(bench.points, key=lambda point: point.capacity):
        points.setdefault(point.capacity, {})[point.policy] = point
    return points


def _is_optimal(points: Mapping[str, ReplayPoint]) -> bool:
    """Return True if Belady's hit rate is a bound: calls that overflow run in groups, of which it is none."""
    return BOUND in points and not points[BOUND].overflowing


def _make_table(bench: CacheBench) -> Table:
    """Return a row a capacity: hit rates, the bound last, then the experts that a token has to load."""
    policies = dict.fromkeys(point.policy for point in bench.points)
    order = sorted(policies, key=lambda policy: policy == BOUND)
    names = [BOUND_NAME if policy == BOUND else policy for policy in order]
    loads_of = "loads a token, best to optimum" if BOUND in order else "loads a token, best"
    header = ["slots", "resident", *names, loads_of, "overflow"]
    rows = []
    for capacity, points in _group_by_capacity(bench).items():
        causal = [point.stats.misses for name, point in points.items() if name != BOUND]
        counts = [min(causal)] if causal else []
        counts += [points[BOUND].stats.misses] if BOUND in points else []
        loads = " to ".join(f"{count / bench.facts.tokens:.1f}" for count in counts)
        first = next(iter(points.values()))
        over = f"{first.overflowing / first.stats.calls:.0%} of calls" if first.overflowing else "none"
        rates = [f"{points[name].hit_rate:.1%}" if name in points else "" for name in order]
        share = f"{min(1.0, capacity / bench.facts.num_experts):.0%}"
        rows.append([str(capacity), share, *rates, loads, over])
    return Table(header, rows, "r" * len(header))


def _describe_trace(bench: CacheBench) -> str:
    facts, batch = bench.facts, f"batch {bench.batch}" if bench.batch else "calls as recorded"
    scope = "one cache a layer" if bench.scope == "layer" else "one cache for all layers"
    return (
        f"{facts.model} · {facts.layers} layers x {facts.num_experts} experts, top-{facts.top_k} · "
        f"{facts.tokens} tokens, {batch} · {scope}"
    )


def _list_remarks(bench: CacheBench) -> Iterator[str]:
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
    if any(point.overflowing for point in bench.points):
        yield (
            "Calls that need more experts than there are slots run in groups; for them Belady is no "
            "strict optimum."
        )
    if wrong := sum(point.stats.wrong for point in bench.points):
        yield f"WRONG: {wrong} calls would have computed with an expert that is not resident."


def list_charts(bench: CacheBench) -> list[Chart]:
    """Return the hit rate over the capacity, beside the optimum."""
    log_x = len({point.capacity for point in bench.points}) > 1
    rates = [
        Series(
            BOUND_NAME if policy == BOUND else policy,
            [point.capacity for point in points],
            [point.hit_rate for point in points],
            bound=policy == BOUND,
        )
        for policy in dict.fromkeys(point.policy for point in bench.points)
        if (points := sorted(_select_policy(bench, policy), key=lambda point: point.capacity))
    ]
    caption = f"{_describe_trace(bench)}. A call is replayed as a whole, from empty caches."
    return [
        Chart(
            "hit_rate",
            _make_title(bench),
            series=tuple(rates),
            caption=caption,
            log_x=log_x,
            y_range=(0.0, 1.02),
            x_label="slots a layer",
            y_label="hit rate (share of the experts of a call)",
        )
    ]


def _select_policy(bench: CacheBench, policy: str) -> list[ReplayPoint]:
    return [point for point in bench.points if point.policy == policy]


def _make_title(bench: CacheBench) -> str:
    """Return which policy comes nearest to the optimum where not every expert fits, and how near."""
    shares: dict[str, list[float]] = {}
    for capacity, points in _group_by_capacity(bench).items():
        best = points[BOUND].hit_rate if _is_optimal(points) else 0.0
        for name, point in points.items():
            if name != BOUND and best > 0 and capacity < bench.facts.num_experts:
                shares.setdefault(name, []).append(point.hit_rate / best)
    if not shares:
        return "Hit rate over capacity"
    name = max(shares, key=lambda name: min(shares[name]))
    reach = " to ".join(dict.fromkeys(f"{end(shares[name]):.0%}" for end in (min, max)))
    return f"{name} reaches {reach} of the optimum's hit rate"
