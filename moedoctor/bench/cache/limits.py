"""What the expert cache is meant to reach, compared with what was measured: confirmed or refuted.

Every claim is about medians of rounds in turn. A claim whose figure was not measured is untested, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moedoctor.bench.cache.speed import PR, RESIDENT, UNCACHED, VARIANTS, Variant
from moedoctor.results import ClaimVerdict

Row = Mapping[str, Any]
FASTEST, DEFAULT = VARIANTS[0], Variant("device")
"""The variant that is compared with the PR, and the one that `ExpertCache` makes without options."""
MIN_SPEEDUP = {32: 2.0, 64: 2.0}
"""Tokens per second of `FASTEST` over those of the PR's cache at batch 1, by slots."""
MIN_RESIDENT = 0.95
"""Of the same forward without a cache."""
MIN_OF_PINNED = 0.9
"""Of the rate of a pinned copy, if every access is a miss."""
MAX_OVERHEAD = {2: 0.04, 4: 0.10, 8: 0.25}
"""By groups, at 1024 tokens with every expert resident; computed beside each other and one after another."""
MIN_ACCESSES = 1e6
"""Expert accesses a second that `simulate` replays on one core."""
_NOT_TIMED = "one of the two was wrong, and not timed"


def judge(
    decode: Sequence[Row],
    *,
    recorded: Sequence[Row] = (),
    misses: Sequence[Row] = (),
    groups: Sequence[Row] = (),
    replays: Sequence[Row] = (),
) -> list[Row]:
    """Judge everything that these rows decide, and return a row for each claim.

    They are those of `speed.decode` at any batch, of the same on the recorded trace, of `miss_bandwidth`, of
    `group_cost` and of `replay_speed`. ``default_cache`` is what the default cache reached, if the claim is
    about another one.
    """
    return [
        *_against_the_pr(decode, "synthetic trace"),
        *_against_the_pr(recorded, "recorded trace"),
        *_decode(decode),
        *_misses(misses),
        *_groups(groups),
        *_replays(replays),
    ]


def _judged(
    claim: str,
    measured: float | None,
    limit: float,
    remark: str,
    *,
    at_most: bool = False,
    default: float | None = None,
) -> Row:
    """Return the row of one claim: `measured` must be at least `limit`, or `at_most`."""
    if measured is None:
        verdict = ClaimVerdict.UNTESTED
    else:
        holds = measured <= limit if at_most else measured >= limit
        verdict = ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED
    figures = {"measured": measured, "default_cache": default}
    figures = {name: figure for name, figure in figures.items() if figure is not None}
    return {"claim": claim, "verdict": verdict.value, **figures, "limit": limit, "remark": remark}


def _against_the_pr(rows: Sequence[Row], trace: str) -> Iterator[Row]:
    for row in rows:
        limit = MIN_SPEEDUP.get(row["capacity"])
        if row["engine"] != FASTEST.name or row["batch"] != 1 or limit is None:
            continue
        claim = f"{row['capacity']} slots, batch 1, {trace}, {FASTEST}: tokens per second over the PR's"
        reached, default = _over(PR, row), _over(PR, _beside(rows, row, DEFAULT.name))
        remarks = [
            _NOT_TIMED if reached is None else _bus(row, _beside(rows, row, PR)),
            f"the default cache ({DEFAULT}): {'not measured' if default is None else f'{default:.2f}'}",
        ]
        yield _judged(claim, reached, limit, "; ".join(filter(None, remarks)), default=default)


def _decode(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row["engine"] == RESIDENT:
            claim = f"every expert resident, batch {row['batch']}: of the same forward without a cache"
            reached, pr = _over(UNCACHED, row), _beside(rows, row, PR)
            remark = f"the PR's cache: {pr['speedup']:.3f}" if pr and "speedup" in pr else ""
            yield _judged(claim, reached, MIN_RESIDENT, _NOT_TIMED if reached is None else remark)
    on_device = {RESIDENT, *(variant.name for variant in VARIANTS if variant.engine == "device")}
    timed = [row for row in rows if row["engine"] in on_device and "one_graph" in row]
    if timed:
        share = sum(bool(row["one_graph"]) for row in timed) / len(timed)
        claim = (
            "share of the rows above of engines without a host that ran as replays of one CUDA graph a step"
        )
        yield _judged(claim, share, 1.0, "torch raised at no synchronisation in a step (set_sync_debug_mode)")


def _bus(row: Row, pr: Row | None) -> str:
    """Return what limits the ratio to the PR."""
    if "speedup_bound" not in row or pr is None:
        return ""
    return (
        f"{row['gigabytes_a_step']:.2f} GB a step against {pr['gigabytes_a_step']:.2f}; if nothing but the "
        f"bus took time: {row['speedup_bound']:.2f}; the bus needs {row['bus_share']:.0%} of the step, of "
        f"the PR's {pr['bus_share']:.0%}"
    )


def _misses(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row["engine"] in ("device", "host"):
            claim = f"misses, engine {row['engine']}: of the rate of a pinned copy"
            yield _judged(claim, row["of_pinned"], MIN_OF_PINNED, f"{row['miss_gb_s']:.1f} GB/s")


def _groups(rows: Sequence[Row]) -> Iterator[Row]:
    for order, suffix in (("beside each other", ""), ("one after another, as in a full cache", "_in_turn")):
        for row in rows:
            limit = MAX_OVERHEAD.get(row["groups"])
            if limit is not None:
                claim = f"{row['groups']} resident groups, {order}: what they add to one call, at most"
                remark = f"{row[f'us{suffix}']:.0f} µs"
                yield _judged(claim, row[f"overhead{suffix}"], limit, remark, at_most=True)


def _replays(rows: Sequence[Row]) -> Iterator[Row]:
    for policy in ("lru", "lfu", "lfru"):
        mine = [row for row in rows if row["policy"] == policy]
        if mine:
            slowest = min(mine, key=lambda row: float(row["accesses_per_second"]))
            remark = f"the slowest, {slowest['capacity']} slots"
            claim = f"simulate, {policy}: accesses a second on one core"
            yield _judged(claim, slowest["accesses_per_second"], MIN_ACCESSES, remark)


def _beside(rows: Iterable[Row], row: Row, engine: str) -> Row | None:
    """Return the row of `engine` that was measured in turn with `row`."""
    wanted = (engine, row["batch"], row["capacity"])
    return next((r for r in rows if (r["engine"], r["batch"], r["capacity"]) == wanted), None)


def _over(base: str, row: Row | None) -> float | None:
    """Return the speedup of `row` over `base`; None if it was not timed or is compared with another way."""
    return None if row is None or row.get("against") != base else row.get("speedup")
