"""What we say of the speed of our offloader, and how each is decided: on a GPU, peer and ours in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

Limits = Mapping[str, float]


def _seen(units: Sequence[Measurement]) -> Mapping[str, Any]:
    return next(one.outcome.evidence for one in units if isinstance(one.outcome, Observation))


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def _wrong(seen: Mapping[str, Any]) -> ClaimJudgement | None:
    """A way whose result is wrong is not timed; if it is ours, the claim is lost, else it stays open."""
    wrong = [name for name, right in seen["right"].items() if not right]
    if not wrong:
        return None
    ours = any(name.startswith("ours") for name in wrong)
    verdict = ClaimVerdict.REFUTED if ours else ClaimVerdict.UNTESTED
    return ClaimJudgement(verdict, seen, f"wrong result, not timed: {', '.join(wrong)}")


def _row(seen: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    return next(row for row in seen["rows"] if row["way"] == way)


def judge_bandwidth(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """GB/s of weights over a whole pass, against one large pinned copy alone."""
    seen = _seen(units)
    wrong = _wrong(seen)
    if wrong is not None:
        return wrong
    ours, alone = _row(seen, "ours")["gb_per_s"], seen["pinned_gb_per_s"]["median"]
    share = ours / alone
    said = f"{ours:.1f} of {alone:.1f} GB/s, {share:.1%}"
    return ClaimJudgement(_verdict(share >= limits["min_share"]), {**seen, "share": share}, said)


def judge_speedup(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """The functional_call path from pageable memory over ours from pinned memory, which decides.

    Said beside it: both from pinned memory, and both from pageable memory where that was measured, as it is
    where nothing can be pinned.
    """
    seen = _seen(units)
    wrong = _wrong(seen)
    if wrong is not None:
        return wrong
    pageable = _row(seen, "functional_call")["over_ours"]
    pinned = _row(seen, "functional_call_pinned")["over_ours"]
    said = (
        f"ours from pinned memory is {pageable['median']:.2f} times as fast as it is from pageable memory,"
        f" {pinned['median']:.2f} times as fast as it is from pinned memory"
    )
    if any(row["way"] == "ours_unpinned" for row in seen["rows"]):
        ours, theirs = (_row(seen, way)["ms"]["median"] for way in ("ours_unpinned", "functional_call"))
        said += f"; both from pageable memory: {theirs / ours:.2f} times as fast"
    return ClaimJudgement(_verdict(pageable["median"] >= limits["min_speedup"]), seen, said)


def judge_not_slower(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """The peer over ours, for vLLM's UVA and prefetch paths."""
    seen = _seen(units)
    wrong = _wrong(seen)
    if wrong is not None:
        return wrong
    row = next(one for one in seen["rows"] if one["way"] != "ours")
    ratio = row["over_ours"]
    whose = seen["whose"][row["way"]]
    said = f"{row['way']} ({whose}): {ratio['median']:.3f} of our time"
    spread = f"({ratio['p20']:.3f}–{ratio['p80']:.3f})"
    return ClaimJudgement(_verdict(ratio["median"] >= limits["min_ratio"]), seen, f"{said} {spread}")


def judge_one_token(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """The other side: where few experts are used, the path that reads only those is ahead of ours."""
    seen = _seen(units)
    wrong = _wrong(seen)
    if wrong is not None:
        return wrong
    ratio = _row(seen, "uva")["over_ours"]["median"]
    said = f"uva ({seen['whose']['uva']}): {ratio:.3f} of our time; offload(access='view') does the same"
    return ClaimJudgement(_verdict(ratio <= limits["max_ratio"]), seen, said)


def judge_resident(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """The stack after an offload that had nothing to do, over the stack alone."""
    seen = _seen(units)
    wrong = _wrong(seen)
    if wrong is not None:
        return wrong
    ratio = _row(seen, "ours_budget_0")["over_ours"]
    said = f"{ratio['median'] - 1:+.2%} ({ratio['p20'] - 1:+.2%} to {ratio['p80'] - 1:+.2%})"
    return ClaimJudgement(_verdict(abs(ratio["median"] - 1) <= limits["max_share"]), seen, said)


def _measure(name: str) -> Any:
    """The measuring function `name` of `moedoctor.bench.offload`, imported in the child: it needs torch."""

    def measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        from moedoctor.bench import offload

        return Observation(getattr(offload, name)(device))

    return measure


CLAIMS = (
    ClaimTest("bandwidth", judge_bandwidth, _measure("bandwidth"), needs_gpu=True, thresholds=("min_share",)),
    ClaimTest(
        "against_functional_call",
        judge_speedup,
        _measure("against_functional_call"),
        needs_gpu=True,
        thresholds=("min_speedup",),
    ),
    ClaimTest(
        "against_uva", judge_not_slower, _measure("against_uva"), needs_gpu=True, thresholds=("min_ratio",)
    ),
    ClaimTest(
        "against_prefetch",
        judge_not_slower,
        _measure("against_prefetch"),
        needs_gpu=True,
        thresholds=("min_ratio",),
    ),
    ClaimTest("one_token", judge_one_token, _measure("one_token"), needs_gpu=True, thresholds=("max_ratio",)),
    ClaimTest("resident", judge_resident, _measure("resident"), needs_gpu=True, thresholds=("max_share",)),
)
