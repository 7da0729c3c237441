"""What the expert cache is meant to reach, compared with what was measured: confirmed or refuted.

Every claim is about medians of rounds in turn. A claim whose figure was not measured is untested, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Limit:
    """One statement and its verdict."""

    claim: str
    measured: float | None
    limit: float
    verdict: ClaimVerdict
    remark: str = ""
    default: float | None = None
    """What the default cache reached, if the claim is about another one."""

    def row(self) -> dict[str, Any]:
        """Return it as the report's tables have it."""
        row: dict[str, Any] = {"claim": self.claim, "verdict": self.verdict.value}
        row |= {} if self.measured is None else {"measured": self.measured}
        row |= {} if self.default is None else {"default_cache": self.default}
        return row | {"limit": self.limit, "remark": self.remark}


def judge(
    decode: Sequence[Row],
    *,
    recorded: Sequence[Row] = (),
    misses: Sequence[Row] = (),
    groups: Sequence[Row] = (),
    replays: Sequence[Row] = (),
) -> list[Limit]:
    """Judge everything that these rows decide.

    They are those of `speed.decode` at any batch, of the same on the recorded trace, of `miss_bandwidth`, of
    `group_cost` and of `replay_speed`.
    """
    return [
        *_against_the_pr(decode, "synthetic trace"),
        *_against_the_pr(recorded, "recorded trace"),
        *_decode(decode),
        *_misses(misses),
        *_groups(groups),
        *_replays(replays),
    ]


def _against_the_pr(rows: Sequence[Row], trace: str) -> Iterator[Limit]:
    for row in _of(rows, FASTEST.name):
        limit = MIN_SPEEDUP.get(row["capacity"])
        if row["batch"] != 1 or limit is None:
            continue
        claim = f"{row['capacity']} slots, batch 1, {trace}, {FASTEST}: tokens per second over the PR's"
        reached = _over(PR, _beside(rows, row, DEFAULT.name))
        default = f"the default cache ({DEFAULT}): " + (
            "not measured" if reached is None else f"{reached:.2f}"
        )
        judged = _least(claim, _over(PR, row), limit, _bus(row, _beside(rows, row, PR)))
        yield replace(judged, remark="; ".join(filter(None, (judged.remark, default))), default=reached)


def _decode(rows: Sequence[Row]) -> Iterator[Limit]:
    for row in _of(rows, RESIDENT):
        claim = f"every expert resident, batch {row['batch']}: of the same forward without a cache"
        pr = _beside(rows, row, PR)
        remark = f"the PR's cache: {pr['speedup']:.3f}" if pr and "speedup" in pr else ""
        yield _least(claim, _over(UNCACHED, row), MIN_RESIDENT, remark)
    on_device = {RESIDENT, *(variant.name for variant in VARIANTS if variant.engine == "device")}
    timed = [row for row in rows if row["engine"] in on_device and "one_graph" in row]
    if timed:
        share = sum(bool(row["one_graph"]) for row in timed) / len(timed)
        claim = (
            "share of the rows above of engines without a host that ran as replays of one CUDA graph a step"
        )
        yield _least(claim, share, 1.0, "torch raised at no synchronisation in a step (set_sync_debug_mode)")


def _bus(row: Row, pr: Row | None) -> str:
    """What limits the ratio to the PR."""
    if "speedup_bound" not in row or pr is None:
        return ""
    return (
        f"{row['gigabytes_a_step']:.2f} GB a step against {pr['gigabytes_a_step']:.2f}; if nothing but the "
        f"bus took time: {row['speedup_bound']:.2f}; the bus needs {row['bus_share']:.0%} of the step, of "
        f"the PR's {pr['bus_share']:.0%}"
    )


def _misses(rows: Sequence[Row]) -> Iterator[Limit]:
    for row in rows:
        if row["engine"] in ("device", "host"):
            claim = f"misses, engine {row['engine']}: of the rate of a pinned copy"
            yield _least(claim, row.get("of_pinned"), MIN_OF_PINNED, f"{row['miss_gb_s']:.1f} GB/s")


def _groups(rows: Sequence[Row]) -> Iterator[Limit]:
    for order, suffix in (("beside each other", ""), ("one after another, as in a full cache", "_in_turn")):
        for row in rows:
            limit = MAX_OVERHEAD.get(row["groups"])
            if limit is not None:
                added = row[f"overhead{suffix}"]
                claim = f"{row['groups']} resident groups, {order}: what they add to one call, at most"
                yield Limit(claim, added, limit, _verdict(added <= limit), f"{row[f'us{suffix}']:.0f} µs")


def _replays(rows: Sequence[Row]) -> Iterator[Limit]:
    for policy in ("lru", "lfu", "lfru"):
        mine = [row for row in rows if row["policy"] == policy]
        if mine:
            slowest = min(mine, key=lambda row: float(row["accesses_per_second"]))
            remark = f"the slowest, {slowest['capacity']} slots"
            claim = f"simulate, {policy}: accesses a second on one core"
            yield _least(claim, slowest["accesses_per_second"], MIN_ACCESSES, remark)


def _least(claim: str, measured: float | None, limit: float, remark: str) -> Limit:
    if measured is None:
        return Limit(claim, None, limit, ClaimVerdict.UNTESTED, "one of the two was wrong, and not timed")
    return Limit(claim, measured, limit, _verdict(measured >= limit), remark)


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def _of(rows: Iterable[Row], engine: str) -> list[Row]:
    return [row for row in rows if row["engine"] == engine]


def _beside(rows: Iterable[Row], row: Row, engine: str) -> Row | None:
    """The row of `engine` that was measured in turn with `row`."""
    same = (
        other for other in _of(rows, engine) if all(other[key] == row[key] for key in ("batch", "capacity"))
    )
    return next(same, None)


def _over(base: str, row: Row | None) -> float | None:
    """The speedup of `row` over `base`; None if it was not timed or is compared with something else."""
    return None if row is None or row.get("against") != base else row.get("speedup")
