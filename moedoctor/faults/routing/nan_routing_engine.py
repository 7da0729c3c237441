"""Claims about MD001 that only a real engine can decide: NaN in padding, what it does, what tracing costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Observation

Limits = Mapping[str, float]


def judge_padding(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """In how many padded steps some padding row held NaN; memory made NaN on purpose does not count.

    One engine with too few refutes; all must have run for a confirmation.
    """
    rows = _rows(units)
    asked = [row for row in rows if "held NaN before" not in row["config"] and "not_run" not in row]
    padded = [row for row in asked if row.get("steps_with_padding")]
    if not padded:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, "no engine ran a padded step")
    said = "; ".join(
        f"{row['config']}: {row['nan_in_padding']} of {row['steps_with_padding']}"
        for row in rows
        if row.get("steps_with_padding")
    )
    said = f"steps of a tiny model with NaN in padding, {said}"
    if min(row["nan_share"] for row in padded) < limits["min_share"]:
        return ClaimJudgement(ClaimVerdict.REFUTED, {"rows": rows}, said)
    absent = [row for row in asked if row not in padded]
    if absent:
        why = "; ".join(f"{row['config']}: {row.get('error', 'no padded step')}" for row in absent)
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, f"{said}; {why}")
    return ClaimJudgement(ClaimVerdict.CONFIRMED, {"rows": rows}, said)


def judge_end_to_end(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """With NaN in padding the release repeats no expert and keeps real rows; 0.19.1's top-k repeats."""
    rows = {row["engine"]: row for row in _rows(units)}
    own, old = rows.get("own topk_softmax", {}), rows.get("topk_softmax of 0.19.1", {})
    evidence = {"rows": list(rows.values())}
    untouched = rows.get("untouched", {"error": "it is not there"})
    if "error" in untouched:
        why = f"nothing to hold tokens against; the untouched engine: {untouched['error']}"
        return ClaimJudgement(ClaimVerdict.UNTESTED, evidence, why)
    if not own.get("nan_in_padding"):
        return ClaimJudgement(ClaimVerdict.UNTESTED, evidence, "no padding row was made NaN")
    if not own.get("routers_watched"):
        return ClaimJudgement(ClaimVerdict.UNTESTED, evidence, "no router was watched")
    said = f"own: {_routed(own)}"
    holds = (
        own["prompts_with_the_same_tokens"] >= limits["min_share"] * own["prompts"]
        and own["rows_with_repeated_ids"] <= limits["max_rows"]
    )
    if not holds:
        return ClaimJudgement(ClaimVerdict.REFUTED, evidence, said)
    if not old.get("nan_in_padding"):
        why = old.get("error", "the kernels of 0.19.1 were not given: --vllm-kernels 0.19.1=PATH")
        return ClaimJudgement(ClaimVerdict.UNTESTED, evidence, f"{said}; 0.19.1: {why}")
    if not old.get("routers_watched"):
        return ClaimJudgement(ClaimVerdict.UNTESTED, evidence, f"{said}; 0.19.1: no router was watched")
    verdict = _verdict(old["rows_with_repeated_ids"] >= limits["min_old_rows"])
    return ClaimJudgement(verdict, evidence, f"{said}; 0.19.1: {_routed(old)}")


def _routed(row: Mapping[str, Any]) -> str:
    return (
        f"{row['rows_with_repeated_ids']} rows with repeated ids, of them "
        f"{row['real_rows_with_repeated_ids']} real, "
        f"{row['prompts_with_the_same_tokens']} of {row['prompts']} prompts keep their tokens"
    )


def judge_overhead(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """A decode step with the trace over one without; what alike engines differ by counts both ways.

    Judged by events around the model where there are some: all that the trace does is between them, and
    scheduling and sampling, whose times vary more than the trace takes, are not. The wall clock must agree.
    """
    rows, limit = _rows(units), limits["max_overhead"]
    seen = [(*_share(row), row["overhead"], row["noise"]) for row in rows]
    above = any(max(share - noise, wall - wall_noise) > limit for share, noise, wall, wall_noise in seen)
    below = all(max(share + noise, wall) <= limit for share, noise, wall, _ in seen)
    said = "; ".join(_cost(row) for row in rows)
    if not above and not below:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {"rows": rows}, f"{said}; too much to tell")
    return ClaimJudgement(_verdict(below), {"rows": rows}, said)


def _share(row: Mapping[str, Any]) -> tuple[float, float]:
    """What the trace adds, and by how much alike engines differ, as shares of the whole step."""
    if "gpu_overhead" not in row:
        return row["overhead"], row["noise"]
    of_step = row["gpu_step_ms_off"] / row["step_ms_off"]
    return row["gpu_overhead"] * of_step, row["gpu_noise"] * of_step


def _cost(row: Mapping[str, Any]) -> str:
    said = (
        f"{row['model']}, {row['layers']} layers, batch {row['batch']}: {row['overhead']:+.1%} "
        f"({row['overhead_p20']:+.1%} to {row['overhead_p80']:+.1%}) of {row['step_ms_off']:.2f} ms, "
        f"two engines that are alike differ by {row['noise']:.1%}"
    )
    if "gpu_overhead" not in row:
        return said
    share, noise = _share(row)
    return f"{said}, by events around the model {share:+.1%} and {noise:.1%} of that step"


def _verdict(holds: bool) -> ClaimVerdict:
    return ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED


def _rows(units: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [
        row for one in units if isinstance(one.outcome, Observation) for row in one.outcome.evidence["rows"]
    ]


def _installed(subjects: Sequence[str]) -> Sequence[str]:
    return [one for one in subjects if one == "installed"]


def _claim(key: str, judge: Any, measure: str, *thresholds: str) -> ClaimTest:
    def run(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        from moedoctor.upstream.engine import nan_overhead, nan_parallel
        from moedoctor.upstream.engine import nan_padding_engines as nan_engine

        elsewhere = {"overhead": nan_overhead, "overhead_tiny": nan_overhead, "parallel_table": nan_parallel}
        module = elsewhere.get(measure, nan_engine)
        return Observation({"rows": getattr(module, measure)(sources)})

    return ClaimTest(
        key,
        judge,
        run,
        _installed,
        needs_gpu=True,
        needs="an installed vLLM that starts",
        thresholds=thresholds,
    )


ENGINE_CLAIMS = (
    _claim("padding_holds_nan", judge_padding, "padding_table", "min_share"),
    _claim("padding_holds_nan_dp", judge_padding, "parallel_table", "min_share"),
    _claim("end_to_end", judge_end_to_end, "end_to_end", "min_share", "max_rows", "min_old_rows"),
    _claim("trace_overhead", judge_overhead, "overhead", "max_overhead"),
    _claim("trace_overhead_tiny", judge_overhead, "overhead_tiny", "max_overhead"),
)
