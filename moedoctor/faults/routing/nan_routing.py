"""MD001: a token with NaN router logits gets the same expert K times.

vLLM's own code decides the claims about its kernels and its engine. The restated control never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from packaging.version import Version
from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    Fault,
    Judgement,
    Parameters,
    claim,
    decide,
    judge_counts,
    only,
    releases,
    untested,
)
from moedoctor.results import Case, CaseResult, Evidence, Observation, Scalar, Tier

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


class NanRoutingParameters(Parameters):
    """One point of the matrix."""

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
        if self.top_k > self.experts:
            yield f"top_k: {self.top_k} is more than experts {self.experts}"
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
_REPEATS = 3
"""How often each release is timed, in turn with the other one."""


def _is_fixed(subject: str) -> bool:
    return Version(subject.removeprefix("vllm@")) >= Version(FIRST_FIXED)


def _around_the_fix(subjects: Sequence[str]) -> Sequence[str]:
    """Return the last release before the fix and the first one after it, in turn; nothing without both."""
    named = [subject for subject in releases(subjects, "vllm") if subject.startswith("vllm@")]
    before = [subject for subject in named if not _is_fixed(subject)][-1:]
    after = [subject for subject in named if _is_fixed(subject)][:1]
    return [*before, *after] * _REPEATS if before and after else ()


@claim("same_expert", thresholds=("min_share",))
def same_expert(given: ClaimCases) -> ClaimJudgement:
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
def always_distinct(given: ClaimCases) -> ClaimJudgement:
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
    needs_gpu=True,
    needs="the kernels of a release: --vllm-kernels X.Y.Z=PATH",
    thresholds=("min_overhead", "max_overhead"),
)
def separate_launch(given: ClaimCases) -> ClaimJudgement:
    """Judge what `torch.nan_to_num` before the kernel adds to it."""
    ((unit, figures),) = given.measured()
    overheads = [row["overhead"] for row in figures["rows"]]
    holds = given.keeps("min_overhead", overheads) and given.keeps("max_overhead", overheads)
    costs = ", ".join(f"{row['kernel']} {row['overhead']:+.0%}" for row in figures["rows"])
    return decide(holds, {"subject": unit, **figures}, f"{costs} at 128 x 128, {unit}")


@claim(
    "fused_is_free",
    measure=f"{_BENCH}:kernel_times",
    units=_around_the_fix,
    needs_gpu=True,
    needs=f"the kernels of a release before {FIRST_FIXED} and of one from it on: --vllm-kernels, twice",
    thresholds=("max_overhead",),
)
def fused_is_free(given: ClaimCases) -> ClaimJudgement:
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
    measure=f"{_BENCH}:fp8_nan",
    units=lambda subjects: releases(subjects, "vllm"),
    needs_gpu=True,
    needs="the kernels of a release: --vllm-kernels X.Y.Z=PATH",
    thresholds=("min_share",),
)
def fp8_clamps_nan(given: ClaimCases) -> ClaimJudgement:
    """Judge what became of NaN in the release's own FP8 quantisation kernel."""
    (unit, figures), *_ = given.measured()  # the first release whose quantisation kernel could be loaded
    clamped = figures["clamped_to_plus_448"] + figures["clamped_to_minus_448"]
    reason = (
        f"{unit}: of all NaN {figures['clamped_to_plus_448']:.0%} became +448, "
        f"{figures['clamped_to_minus_448']:.0%} -448, {figures['still_nan']:.0%} stayed NaN; "
        f"torch's own cast keeps {figures['torch_cast_still_nan']:.0%} of them NaN"
    )
    return decide(given.keeps("min_share", clamped), {"subject": unit, **figures}, reason)


def _is_as_fast(given: ClaimCases) -> ClaimJudgement:
    """Judge our time over the peer's, each shape by its own limit."""
    ((unit, figures),) = given.measured()
    rows, evidence = figures["rows"], {"subject": unit, **figures}
    wrong = [row["shape"] for row in rows if not row["correct"]]
    if wrong:
        return decide(False, evidence, f"wrong results at {', '.join(wrong)}")
    over = [
        row
        for row in rows
        if row["time_ratio"] > given.limits["max_ratio_8192" if row["tokens"] >= 8192 else "max_ratio"]
    ]
    ratios = ", ".join(f"{row['shape']} {row['time_ratio']:.2f}" for row in (over or rows))
    return decide(not over, evidence, f"ours/{unit}: {ratios}")


speed, never_slower = (
    claim(
        key,
        measure=f"{_BENCH}:{function}",
        units=only("vllm@0.21.0"),  # no other release replaces it
        needs_gpu=True,
        needs="the kernels of 0.21.0: --vllm-kernels 0.21.0=PATH",
        thresholds=("max_ratio", "max_ratio_8192"),
    )(_is_as_fast)
    for key, function in (("speed", "against_peer"), ("never_slower", "other_routers_against_peer"))
)


@claim("policy_cost", measure=f"{_BENCH}:policy_cost", needs_gpu=True, thresholds=("max_overhead",))
def policy_cost(given: ClaimCases) -> ClaimJudgement:
    """Judge each policy's time over that of the same kernel without one."""
    (figures,) = given.evidence()
    worst = max(figures["rows"], key=lambda row: float(row["overhead"]))
    reason = f"{worst['overhead']:+.1%} at most, at {worst['shape']} with {worst['policy']}"
    return decide(given.keeps("max_overhead", worst["overhead"]), figures, reason)


# --- Claims that only a real engine can decide: NaN in padding, what it does, what tracing costs --------


_ENGINES = "moedoctor.upstream.engine"
_OPTIONS: dict[str, Any] = {
    "units": only("installed"),
    "needs_gpu": True,
    "needs": "an installed vLLM that starts",
}


def _padding_holds_nan(given: ClaimCases) -> ClaimJudgement:
    """Judge in how many padded steps some padding row held NaN.

    Engines whose memory was made NaN on purpose do not count. One engine with too few steps refutes the
    claim; all engines must have run to confirm it.
    """
    rows = given.rows()
    counted = [row for row in rows if "held NaN before" not in row["config"] and "not_run" not in row]
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


padding_holds_nan, padding_holds_nan_dp = (
    claim(key, measure=f"{_ENGINES}.nan_padding:{function}", thresholds=("min_share",), **_OPTIONS)(
        _padding_holds_nan
    )
    for key, function in (("padding_holds_nan", "padding_table"), ("padding_holds_nan_dp", "parallel_table"))
)


@claim(
    "end_to_end",
    measure=f"{_ENGINES}.nan_padding:end_to_end",
    thresholds=("min_share", "max_rows", "min_old_rows"),
    **_OPTIONS,
)
def end_to_end(given: ClaimCases) -> ClaimJudgement:
    """Judge whether NaN in padding leaves the release's own routing and tokens alone, and 0.19.1's not.

    Where its kernels were not given or do not load, as beside torch 2.14, its restated top-k decides.
    """
    rows = {row["engine"]: row for row in given.rows()}
    own = rows.get("own topk_softmax", {})
    untouched = rows.get("untouched", {"error": "it did not run"})
    evidence = {"rows": list(rows.values())}
    if "error" in untouched:
        return untested(f"no tokens to compare with; the untouched engine: {untouched['error']}", evidence)
    doubt = _untouched_by_nan(own, "no padding row was made NaN")
    if doubt is not None:
        return untested(doubt, evidence)
    reason = f"own: {_routed(own)}"
    same = own["prompts_with_the_same_tokens"] / own["prompts"]
    if not (given.keeps("min_share", same) and given.keeps("max_rows", own["rows_with_repeated_ids"])):
        return decide(False, evidence, reason)
    kernels, restated = (rows.get(f"topk_softmax of 0.19.1{end}", {}) for end in ("", ", restated"))
    missing = "" if kernels else "its kernels were not given: --vllm-kernels 0.19.1=PATH"
    if "does not load" in str(kernels.get("error")):
        missing = str(kernels["error"])
    old, name = (restated, f"0.19.1, restated ({missing})") if missing else (kernels, "0.19.1")
    doubt = _untouched_by_nan(old, "no padding row was made NaN" if old else "it did not run")
    if doubt is not None:
        return untested(f"{reason}; {name}: {doubt}", evidence)
    holds = given.keeps("min_old_rows", old["rows_with_repeated_ids"])
    return decide(holds, evidence, f"{reason}; {name}: {_routed(old)}")


def _untouched_by_nan(row: Mapping[str, Any], no_nan: str) -> str | None:
    """Return why NaN cannot have reached the routing of this engine, or None if it can."""
    if not row.get("nan_in_padding"):
        return str(row.get("error", no_nan))
    return None if row.get("routers_watched") else "no router was watched"


def _routed(row: Mapping[str, Any]) -> str:
    return (
        f"{row['rows_with_repeated_ids']} rows with repeated ids, of them "
        f"{row['real_rows_with_repeated_ids']} real, "
        f"{row['prompts_with_the_same_tokens']} of {row['prompts']} prompts keep their tokens"
    )


@claim(
    "planted_nan",
    measure=f"{_ENGINES}.nan_planted:planted_table",
    thresholds=("max_missed", "max_false"),
    **_OPTIONS,
)
def planted_nan(given: ClaimCases) -> ClaimJudgement:
    """Judge whether the trace found a planted NaN in the first layer's attention in step 2, and no other."""
    given_rows = given.rows()
    ran = [row for row in given_rows if "error" not in row and row["runner_in_use"] == row["runner"]]
    planted = [row for row in ran if row["planted"] != "nothing"]
    clean = [row for row in ran if row["planted"] == "nothing"]
    missed = [row for row in planted if (row["first_step"], row["first_point"]) != (2, _FIRST_ATTENTION)]
    false = [row for row in clean if row["first_step"] or not row["routers_watched"]]
    elsewhere = [row for row in ran if row["first_token"] != row["planted_token"]]
    reason = (
        f"{len(planted) - len(missed)} of {len(planted)} engines with a planted NaN name its place, "
        f"{len(clean) - len(false)} of {len(clean)} without one report none"
    )
    holds = given.keeps("max_missed", len(missed)) and given.keeps("max_false", len(false))
    absent = [f"{row['runner']}, {row['mode']}: {_why_absent(row)}" for row in given_rows if row not in ran]
    if elsewhere or (holds and (absent or not planted or not clean)):
        return untested("; ".join((reason, *absent)), {"rows": given_rows})
    return decide(holds, {"rows": given_rows}, reason)


_FIRST_ATTENTION = "model.layers.0.self_attn.attn"


def _why_absent(row: Mapping[str, Any]) -> str:
    return str(row.get("error") or f"the engine has the model runner {row['runner_in_use']}")


def _trace_is_cheap(given: ClaimCases) -> ClaimJudgement:
    """Judge a decode step with the trace over one without.

    The difference between two identical engines is added to both sides. If there are events around the
    model, they decide: all that the trace does is between them, while scheduling and sampling vary by more
    than the trace costs. The wall clock must agree.
    """
    rows, limit = given.rows(), given.limits["max_overhead"]
    if any(0 in row.get("compared", ()) for row in rows):
        return untested("an engine compared no call with the reference", {"rows": rows})
    costs = [(*_added(row), row["overhead"], row["noise"]) for row in rows]
    above = any(max(share - noise, wall - wall_noise) > limit for share, noise, wall, wall_noise in costs)
    below = all(max(share + noise, wall) <= limit for share, noise, wall, _ in costs)
    reason = "; ".join(_cost(row) for row in rows)
    if not above and not below:
        return untested(f"{reason}; too much to tell", {"rows": rows})
    return decide(below, {"rows": rows}, reason)


trace_overhead, trace_overhead_tiny, record_overhead, record_overhead_crash, record_overhead_mismatch = (
    claim(key, measure=f"{_ENGINES}.nan_overhead:{function}", thresholds=("max_overhead",), **_OPTIONS)(
        _trace_is_cheap
    )
    for key, function in (
        ("trace_overhead", "overhead"),
        ("trace_overhead_tiny", "overhead_tiny"),
        ("record_overhead", "recording"),
        ("record_overhead_crash", "recording_crash"),
        ("record_overhead_mismatch", "recording_mismatch"),
    )
)


def _added(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return what the trace adds, and the difference of identical engines, as shares of the whole step."""
    if "gpu_overhead" not in row:
        return row["overhead"], row["noise"]
    of_step = row["gpu_step_ms_off"] / row["step_ms_off"]
    return row["gpu_overhead"] * of_step, row["gpu_noise"] * of_step


def _cost(row: Mapping[str, Any]) -> str:
    wall = (
        f"{row['model']}, {row['layers']} layers, batch {row['batch']}: {row['overhead']:+.1%} "
        f"({row['overhead_p20']:+.1%} to {row['overhead_p80']:+.1%}) of {row['step_ms_off']:.2f} ms, "
        f"two identical engines differ by {row['noise']:.1%}"
    )
    if "compared" in row:
        return (
            f"{wall}; means of {row['rounds']} rounds in which {sum(row['compared'])} calls were compared, "
            f"{row['compare_ms']:.0f} ms each beside the engine"
        )
    if "gpu_overhead" not in row:
        return wall
    share, noise = _added(row)
    return f"{wall}, by events around the model {share:+.1%} and {noise:.1%} of that step"


_SYMPTOMS = {
    "clean_rows_with_duplicates": "{} of {rows} rows are clean and hold a duplicate id: not because of NaN",
    "rows_with_duplicates": "{} of {rows} rows hold a duplicate id",
    "rows_out_of_range": "{} of {rows} rows hold an id out of range",
    "rows_with_nonfinite_weights": "{} of {rows} rows have a weight that is NaN or Inf",
    "clean_rows_wrong": "{} of {rows} rows are clean and differ from the reference",
}


class NanRouting(Fault):
    """Duplicate expert ids from NaN router logits."""

    id = "MD001"
    together = 4
    parameters = NanRoutingParameters
    tiers = {
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "installed": (Tier.KERNEL,),
        "vllm": (Tier.KERNEL,),
    }
    lab = "moedoctor.faults.routing.nan_routing_lab"
    claims = (
        *(same_expert, always_distinct, separate_launch, fused_is_free, fp8_clamps_nan, speed, never_slower),
        *(
            policy_cost,
            padding_holds_nan,
            padding_holds_nan_dp,
            end_to_end,
            planted_nan,
            trace_overhead,
            trace_overhead_tiny,
            record_overhead,
            record_overhead_crash,
            record_overhead_mismatch,
        ),
    )

    def judge(self, case: Case, observation: Observation) -> Judgement:
        return judge_counts(observation.evidence, _SYMPTOMS, "0 of {rows} rows hold a duplicate id")

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Sum up the rows of each named release, and find the first release that NaN does not harm.

        If clean rows hold duplicates too, the duplicates of the NaN rows have another cause and do not count.
        """
        rows: dict[str, dict[str, int]] = {}
        for case in results:
            if case.subject.startswith("vllm@") and "rows_with_duplicates" in case.evidence:
                sums = rows.setdefault(case.subject.removeprefix("vllm@"), dict.fromkeys(_SUMMED, 0))
                for key in _SUMMED:
                    sums[key] += case.evidence.get(key, 0)
                if not case.evidence["clean_rows_with_duplicates"]:
                    sums["duplicates_from_nan"] += case.evidence["nan_rows_with_duplicates"]
        if not rows:
            return {}
        order = sorted(rows, key=Version)
        failing = [release for release in order if rows[release]["duplicates_from_nan"]]
        after = order[order.index(failing[-1]) + 1 :] if failing else []
        return {
            "releases": [{"release": release, **rows[release]} for release in order],
            "last_failing_release": failing[-1] if failing else None,
            "first_fixed_release": after[0] if after else None,
        }

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        shape = (
            f"{parameters['router']} E={parameters['experts']} K={parameters['top_k']} {parameters['dtype']}"
        )
        return shape if parameters["bias"] == "none" else f"{shape} {parameters['bias']} bias"
