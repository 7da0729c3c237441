"""MD006: the LFRU expert cache evicts an expert that the same call needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from moedoctor.faults.base import ClaimCases, ClaimJudgement, Fault, Judgement, Parameters, claim, decide
from moedoctor.results import Case, CaseResult, CaseVerdict, Evidence, Observation, find_worst

LAB = "moedoctor.faults.cache.self_evicting_cache_lab"
_BENCH = "moedoctor.bench.cache.groups"


class SelfEvictingCacheParameters(Parameters):
    routing: Literal["zipf", "trace"] = Field(
        "zipf", description="trace: the first layer of the recorded trace that ships with moedoctor"
    )
    experts: int = Field(128, ge=1, le=1024)
    capacity: int = Field(8, ge=1, le=1024, description="slots")
    top_k: int = Field(8, ge=1, le=64)
    tokens: int = Field(1, ge=1, le=64, description="tokens a call")
    calls: int = Field(1000, ge=1, le=100_000, description="of the layer, one after another")
    computed: int = Field(
        48, ge=1, le=1000, description="calls whose output is compared, half of them where `faulty` is wrong"
    )
    clock: Literal["access", "call"] = Field(
        "access", description="what the age counts in `faulty`: accesses in the PR, calls in a fork of it"
    )
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.top_k > self.capacity:
            yield f"top_k: {self.top_k} is more than capacity {self.capacity}; that is MD007"
        if self.capacity > self.experts:
            yield f"capacity: {self.capacity} is more than experts {self.experts}"
        if self.computed > self.calls:
            yield f"computed: {self.computed} is more than calls {self.calls}"


@claim("lfru_at_half", measure=f"{LAB}:measure_lfru_at_half", thresholds=("min_gain",))
def judge_lfru_at_half(cases: ClaimCases) -> ClaimJudgement:
    """LFRU with 8 slots has a higher hit rate than LRU with 16 on every trace."""
    (measured,) = cases.evidence()
    rows = measured["rows"]
    figure = "; ".join(
        f"{row['trace']}: LFRU 8 {row['lfru_8']:.1%} (optimum {row['belady_8']:.1%}), "
        f"LRU 16 {row['lru_16']:.1%} (optimum {row['belady_16']:.1%})"
        for row in rows
    )
    impossible = sum(row["belady_8"] < row["lru_16"] for row in rows)
    if impossible:
        figure += (
            f". On {impossible} of {len(rows)} traces not even the optimum with 8 slots reaches LRU with 16"
        )
    figure += ". No routing of the model that the claim is about was available"
    gains = [row["lfru_8"] - row["lru_16"] for row in rows]
    return decide(min(gains) > cases.limits["min_gain"], measured, figure)


@claim("lru_monopoly", measure=f"{LAB}:measure_lru_monopoly", thresholds=("min_tilt",))
def judge_lru_monopoly(cases: ClaimCases) -> ClaimJudgement:
    """One LRU cache for all layers favors the first third of the layers over the last."""
    (measured,) = cases.evidence()
    figures, tilts = [], []
    for total in measured["all_layers"]:
        rows = [row for row in measured["rows"] if row["slots"] == total["slots"]]
        third = max(1, len(rows) // 3)
        gain = [row["lru_global"] - row["lru_layer"] for row in rows]
        early, late = sum(gain[:third]) / third, sum(gain[-third:]) / third
        tilts.append(early - late)
        figures.append(
            f"{total['slots']} slots a layer: one cache for all gives the first third {early:+.1%} and the "
            f"last {late:+.1%} (LRU {total['lru_layer']:.1%} with a cache a layer, of at most "
            f"{total['belady_layer']:.1%}, and {total['lru_global']:.1%} with one for all, of at most "
            f"{total['belady_global']:.1%})"
        )
    reason = "; ".join(figures) + ". The PR has a cache a layer, where layers cannot displace one another"
    return decide(cases.keeps("min_tilt", tilts), measured, reason)


@claim("lfru_speed", measure=f"{_BENCH}:compare_policies", thresholds=("min_gain",), needs_gpu=True)
def judge_lfru_speed(cases: ClaimCases) -> ClaimJudgement:
    """Decoding is faster under LFRU than under LRU."""
    (measured,) = cases.evidence()
    gains = [row["lru_over_lfru_time"] - 1 for row in measured["rows"]]
    figure = "; ".join(
        f"{row['slots']} slots: {gain:+.1%}, hit rates {row['lfru_hit_rate']:.1%} and "
        f"{row['lru_hit_rate']:.1%} (optimum {row['belady_hit_rate']:.1%}), "
        f"{row['lfru_wrong']:.0%} of LFRU's calls wrong"
        for row, gain in zip(measured["rows"], gains, strict=True)
    )
    return decide(cases.keeps("min_gain", gains), measured, figure)


class SelfEvictingCache(Fault):
    """A cache that evicts what its own call has just placed, so the kernel reads another expert."""

    id = "MD006"
    parameters = SelfEvictingCacheParameters
    summary = "{routing} E={experts} C={capacity} K={top_k} clock={clock}"
    claims = (judge_lfru_at_half, judge_lru_monopoly, judge_lfru_speed)

    def judge(self, case: Case, observation: Observation) -> Judgement:
        evidence = observation.evidence
        wrong, calls = evidence["wrong_calls"], evidence["calls"]
        outputs, computed = evidence["wrong_outputs"], evidence["computed"]
        if wrong or outputs:
            figure = f"{wrong / calls:.1%} of {calls} calls hold a wrong expert"
            if outputs:
                error = find_worst(evidence["worst_error"])
                figure += f"; {outputs} of {computed} outputs wrong, by up to {error:.0%}"
            return Judgement(CaseVerdict.REPRODUCED, figure)
        rates = f"hit rate {evidence['hit_rate']:.1%} of at most {evidence['belady_hit_rate']:.1%}"
        return Judgement(CaseVerdict.CLEAN, f"0 of {calls} calls, 0 of {computed} outputs wrong; {rates}")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Return the hit rates that the control counts, wrong experts included, beside LRU and the bound."""
        rows = [
            {
                **{key: case.parameters[key] for key in ("routing", "experts", "capacity", "top_k", "clock")},
                "wrong_calls": f"{case.evidence['wrong_calls'] / case.evidence['calls']:.1%}",
                **{key: case.evidence[key] for key in ("hit_rate", "lru_hit_rate", "belady_hit_rate")},
            }
            for case in results
            if case.subject == "faulty" and "wrong_calls" in case.evidence
        ]
        return {"faulty": rows} if rows else {}
