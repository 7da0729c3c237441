"""What the expert cache is meant to reach, held against what was measured: confirmed or refuted.

Every claim is about medians of rounds in turn. One whose figure was not measured is untested, and says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moedoctor.bench.cache.decode import Variant
from moedoctor.bench.cache.speed import VARIANTS
from moedoctor.results import ClaimVerdict

Row = Mapping[str, Any]
FASTEST, DEFAULT = VARIANTS[0], Variant("device")
"""What the limits against the PR are of, and the cache that `ExpertCache` makes where nothing is said."""
MIN_SPEEDUP = {32: 2.0, 64: 2.0}
"""Tokens per second of `FASTEST` over those of the PR's cache at batch 1, by slots."""
MIN_RESIDENT = 0.95
"""Of the same forward without a cache."""
MIN_OF_PINNED = 0.9
"""Of the rate of a pinned copy, where every access is a miss."""
MAX_OVERHEAD = {2: 0.04, 4: 0.10, 8: 0.25}
"""By groups, at 1024 tokens with every expert resident; computed beside each other and one after another."""
MIN_ACCESSES = 1e6
"""Expert accesses a second that `simulate` replays on one core."""


@dataclass(frozen=True)
class Limit:
    """One statement and what came of it."""

    claim: str
    measured: float | None
    limit: float
    verdict: ClaimVerdict
    remark: str = ""
    default: float | None = None
    """What the default cache reached of the same, where the claim is about another one."""

    def row(self) -> dict[str, Any]:
        """As the report's tables have it."""
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
    """Everything that these rows decide: of `expert_cache.decode` at any batch, the same on the recorded
    trace, `miss_bandwidth`, `group_cost` and `replay_speed`."""
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
        if row["batch"] == 1 and limit is not None:
            claim = f"{row['capacity']} slots, batch 1, {trace}, {FASTEST}: tokens per second over the PR's"
            default = next((one for one in _of(rows, DEFAULT.name) if _together(one, row)), None)
            found = _least(claim, _over_the_pr(row), limit, _bus(row, _pr(rows, row)))
            yield replace(
                found,
                remark="; ".join(filter(None, (found.remark, _of_default(default)))),
                default=_over_the_pr(default),
            )


def _over_the_pr(row: Row | None) -> float | None:
    """The ratio of `row`, where it was timed and is one to the PR's cache."""
    return None if row is None or row.get("against") != "pr37190" else row.get("speedup")


def _of_default(row: Row | None) -> str:
    """What is known of the default cache beside a claim about another one."""
    reached = _over_the_pr(row)
    return f"the default cache ({DEFAULT}): " + ("not measured" if reached is None else f"{reached:.2f}")


def _decode(rows: Sequence[Row]) -> Iterator[Limit]:
    for row in _of(rows, "resident"):
        claim = f"every expert resident, batch {row['batch']}: of the same forward without a cache"
        value = row.get("speedup") if row.get("against") == "uncached" else None
        pr = _pr(rows, row)
        remark = f"the PR's cache: {pr['speedup']:.3f}" if pr and "speedup" in pr else ""
        yield _least(claim, value, MIN_RESIDENT, remark)
    device = [row for row in rows if row["engine"] in ("device", "aging", "packed", "overlap", "resident")]
    timed = [row for row in device if "one_graph" in row]
    if timed:
        share = sum(bool(row["one_graph"]) for row in timed) / len(timed)
        layers = (
            "share of the rows above of engines without a host that ran as replays of one CUDA graph a step"
        )
        yield _least(layers, share, 1.0, "torch raised at no synchronisation in a step (set_sync_debug_mode)")


def _bus(row: Row, pr: Row | None) -> str:
    """What limits the ratio."""
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


def _pr(rows: Iterable[Row], beside: Row) -> Row | None:
    """The PR's row of the same measurement."""
    return next((row for row in _of(rows, "pr37190") if _together(row, beside)), None)


def _together(one: Row, other: Row) -> bool:
    """Whether both were measured in turn."""
    return all(one[key] == other[key] for key in ("batch", "capacity"))
