"""What was said about duplicate expert ids in FlashInfer's CUTLASS MoE, and how each is decided.

Only FlashInfer's own code, compiled from its own headers, confirms or refutes what was said about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.routing.duplicate_ids_measured import (
    Limits,
    judge_boundary,
    judge_fused,
    judge_guard_cost,
    judge_maps,
    judge_right,
)
from moedoctor.interfaces import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Death, Observation

BOUNDS_CHECK = "0.6.10"
"""The release that brought the bounds check back (#2762)."""

ERROR = "error"
"""Another death than an illegal access, such as a hang: it says nothing of what finalize does."""
OUT_OF_BOUNDS = "reads out of bounds"
"""Finalize took a row from beside the expert rows, where nothing stops it: a wrong sum without an error."""


def behaviour_of(case: CaseResult) -> str:
    """What finalize did, in two or three words."""
    seen = case.evidence
    if seen.get("death") == Death.ILLEGAL_MEMORY_ACCESS.value:
        return "illegal access"
    if case.verdict is CaseVerdict.ERROR:
        return ERROR
    if seen["rows_out_of_bounds"]:
        return OUT_OF_BOUNDS
    if seen["rows_wrong"]:
        return "wrong sum, no error"
    if seen["rows_with_the_repeat_dropped"]:
        return "repeat dropped"
    return "right"


def releases(subjects: Sequence[str]) -> list[str]:
    """Named releases in the order of their versions, then the installed one."""
    from packaging.version import Version

    named = [one for one in subjects if one.startswith("flashinfer@")]
    named.sort(key=lambda one: Version(one.partition("@")[2]))
    return [*named, *(one for one in subjects if one == "installed")]


def _has_bounds_check(subject: str) -> bool:
    from packaging.version import Version

    return Version(subject.partition("@")[2]) >= Version(BOUNDS_CHECK)


def _by_release(cases: Sequence[CaseResult]) -> dict[str, dict[str, int]]:
    """Release -> what its finalize did with repeated ids -> how often."""
    found: dict[str, dict[str, int]] = {}
    for one in cases:
        named = one.subject.startswith("flashinfer@") and one.verdict is not CaseVerdict.SKIPPED
        if named and one.parameters["ids"] in ("one_expert", "one_repeat"):
            counts = found.setdefault(one.subject, {})
            counts[behaviour_of(one)] = counts.get(behaviour_of(one), 0) + 1
    order = releases(list(found))
    return {name: found[name] for name in order}


def _none_ran() -> ClaimJudgement:
    return ClaimJudgement(ClaimVerdict.UNTESTED, {}, "no release's own code ran: --flashinfer X.Y.Z=PATH")


def judge_illegal_access(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Which releases read out of bounds for some content of the map's memory, noticed or not."""
    found = _by_release(cases)
    if not found:
        return _none_ran()
    crashing = [name for name, counts in found.items() if counts.get("illegal access")]
    beside = [name for name, counts in found.items() if counts.get(OUT_OF_BOUNDS)]
    said = f"illegal accesses in {', '.join(crashing) or 'no release'}"
    if beside:
        said += f"; rows from beside the expert rows read without an error in {', '.join(beside)}"
    holds = len({*crashing, *beside}) >= limits["min_releases"]
    verdict = ClaimVerdict.CONFIRMED if holds else _without_errors(found, ClaimVerdict.REFUTED)
    return ClaimJudgement(verdict, {"releases": _rows(found)}, said + _errors(found))


def judge_bounds_check(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Reads out of bounds of the releases that have the bounds check, with an illegal access or without."""
    found = {name: counts for name, counts in _by_release(cases).items() if _has_bounds_check(name)}
    if not found:
        return ClaimJudgement(
            ClaimVerdict.UNTESTED, {}, f"no release from {BOUNDS_CHECK} on ran: --flashinfer X.Y.Z=PATH"
        )
    bad = {
        name: counts.get("illegal access", 0) + counts.get(OUT_OF_BOUNDS, 0) for name, counts in found.items()
    }
    newest = list(found)[-1]
    said = f"{newest}: " + ", ".join(f"{what} in {count} cases" for what, count in found[newest].items())
    holds = max(bad.values()) <= limits["max_cases"]
    verdict = _without_errors(found, ClaimVerdict.CONFIRMED) if holds else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, {"releases": _rows(found)}, said + _errors(found))


def judge_newest_is_silent(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Wrong sums without an error in the newest release that ran."""
    found = _by_release(cases)
    if not found:
        return _none_ran()
    newest = list(found)[-1]
    wrong = found[newest].get("wrong sum, no error", 0)
    one = {newest: found[newest]}
    holds = wrong >= limits["min_cases"]
    verdict = ClaimVerdict.CONFIRMED if holds else _without_errors(one, ClaimVerdict.REFUTED)
    said = f"{newest}: wrong sums and no error in {wrong} of {sum(found[newest].values())} cases"
    return ClaimJudgement(verdict, {"releases": _rows(found)}, said + _errors(one))


def judge_whole_runner(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Open in any case, for only maps and finalize are compiled; what they did with one expert is told."""
    found = _by_release([one for one in cases if one.parameters["ids"] == "one_expert"])
    said = "the whole cutlass_fused_moe was not built"
    if not found:
        return ClaimJudgement(ClaimVerdict.UNTESTED, {}, f"{said}; nor did its maps and finalize run")
    told = [
        f"{name} in {counts.get('illegal access', 0)} of {sum(counts.values())} cases"
        for name, counts in found.items()
    ]
    said += f"; its maps and finalize alone, all tokens on one expert, crash: {', '.join(told)}"
    return ClaimJudgement(ClaimVerdict.UNTESTED, {"releases": _rows(found)}, said)


def _without_errors(found: Mapping[str, Mapping[str, int]], verdict: ClaimVerdict) -> ClaimVerdict:
    """`verdict`, which needs every case to have ended: untested where one died of something else."""
    return ClaimVerdict.UNTESTED if any(counts.get(ERROR) for counts in found.values()) else verdict


def _errors(found: Mapping[str, Mapping[str, int]]) -> str:
    """The cases that say nothing, to go after the others."""
    return "".join(
        f"; {name}: {counts[ERROR]} cases ended in another error"
        for name, counts in found.items()
        if ERROR in counts
    )


def _rows(found: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    return [{"release": name, **counts} for name, counts in found.items()]


def _measure(name: str) -> Any:
    """The measuring function `name`, imported in the child: it needs torch."""

    def measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        from moedoctor.faults.routing import duplicate_ids_probe

        return Observation({"rows": getattr(duplicate_ids_probe, name)(unit, device, sources)})

    return measure


def _gpu_claim(key: str, judge: Any, measure: str, *thresholds: str) -> ClaimTest:
    needs = "a release's own code: --flashinfer X.Y.Z=PATH"
    return ClaimTest(
        key, judge, _measure(measure), releases, needs_gpu=True, needs=needs, thresholds=thresholds
    )


CLAIMS = (
    ClaimTest("illegal_access", judge_illegal_access, thresholds=("min_releases",)),
    ClaimTest("bounds_check", judge_bounds_check, thresholds=("max_cases",)),
    ClaimTest("newest_is_silent", judge_newest_is_silent, thresholds=("min_cases",)),
    _gpu_claim("maps", judge_maps, "maps", "max_maps"),
    _gpu_claim("fused", judge_fused, "fused_sums", "max_calls"),
    _gpu_claim("boundary", judge_boundary, "boundary", "experts", "tokens"),
    _gpu_claim("distinct", judge_right, "distinct", "max_calls"),
    _gpu_claim("sentinels", judge_right, "sentinels", "max_calls"),
    _gpu_claim("deduplicated", judge_right, "deduplicated", "max_calls"),
    ClaimTest(
        "guard_cost",
        judge_guard_cost,
        _measure("guard_cost"),
        lambda subjects: ("ours",),
        needs_gpu=True,
        thresholds=("max_us",),
    ),
    ClaimTest("whole_runner", judge_whole_runner),
)
