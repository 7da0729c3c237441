"""MD001: a token with NaN router logits gets the same expert K times.

vLLM's own code decides the claims about its kernels and its engine. The restated control never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar, Literal

from packaging.version import Version
from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    CountFault,
    RoutedParameters,
    claim,
    decide,
    find_first_after,
    group_by_release,
    list_tiers,
    only,
    releases,
    untested,
)
from moedoctor.results import CaseResult, Evidence, Scalar, Tier

FIRST_FIXED = "0.20.0"
"""The release that #39391 landed in. The report's conclusions show what the releases themselves do."""

_SUMMED = (
    "nan_rows",
    "duplicates_from_nan",
    "rows_with_nonfinite_weights",
    "clean_rows",
    "clean_rows_with_duplicates",
    "clean_rows_wrong",
)
"""Columns of the conclusions, summed over the cases of a release."""


class NanRoutingParameters(RoutedParameters):
    router: Literal["softmax", "sigmoid", "grouped"] = "softmax"
    tokens: int = Field(96, ge=1, le=65_536, description="rows of logits; every other one is clean")
    experts: int = Field(128, ge=1, le=1024)
    top_k: int = Field(8, ge=1, le=64)
    bias: Literal["none", "random", "negative"] = Field(
        "none", description="correction bias, for the choice only"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    renormalize: bool = True
    num_groups: int | None = Field(
        None, ge=1, le=64, description="groups of experts; the grouped router alone"
    )
    topk_groups: int | None = Field(None, ge=1, le=64, description="groups a token may use")
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        groups, used = self.num_groups, self.topk_groups
        if self.router != "grouped":
            if groups is not None or used is not None:
                yield "num_groups: only the grouped router has groups; expected router: grouped"
        elif groups is None or used is None:
            yield "num_groups: the grouped router needs num_groups and topk_groups"
        elif self.experts % groups:
            yield f"num_groups: {groups} does not divide experts {self.experts}"
        elif used > groups:
            yield f"topk_groups: {used} is more than num_groups {groups}"
        elif self.top_k > self.experts // groups * used:
            yield f"top_k: {self.top_k} is more than the experts of {used} groups"


# --- Claims about kernels -------------------------------------------------------------------------------

_BENCH = "moedoctor.bench.routing"
_KERNELS = {"needs_gpu": True, "needs": "the kernels of a release: --vllm-kernels X.Y.Z=PATH"}
_REPEATS = 3
"""The number of times that each release is timed, in turn with the other one."""


def _is_fixed(subject: str) -> bool:
    return Version(subject.removeprefix("vllm@")) >= Version(FIRST_FIXED)


def _choose_around_fix(subjects: Sequence[str]) -> Sequence[str]:
    """Return the last release before the fix and the first one after it, in turn; nothing without both."""
    named = [subject for subject in releases(subjects, "vllm") if subject.startswith("vllm@")]
    before = [subject for subject in named if not _is_fixed(subject)][-1:]
    after = [subject for subject in named if _is_fixed(subject)][:1]
    return [*before, *after] * _REPEATS if before and after else ()


@claim("same_expert", thresholds=("min_share",))
def judge_same_expert(given: ClaimCases) -> ClaimJudgement:
    """Judge the share of all-NaN rows that got one id K times, in each release's top-k kernels."""
    counts: dict[str, list[int]] = {}
    for case in given.select(has="all_nan_rows"):
        if case.subject not in ("faulty", "fixed") and case.parameters["router"] in ("softmax", "sigmoid"):
            count = counts.setdefault(case.subject, [0, 0])
            count[0] += case.evidence["all_nan_rows_with_one_id"]
            count[1] += case.evidence["all_nan_rows"]
    shares = {name: same / total for name, (same, total) in counts.items() if total}
    old = {name: share for name, share in shares.items() if name.startswith("vllm@") and not _is_fixed(name)}
    evidence = {"share_of_all_nan_rows_with_one_id": shares}
    if not old:
        return untested(f"no kernel of a release before {FIRST_FIXED} ran", evidence)
    worst = min(old.values())
    reason = f"{worst:.0%} of all-NaN rows or more, in {', '.join(old)}"
    return decide(given.keeps("min_share", worst), evidence, reason)


@claim("always_distinct", thresholds=("max_rows",))
def judge_always_distinct(given: ClaimCases) -> ClaimJudgement:
    """Judge the rows of any kind that still hold a duplicate id in releases from the fix on, case by case."""
    cases = [
        case
        for case in given.select(has="rows_with_duplicates")
        if case.subject.startswith("vllm@") and _is_fixed(case.subject)
    ]
    if not cases:
        return untested(f"no kernel of {FIRST_FIXED} or later ran")
    rows = [
        {
            "release": case.subject,
            **{key: case.parameters[key] for key in ("router", "experts", "top_k", "dtype", "bias")},
            "rows_with_duplicates": f"{case.evidence['rows_with_duplicates']} of {case.evidence['rows']}",
            "kinds": ", ".join(case.evidence["duplicates_by_kind"]),
        }
        for case in cases
        if not given.keeps("max_rows", case.evidence["rows_with_duplicates"])
    ]
    if not rows:
        return decide(True, {}, f"none in {len(cases)} cases")
    where = ", ".join(dict.fromkeys(f"{row['router']} E={row['experts']} {row['bias']} bias" for row in rows))
    return decide(False, {"rows": rows}, f"duplicates in {len(rows)} of {len(cases)} cases: {where}")


@claim(
    "separate_launch",
    measure=f"{_BENCH}:separate_launch",
    units=lambda subjects: releases(subjects, "vllm")[-1:],
    thresholds=("min_overhead", "max_overhead"),
    **_KERNELS,
)
def judge_separate_launch(given: ClaimCases) -> ClaimJudgement:
    """Judge what `torch.nan_to_num` before the kernel adds to it."""
    ((unit, figures),) = given.measured()
    overheads = [row["overhead"] for row in figures["rows"]]
    holds = given.keeps("min_overhead", overheads) and given.keeps("max_overhead", overheads)
    costs = ", ".join(f"{row['kernel']} {row['overhead']:+.0%}" for row in figures["rows"])
    return decide(holds, {"subject": unit, **figures}, f"{costs} at 128 x 128, {unit}")


@claim(
    "fused_is_free",
    measure=f"{_BENCH}:time_kernels",
    units=_choose_around_fix,
    needs_gpu=True,
    needs=f"the kernels of a release before {FIRST_FIXED} and of one from it on: --vllm-kernels, twice",
    thresholds=("max_overhead",),
)
def judge_fused_is_free(given: ClaimCases) -> ClaimJudgement:
    """Judge the kernel's time after the fix over before it. Each release is timed in its own processes."""
    times: dict[str, dict[str, list[float]]] = {}
    for unit, figures in given.measured():
        for row in figures["rows"]:
            times.setdefault(row["shape"], {}).setdefault(unit, []).append(row["kernel_us"])
    rows: list[dict[str, Any]] = []
    for shape, by_unit in times.items():
        if len(by_unit) == 2:
            (before, old), (after, new) = sorted(by_unit.items(), key=lambda item: _is_fixed(item[0]))
            rows.append({"shape": shape, "overhead": median(new) / median(old) - 1, before: old, after: new})
    if not rows:
        return untested("needs a release before the fix and one after it")
    worst = max(row["overhead"] for row in rows)
    reason = f"{worst:+.1%} at most over {len(rows)} shapes, {after} over {before}"
    return decide(given.keeps("max_overhead", worst), {"rows": rows}, reason)


@claim(
    "fp8_clamps_nan",
    measure=f"{_BENCH}:count_fp8_nan",
    units=lambda subjects: releases(subjects, "vllm"),
    thresholds=("min_share",),
    **_KERNELS,
)
def judge_fp8_clamps_nan(given: ClaimCases) -> ClaimJudgement:
    """Judge what became of NaN in the release's own FP8 quantization kernel."""
    (unit, figures), *_ = given.measured()  # the first release whose quantization kernel could be loaded
    clamped = figures["clamped_to_plus_448"] + figures["clamped_to_minus_448"]
    reason = (
        f"{unit}: of all NaN {figures['clamped_to_plus_448']:.0%} became +448, "
        f"{figures['clamped_to_minus_448']:.0%} -448, {figures['still_nan']:.0%} stayed NaN; "
        f"torch's own cast keeps {figures['torch_cast_still_nan']:.0%} of them NaN"
    )
    return decide(given.keeps("min_share", clamped), {"subject": unit, **figures}, reason)


# --- Claims that only a real engine can decide: NaN in padding ------------------------------------------


_OPTIONS: dict[str, Any] = {
    "units": only("installed"),
    "thresholds": ("min_share",),
    "needs_gpu": True,
    "needs": "an installed vLLM that starts",
}


def _judge_padding(given: ClaimCases) -> ClaimJudgement:
    """Judge in how many padded steps some padding row held NaN.

    One engine with too few steps refutes the claim; all engines must have run to confirm it.
    """
    rows = given.rows()
    counted = [row for row in rows if "not_run" not in row]
    padded = [row for row in counted if row.get("steps_with_padding")]
    if not padded:
        return untested("no engine ran a padded step", {"rows": rows})
    steps = "; ".join(
        f"{row['config']}: {row['nan_in_padding']} of {row['steps_with_padding']}"
        for row in rows
        if row.get("steps_with_padding")
    )
    reason = f"steps of a tiny model with NaN in padding, {steps}"
    if not given.keeps("min_share", (row["nan_share"] for row in padded)):
        return decide(False, {"rows": rows}, reason)
    absent = [row for row in counted if row not in padded]
    if absent:
        why = "; ".join(f"{row['config']}: {row.get('error', 'no padded step')}" for row in absent)
        return untested(f"{reason}; {why}", {"rows": rows})
    return decide(True, {"rows": rows}, reason)


judge_padding_holds_nan, judge_padding_holds_nan_dp = (
    claim(key, measure=f"moedoctor.upstream.engine.nan_padding:{function}", **_OPTIONS)(_judge_padding)
    for key, function in (
        ("padding_holds_nan", "measure_padding"),
        ("padding_holds_nan_dp", "measure_parallel_padding"),
    )
)


class NanRouting(CountFault):
    """Duplicate expert ids from NaN router logits."""

    id = "MD001"
    together = 4
    parameters = NanRoutingParameters
    tiers = list_tiers(Tier.MODEL, installed=Tier.KERNEL, vllm=Tier.KERNEL)
    summary = "{router} E={experts} K={top_k} {dtype}"
    claims = (
        *(judge_same_expert, judge_always_distinct, judge_separate_launch, judge_fused_is_free),
        *(judge_fp8_clamps_nan, judge_padding_holds_nan, judge_padding_holds_nan_dp),
    )
    symptoms: ClassVar = {
        "clean_rows_with_duplicates": (
            "{} of {rows} rows are clean and hold a duplicate id: not because of NaN"
        ),
        "rows_with_duplicates": "{} of {rows} rows hold a duplicate id",
        "rows_out_of_range": "{} of {rows} rows hold an id out of range",
        "rows_with_nonfinite_weights": "{} of {rows} rows have a weight that is NaN or Inf",
        "clean_rows_wrong": "{} of {rows} rows are clean and differ from the reference",
    }
    right = "0 of {rows} rows hold a duplicate id"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Sum up the rows of each named release, and find the first release that NaN does not harm.

        If clean rows hold duplicates too, the duplicates of the NaN rows have another cause and do not count.
        """
        rows: dict[str, dict[str, int]] = {}
        for release, cases in group_by_release(results, has="rows_with_duplicates").items():
            sums = {key: sum(case.evidence.get(key, 0) for case in cases) for key in _SUMMED}
            sums["duplicates_from_nan"] += sum(
                case.evidence["nan_rows_with_duplicates"]
                for case in cases
                if not case.evidence["clean_rows_with_duplicates"]
            )
            rows[release] = sums
        if not rows:
            return {}
        failing = [release for release, sums in rows.items() if sums["duplicates_from_nan"]]
        return {
            "releases": [{"release": release, **sums} for release, sums in rows.items()],
            "last_failing_release": failing[-1] if failing else None,
            "first_fixed_release": find_first_after(list(rows), failing),
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        bias = "" if parameters["bias"] == "none" else f" {parameters['bias']} bias"
        return super().describe(parameters) + bias
