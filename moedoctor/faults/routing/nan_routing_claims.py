"""What was said about MD001 upstream, what we say of our own fix, and how each is decided.

Statements about upstream's kernels are decided by upstream's kernels alone: the restated control may
illustrate them but never confirms them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.routing.nan_routing_engine import ENGINE_CLAIMS
from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

FIRST_FIXED = "0.20.0"
"""The release that #39391 landed in; what the releases themselves show is in the report's conclusions."""

_REPEATS = 3
"""Each release is timed this often, in turn with the other one."""


def _upstream(subjects: Sequence[str]) -> list[str]:
    """Named releases in the order of their versions, then the installed one."""
    from packaging.version import Version

    named = sorted((one for one in subjects if one.startswith("vllm@")), key=lambda one: Version(one[5:]))
    return [*named, *(one for one in subjects if one == "installed")]


def _is_fixed(subject: str) -> bool:
    from packaging.version import Version

    return Version(subject.removeprefix("vllm@")) >= Version(FIRST_FIXED)


def _newest(subjects: Sequence[str]) -> Sequence[str]:
    return _upstream(subjects)[-1:]


def _peer(subjects: Sequence[str]) -> Sequence[str]:
    """vLLM 0.21.0, which our speed is stated against; no other release stands in for it."""
    return [one for one in subjects if one == "vllm@0.21.0"]


def _around_the_fix(subjects: Sequence[str]) -> Sequence[str]:
    """The last release before the fix and the first after it, in turn; nothing without both."""
    named = [one for one in _upstream(subjects) if one.startswith("vllm@")]
    before = [one for one in named if not _is_fixed(one)][-1:]
    after = [one for one in named if _is_fixed(one)][:1]
    return [*before, *after] * _REPEATS if before and after else ()


def _seen(units: Sequence[Measurement]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(one.unit, one.outcome.evidence) for one in units if isinstance(one.outcome, Observation)]


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def judge_same_expert(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Share of all-NaN rows that got one id K times, in each release's top-k kernels."""
    rows: dict[str, list[int]] = {}
    for case in cases:
        plain_topk = case.parameters.get("router") in ("softmax", "sigmoid")
        if case.subject not in ("faulty", "fixed") and plain_topk and "all_nan_rows" in case.evidence:
            entry = rows.setdefault(case.subject, [0, 0])
            entry[0] += case.evidence["all_nan_rows_with_one_id"]
            entry[1] += case.evidence["all_nan_rows"]
    shares = {name: same / total for name, (same, total) in rows.items() if total}
    old = {name: share for name, share in shares.items() if name.startswith("vllm@") and not _is_fixed(name)}
    evidence = {"share_of_all_nan_rows_with_one_id": shares}
    if not old:
        return ClaimJudgement(
            ClaimVerdict.UNTESTED, evidence, f"no kernel of a release before {FIRST_FIXED} ran"
        )
    worst = min(old.values())
    reason = f"{worst:.0%} of all-NaN rows or more, in {', '.join(old)}"
    return ClaimJudgement(_verdict(worst >= limits["min_share"]), evidence, reason)


def judge_always_distinct(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Rows of any kind that still hold a duplicate id in releases from the fix on, case by case."""
    after = [one for one in cases if one.subject.startswith("vllm@") and _is_fixed(one.subject)]
    ran = [one for one in after if "rows_with_duplicates" in one.evidence]
    if not ran:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, f"no kernel of {FIRST_FIXED} or later ran")
    rows = [
        {
            "release": one.subject,
            **{key: one.parameters[key] for key in ("router", "experts", "top_k", "dtype", "bias")},
            "rows_with_duplicates": f"{one.evidence['rows_with_duplicates']} of {one.evidence['rows']}",
            "kinds": ", ".join(one.evidence["duplicates_by_kind"]),
        }
        for one in ran
        if one.evidence["rows_with_duplicates"] > limits["max_rows"]
    ]
    where = ", ".join(dict.fromkeys(f"{row['router']} E={row['experts']} {row['bias']} bias" for row in rows))
    said = f"duplicates in {len(rows)} of {len(ran)} cases: {where}" if rows else f"none in {len(ran)} cases"
    return ClaimJudgement(_verdict(not rows), {"rows": rows} if rows else {}, said)


def judge_separate_launch(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """What `torch.nan_to_num` before the kernel adds to it."""
    ((unit, seen),) = _seen(units)
    overheads = [row["overhead"] for row in seen["rows"]]
    holds = all(limits["min_overhead"] <= one <= limits["max_overhead"] for one in overheads)
    said = ", ".join(f"{row['kernel']} {row['overhead']:+.0%}" for row in seen["rows"])
    return ClaimJudgement(_verdict(holds), {"subject": unit, **seen}, f"{said} at 128 x 128, {unit}")


def judge_fused_is_free(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """The kernel's time after the fix over before it, releases timed in turn in processes of their own."""
    from statistics import median

    times: dict[str, dict[str, list[float]]] = {}
    for unit, seen in _seen(units):
        for row in seen["rows"]:
            times.setdefault(row["shape"], {}).setdefault(unit, []).append(row["kernel_us"])
    shapes = {shape: by_unit for shape, by_unit in times.items() if len(by_unit) == 2}
    if not shapes:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "needs a release before the fix and one after it")
    rows: list[dict[str, Any]] = []
    for shape, by_unit in shapes.items():
        (before, old), (after, new) = sorted(by_unit.items(), key=lambda item: _is_fixed(item[0]))
        rows.append({"shape": shape, "overhead": median(new) / median(old) - 1, before: old, after: new})
    worst = max(row["overhead"] for row in rows)
    said = f"{worst:+.1%} at most over {len(rows)} shapes, {after} over {before}"
    return ClaimJudgement(_verdict(worst <= limits["max_overhead"]), {"rows": rows}, said)


def judge_fp8(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """What became of NaN in the release's own FP8 quantisation kernel."""
    (unit, seen), *_ = _seen(units)  # the first release whose quantisation kernel could be loaded
    share = seen["clamped_to_plus_448"] + seen["clamped_to_minus_448"]
    said = (
        f"{unit}: of all NaN {seen['clamped_to_plus_448']:.0%} became +448, "
        f"{seen['clamped_to_minus_448']:.0%} -448, {seen['still_nan']:.0%} stayed NaN; "
        f"torch's own cast keeps {seen['torch_cast_still_nan']:.0%} of them NaN"
    )
    return ClaimJudgement(_verdict(share >= limits["min_share"]), {"subject": unit, **seen}, said)


def judge_speed(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Ours over the peer's, each shape against its own limit."""
    ((unit, seen),) = _seen(units)
    rows = seen["rows"]
    wrong = [row["shape"] for row in rows if not row["correct"]]
    if wrong:
        return ClaimJudgement(
            ClaimVerdict.REFUTED, {"subject": unit, **seen}, f"wrong results at {', '.join(wrong)}"
        )
    over = [
        row
        for row in rows
        if row["time_ratio"] > limits["max_ratio_8192" if row["tokens"] >= 8192 else "max_ratio"]
    ]
    said = ", ".join(f"{row['shape']} {row['time_ratio']:.2f}" for row in (over or rows))
    return ClaimJudgement(_verdict(not over), {"subject": unit, **seen}, f"ours/{unit}: {said}")


def judge_policy_cost(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Mapping[str, float]
) -> ClaimJudgement:
    """Each policy over the same kernel without one."""
    ((_, seen),) = _seen(units)
    worst = max(seen["rows"], key=lambda row: float(row["overhead"]))
    said = f"{worst['overhead']:+.1%} at most, at {worst['shape']} with {worst['policy']}"
    return ClaimJudgement(_verdict(worst["overhead"] <= limits["max_overhead"]), seen, said)


def _measure(name: str) -> Any:
    """The measuring function `name` of `moedoctor.bench.routing`, imported in the child: it needs torch."""

    def measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        from moedoctor.bench import routing

        return Observation(getattr(routing, name)(unit, device, sources))

    return measure


_A_RELEASE = "the kernels of a release: --vllm-kernels X.Y.Z=PATH"
_PEER_RELEASE = "the kernels of 0.21.0: --vllm-kernels 0.21.0=PATH"
_BOTH_SIDES = f"the kernels of a release before {FIRST_FIXED} and of one from it on: --vllm-kernels, twice"

CLAIMS = (
    ClaimTest("same_expert", judge_same_expert, thresholds=("min_share",)),
    ClaimTest("always_distinct", judge_always_distinct, thresholds=("max_rows",)),
    ClaimTest(
        "separate_launch",
        judge_separate_launch,
        _measure("separate_launch"),
        _newest,
        needs_gpu=True,
        needs=_A_RELEASE,
        thresholds=("min_overhead", "max_overhead"),
    ),
    ClaimTest(
        "fused_is_free",
        judge_fused_is_free,
        _measure("kernel_times"),
        _around_the_fix,
        needs_gpu=True,
        needs=_BOTH_SIDES,
        thresholds=("max_overhead",),
    ),
    ClaimTest(
        "fp8_clamps_nan",
        judge_fp8,
        _measure("fp8_nan"),
        _upstream,
        needs_gpu=True,
        needs=_A_RELEASE,
        thresholds=("min_share",),
    ),
    ClaimTest(
        "speed",
        judge_speed,
        _measure("against_peer"),
        _peer,
        needs_gpu=True,
        needs=_PEER_RELEASE,
        thresholds=("max_ratio", "max_ratio_8192"),
    ),
    ClaimTest(
        "never_slower",
        judge_speed,
        _measure("other_routers_against_peer"),
        _peer,
        needs_gpu=True,
        needs=_PEER_RELEASE,
        thresholds=("max_ratio", "max_ratio_8192"),
    ),
    ClaimTest(
        "policy_cost",
        judge_policy_cost,
        _measure("policy_cost"),
        needs_gpu=True,
        thresholds=("max_overhead",),
    ),
    *ENGINE_CLAIMS,
)
