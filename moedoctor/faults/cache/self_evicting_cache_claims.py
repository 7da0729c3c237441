"""What was said about the cache of PR 37190 and its policy, and how routing traces decide it.

Hit rates belong to policies, and a replay of `moedoctor.fixes.eviction` gives them. What the rule of the PR
itself would do is told beside them; it counts hits on slots that hold another expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

_GRID = tuple(
    (experts, top_k, times * top_k)
    for experts in (64, 128, 256)
    for top_k in (2, 6, 8)
    for times in (1, 2, 4)
    if times * top_k < experts
)
_CALLS = 1500


def measure_wrong_share(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Share of calls with a wrong expert, over experts x top-k x slots, under each clock and two policies."""
    from moedoctor.fixes.eviction import CacheTable, SlotTable, replay
    from moedoctor.reference.pr37190 import PrRule
    from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

    rows = []
    for experts, top_k, capacity in _GRID:
        trace = zipf_trace(ZipfSettings(experts, top_k, layers=1, rows=_CALLS, streams=1, drift=0.0))
        calls = trace.calls(0)
        rules: dict[str, CacheTable] = {
            "pr_share": PrRule(experts, capacity),
            "clock_by_call_share": PrRule(experts, capacity, clock="call"),
            "plain_lru_share": PrRule(experts, capacity, policy="lru"),
            "ours_share": SlotTable(experts, capacity),
        }
        shares = {name: replay(calls, rule).wrong / len(calls) for name, rule in rules.items()}
        rows.append({"experts": experts, "top_k": top_k, "slots": capacity, **shares})
    return Observation({"calls": _CALLS, "rows": rows})


def _traces() -> Iterator[tuple[str, Any]]:
    """The recorded trace, and one drawn in the shape of the model that the claim was made for."""
    from moedoctor.trace.shipped import shipped_trace
    from moedoctor.trace.synthetic import ZipfSettings, zipf_trace

    yield "recorded, 128 experts top-8", shipped_trace()
    for skew in (1.0, 1.5):
        settings = ZipfSettings(experts=128, top_k=6, layers=2, rows=1500, streams=1, skew=skew, drift=0.1)
        yield f"Zipf {skew:g}, 128 experts top-6", zipf_trace(settings)


def measure_lfru_at_half(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Hit rates of LFRU with 8 slots and LRU with 16, with what the optimum has at each."""
    from moedoctor.bench.cache.replay import replay_trace
    from moedoctor.fixes.eviction import replay
    from moedoctor.reference.pr37190 import PrRule

    rows = []
    for name, trace in _traces():
        points = {
            (one.policy, one.capacity): one.hit_rate
            for one in replay_trace(trace, capacities=(8, 16), policies=("lru", "lfru", "belady"))
        }
        counted = [
            replay(trace.calls(layer), PrRule(trace.num_experts, 8)) for layer in range(len(trace.layers))
        ]
        hits, accesses = (sum(getattr(one, key) for one in counted) for key in ("hits", "accesses"))
        rows.append(
            {
                "trace": name,
                "lfru_8": points["lfru", 8],
                "belady_8": points["belady", 8],
                "lru_16": points["lru", 16],
                "belady_16": points["belady", 16],
                "pr_rule_counts_8": hits / accesses,
                "pr_rule_wrong_8": sum(one.wrong for one in counted) / sum(one.calls for one in counted),
            }
        )
    return Observation({"rows": rows})


def measure_monopoly(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Each layer's hit rate with a cache of its own and in one cache for all, under LRU and LFRU.

    ``all_layers`` has each scope's rates over all layers with the optimum of the same scope: the optimum of a
    cache a layer is no bound of one cache for all, whose own optimum has no rates by layer.
    """
    from moedoctor.bench.cache.replay import replay_trace
    from moedoctor.trace.shipped import shipped_trace

    trace = shipped_trace()
    rows: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    for capacity in (16, 32):
        points = {
            f"{one.policy}_{scope}": one
            for scope in ("layer", "global")
            for one in replay_trace(
                trace, capacities=(capacity,), policies=("lru", "lfru", "belady"), scope=scope
            )
        }
        by_layer = {name: one.hit_rate_by_layer for name, one in points.items() if one.hit_rate_by_layer}
        rows += [
            {"slots": capacity, "layer": layer, **{name: rates[layer] for name, rates in by_layer.items()}}
            for layer in range(len(trace.layers))
        ]
        totals.append({"slots": capacity, **{name: one.hit_rate for name, one in points.items()}})
    return Observation({"rows": rows, "all_layers": totals})


def measure_policy_speed(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    """Decode through the PR's cache restated, under LFRU and LRU in turn."""
    from moedoctor.bench.cache.claims import policy_speed

    return Observation(policy_speed(device))


def _seen(units: Sequence[Measurement]) -> Mapping[str, Any]:
    return next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def judge_wrong_share(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Most calls are wrong where the slots are as many as top-k, few with more, none under LRU and ours."""
    seen = _seen(units)
    rows = seen["rows"]
    tight = [row["pr_share"] for row in rows if row["slots"] == row["top_k"] and row["top_k"] > 2]
    ample = [row["pr_share"] for row in rows if row["slots"] == 4 * row["top_k"]]
    others = [row[name] for row in rows for name in ("plain_lru_share", "ours_share")]
    said = (
        f"as many slots as top-k (6, 8): {min(tight):.0%} to {max(tight):.0%} of calls wrong; four times as "
        f"many: at most {max(ample):.1%}; plain LRU and ours: at most {max(others):.1%}"
    )
    holds = (
        min(tight) >= limits["min_share_tight"]
        and max(ample) <= limits["max_share_ample"]
        and max(others) == 0
    )
    return ClaimJudgement(_verdict(holds), seen, said)


def judge_lfru_at_half(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Whether LFRU with 8 slots beats LRU with 16 on every trace, and whether any policy could."""
    seen = _seen(units)
    rows = seen["rows"]
    gains = [row["lfru_8"] - row["lru_16"] for row in rows]
    said = "; ".join(
        f"{row['trace']}: LFRU 8 {row['lfru_8']:.1%} (optimum {row['belady_8']:.1%}), "
        f"LRU 16 {row['lru_16']:.1%} (optimum {row['belady_16']:.1%})"
        for row in rows
    )
    impossible = sum(row["belady_8"] < row["lru_16"] for row in rows)
    if impossible:
        said += (
            f". On {impossible} of {len(rows)} traces not even the optimum with 8 slots reaches LRU with 16"
        )
    said += ". The routing of the model that the claim is about was not at hand"
    return ClaimJudgement(_verdict(min(gains) > limits["min_gain"]), seen, said)


def judge_monopoly(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """What one LRU cache for all layers gives the first third of the layers, and takes from the last."""
    seen = _seen(units)
    said, tilts = [], []
    for total in seen["all_layers"]:
        rows = [row for row in seen["rows"] if row["slots"] == total["slots"]]
        third = max(1, len(rows) // 3)
        gain = [row["lru_global"] - row["lru_layer"] for row in rows]
        early, late = sum(gain[:third]) / third, sum(gain[-third:]) / third
        tilts.append(early - late)
        said.append(
            f"{total['slots']} slots a layer: one cache for all gives the first third {early:+.1%} and the "
            f"last {late:+.1%} (LRU {total['lru_layer']:.1%} with a cache a layer, of at most "
            f"{total['belady_layer']:.1%}, and {total['lru_global']:.1%} with one for all, of at most "
            f"{total['belady_global']:.1%})"
        )
    reason = "; ".join(said) + ". The PR has a cache a layer, where layers cannot displace one another"
    return ClaimJudgement(_verdict(min(tilts) >= limits["min_tilt"]), seen, reason)


def judge_policy_speed(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Tokens per second under LFRU over those under LRU."""
    seen = _seen(units)
    rows = seen["rows"]
    gains = [row["lru_over_lfru_time"] - 1 for row in rows]
    said = "; ".join(
        f"{row['slots']} slots: {gain:+.1%}, hit rates {row['lfru_hit_rate']:.1%} and "
        f"{row['lru_hit_rate']:.1%} (optimum {row['belady_hit_rate']:.1%}), "
        f"{row['lfru_wrong']:.0%} of LFRU's calls wrong"
        for row, gain in zip(rows, gains, strict=True)
    )
    return ClaimJudgement(_verdict(min(gains) >= limits["min_gain"]), seen, said)


CLAIMS = (
    ClaimTest(
        "wrong_share",
        judge_wrong_share,
        measure_wrong_share,
        thresholds=("min_share_tight", "max_share_ample"),
    ),
    ClaimTest("lfru_at_half", judge_lfru_at_half, measure_lfru_at_half, thresholds=("min_gain",)),
    ClaimTest("lru_monopoly", judge_monopoly, measure_monopoly, thresholds=("min_tilt",)),
    ClaimTest(
        "lfru_speed", judge_policy_speed, measure_policy_speed, needs_gpu=True, thresholds=("min_gain",)
    ),
)
