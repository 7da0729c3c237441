"""What was said about duplicate expert ids in FlashInfer's CUTLASS MoE, and how each is decided.

Only FlashInfer's own code, compiled from its own headers, confirms or refutes what was said about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moedoctor.faults.base import ClaimJudgement, ClaimTest, Measurement
from moedoctor.results import CaseResult, CaseVerdict, ClaimVerdict, Crash, Death, Observation

BOUNDS_CHECK = "0.6.10"
"""The release that brought the bounds check back (#2762)."""

_SHOWN = 20
"""Exceptions that the evidence holds in full."""

Limits = Mapping[str, float]


def behaviour_of(case: CaseResult) -> str:
    """What finalize did, in two or three words."""
    seen = case.evidence
    if seen.get("death") == Death.ILLEGAL_MEMORY_ACCESS.value:
        return "illegal access"
    if case.verdict is CaseVerdict.ERROR:
        return "error"
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
    """Which releases end in an illegal access for some content of the map's memory."""
    found = _by_release(cases)
    if not found:
        return _none_ran()
    crashing = [name for name, counts in found.items() if counts.get("illegal access")]
    said = f"in {', '.join(crashing) or 'no release'}, where the map's memory held garbage"
    holds = len(crashing) >= limits["min_releases"]
    verdict = ClaimVerdict.CONFIRMED if holds else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, {"releases": _rows(found)}, said)


def judge_bounds_check(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Illegal accesses of the releases that have the bounds check."""
    found = {name: counts for name, counts in _by_release(cases).items() if _has_bounds_check(name)}
    if not found:
        return ClaimJudgement(
            ClaimVerdict.UNTESTED, {}, f"no release from {BOUNDS_CHECK} on ran: --flashinfer X.Y.Z=PATH"
        )
    bad = {name: counts.get("illegal access", 0) for name, counts in found.items()}
    newest = list(found)[-1]
    said = f"{newest}: " + ", ".join(f"{what} in {count} cases" for what, count in found[newest].items())
    verdict = ClaimVerdict.CONFIRMED if max(bad.values()) <= limits["max_cases"] else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, {"releases": _rows(found)}, said)


def judge_newest_is_silent(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Wrong sums without an error in the newest release that ran."""
    found = _by_release(cases)
    if not found:
        return _none_ran()
    newest = list(found)[-1]
    wrong = found[newest].get("wrong sum, no error", 0)
    verdict = ClaimVerdict.CONFIRMED if wrong >= limits["min_cases"] else ClaimVerdict.REFUTED
    said = f"{newest}: wrong sums and no error in {wrong} of {sum(found[newest].values())} cases"
    return ClaimJudgement(verdict, {"releases": _rows(found)}, said)


def judge_maps(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Whether the three-step sort leaves exactly one entry unwritten for each repeated slot, and no other."""
    rows = [{"release": unit, **row} for unit, seen in _seen(units) for row in seen["rows"]]
    sorted_rows = [row for row in rows if row["path"] == "three-step"]
    off = [row for row in sorted_rows if row["unwritten_entries"] != row["repeated_slots"]]
    verdict = ClaimVerdict.CONFIRMED if len(off) <= limits["max_maps"] else ClaimVerdict.REFUTED
    said = f"in {len(sorted_rows) - len(off)} of {len(sorted_rows)} maps of {len(_seen(units))} releases"
    return ClaimJudgement(verdict, {"paths": _paths(rows), "different": off[:_SHOWN]}, said)


def judge_fused(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Sums that are not right where the fused prologue made the map."""
    rows = [{"release": unit, **row} for unit, seen in _seen(units) for row in seen["rows"]]
    wrong = [row for row in rows if row["rows_right"] != row["rows"] or row["path"] != "fused"]
    verdict = ClaimVerdict.CONFIRMED if len(wrong) <= limits["max_calls"] else ClaimVerdict.REFUTED
    said = f"all rows right in {len(rows) - len(wrong)} of {len(rows)} calls of {len(_seen(units))} releases"
    return ClaimJudgement(verdict, _calls(rows, wrong), said)


def judge_right(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Sums that are not right; a measurement that died counts as one."""
    rows = [{"release": unit, **row} for unit, seen in _seen(units) for row in seen["rows"]]
    died = [one.unit for one in units if isinstance(one.outcome, Crash)]
    wrong = [row for row in rows if row["rows_right"] != row["rows"]]
    good = len(wrong) + len(died) <= limits["max_calls"]
    said = f"all rows right in {len(rows) - len(wrong)} of {len(rows)} calls of {len(_seen(units))} releases"
    said += f"; {', '.join(died)} died" if died else ""
    verdict = ClaimVerdict.CONFIRMED if good else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, _calls(rows, wrong), said)


def judge_boundary(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """The largest number of local experts that the fused prologue takes, by tokens."""
    rows = [{"release": unit, **row} for unit, seen in _seen(units) for row in seen["rows"]]
    wanted = limits["experts"]
    off = [row for row in rows if row["tokens"] <= limits["tokens"] and row["most_experts"] != wanted]
    said = "; ".join(
        f"{tokens} tokens: {', '.join(str(one) for one in sorted(found))}"
        for tokens, found in _experts_by_tokens(rows).items()
    )
    verdict = ClaimVerdict.REFUTED if off else ClaimVerdict.CONFIRMED
    table = [
        {"release": name, **{f"{row['tokens']} tokens": row["most_experts"] for row in seen["rows"]}}
        for name, seen in _seen(units)
    ]
    return ClaimJudgement(verdict, {"most_local_experts": table}, f"the most local experts, {said}")


def judge_guard_cost(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Microseconds of our guard in a CUDA graph."""
    rows = [row for _, seen in _seen(units) for row in seen["rows"]]
    worst = max(row["validate_us"] for row in rows)
    said = "; ".join(
        f"{row['shape']}: validate {row['validate_us']:.2f} µs, deduplicate {row['deduplicate_us']:.2f} µs"
        for row in rows
    )
    verdict = ClaimVerdict.CONFIRMED if worst <= limits["max_us"] else ClaimVerdict.REFUTED
    return ClaimJudgement(verdict, {"rows": rows}, said)


def judge_whole_runner(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """Not run: only the routing maps and finalize are compiled here."""
    return ClaimJudgement(
        ClaimVerdict.UNTESTED,
        {},
        "the whole cutlass_fused_moe, 181 source files, was not built; its maps and finalize are cases",
    )


def _paths(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Who makes the map: tokens and slots down, local experts across; releases that differ are named."""
    table: dict[tuple[int, int], dict[int, dict[str, set[str]]]] = {}
    for row in rows:
        cell = table.setdefault((row["tokens"], row["top_k"]), {}).setdefault(row["experts"], {})
        cell.setdefault(row["path"], set()).add(row["release"])
    return [
        {
            "tokens": tokens,
            "top_k": top_k,
            **{f"{experts} experts": _path(cell) for experts, cell in sorted(cells.items())},
        }
        for (tokens, top_k), cells in sorted(table.items())
    ]


def _path(cell: Mapping[str, set[str]]) -> str:
    if len(cell) == 1:
        return next(iter(cell))
    return "; ".join(f"{path}: {', '.join(sorted(names))}" for path, names in sorted(cell.items()))


def _calls(rows: Sequence[Mapping[str, Any]], wrong: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Calls and those whose rows are all right, by release, and the first that are not."""
    names = list(dict.fromkeys(row["release"] for row in rows))
    counts = [
        {
            "release": name,
            "calls": sum(row["release"] == name for row in rows),
            "calls_right": sum(row["release"] == name and row["rows_right"] == row["rows"] for row in rows),
        }
        for name in names
    ]
    return {"calls": counts, "wrong": list(wrong[:_SHOWN])}


def _experts_by_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for row in rows:
        found.setdefault(row["tokens"], set()).add(row["most_experts"])
    return found


def _rows(found: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    return [{"release": name, **counts} for name, counts in found.items()]


def _seen(units: Sequence[Measurement]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(one.unit, one.outcome.evidence) for one in units if isinstance(one.outcome, Observation)]


def _measure(name: str) -> Any:
    """The measuring function `name`, imported in the child: it needs torch."""

    def measure(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
        from moedoctor.faults import duplicate_ids_probe

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
