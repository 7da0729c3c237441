"""MD011: repeated expert ids of a token in FlashInfer's CUTLASS MoE.

FlashInfer's own code, compiled from its own headers, decides the claims about it, not the restated sort.
A counterexample refutes a claim. If a release died, or nothing of the kind was measured, it is untested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Literal

from packaging.version import Version
from pydantic import Field

from moedoctor.faults.base import (
    ClaimCases,
    ClaimJudgement,
    CountFault,
    Judgement,
    RoutedParameters,
    claim,
    decide,
    list_tiers,
    releases,
    untested,
)
from moedoctor.results import Case, CaseResult, CaseVerdict, Crash, Death, Evidence, Scalar, Skip, Tier

BOUNDS_CHECK = "0.6.10"
"""The release that brought the bounds check back (#2762)."""

ILLEGAL = "illegal access"
OUT_OF_BOUNDS = "reads out of bounds"
"""Finalize took a row from beside the expert rows, where nothing stops it: a wrong sum without an error."""
SILENT = "wrong sum, no error"
ERROR = "error"
"""Another death than an illegal access, such as a hang. It does not show what finalize does."""


class DuplicateIdsParameters(RoutedParameters):
    """One point of the matrix: a call of the routing maps and finalize."""

    tokens: int = Field(300, ge=1, le=16_384)
    experts: int = Field(128, ge=1, le=1024, description="of all ranks together")
    top_k: int = Field(8, ge=1, le=64)
    ids: Literal["one_expert", "one_repeat", "distinct", "sentinel"] = Field(
        "one_expert",
        description="of a token: all the same, the second as the first, none repeated, half are -1",
    )
    memory: Literal["garbage", "earlier", "zeros", "minus_one"] = Field(
        "earlier", description="what the map's memory holds before; earlier is a healthy call's map"
    )
    finalize: Literal["normal", "no_filling"] = Field(
        "normal", description="no_filling is the kernel for expert parallelism with all-to-all"
    )
    ranks: int = Field(1, ge=1, le=64, description="expert-parallel ranks; each has its share of the experts")
    rank: int = Field(0, ge=0, le=63)
    seed: int = Field(0, ge=0)

    def problems(self) -> Iterator[str]:
        if self.finalize == "no_filling" and self.ranks < 2:
            yield "finalize: no_filling is taken with two ranks or more; expected ranks: 2"


def describe_behavior(case: CaseResult) -> str:
    """Return what finalize did, in two or three words."""
    if case.evidence.get("death") == Death.ILLEGAL_MEMORY_ACCESS.value:
        return ILLEGAL
    if case.verdict is CaseVerdict.ERROR:
        return ERROR
    kinds = {
        "rows_out_of_bounds": OUT_OF_BOUNDS,
        "rows_wrong": SILENT,
        "rows_with_the_repeat_dropped": "repeat dropped",
    }
    return next((words for key, words in kinds.items() if case.evidence[key]), "right")


# --- Claims that the cases decide -----------------------------------------------------------------------

Behavior = Mapping[str, Counter[str]]
"""Release -> what its finalize did with repeated ids -> in how many cases."""

_NONE_RAN = "no release's own code ran: --flashinfer X.Y.Z=PATH"


def _count_by_release(given: ClaimCases, ids: Sequence[str] = ("one_expert", "one_repeat")) -> Behavior:
    behavior: dict[str, Counter[str]] = {}
    for case in given.cases:
        named = case.subject.startswith("flashinfer@") and case.verdict is not CaseVerdict.SKIPPED
        if named and case.parameters["ids"] in ids:
            behavior.setdefault(case.subject, Counter())[describe_behavior(case)] += 1
    return {name: behavior[name] for name in releases(list(behavior), "flashinfer")}


def _make_table(behavior: Behavior) -> Evidence:
    return {"releases": [{"release": name, **counts} for name, counts in behavior.items()]}


def _judge(
    given: ClaimCases, limit: str, values: float | Iterable[float], behavior: Behavior, reason: str
) -> ClaimJudgement:
    """Judge `values` by the threshold `limit`, and name the cases that ended in another error.

    Without those errors the counts might be higher. So they leave open a count that is below its limit.
    """
    errors = {name: counts[ERROR] for name, counts in behavior.items() if ERROR in counts}
    reason += "".join(f"; {name}: {count} cases ended in another error" for name, count in errors.items())
    holds = given.keeps(limit, values)
    is_below = holds is limit.startswith("max_")
    if errors and is_below:
        return untested(reason, _make_table(behavior))
    return decide(holds, _make_table(behavior), reason)


@claim("illegal_access", thresholds=("min_releases",))
def judge_illegal_access(given: ClaimCases) -> ClaimJudgement:
    """Judge how many releases read out of bounds for some content of the map's memory, noticed or not."""
    behavior = _count_by_release(given)
    if not behavior:
        return untested(_NONE_RAN)
    crashing = [name for name, counts in behavior.items() if counts[ILLEGAL]]
    beside = [name for name, counts in behavior.items() if counts[OUT_OF_BOUNDS]]
    reason = f"illegal accesses in {', '.join(crashing) or 'no release'}"
    if beside:
        reason += f"; rows from beside the expert rows read without an error in {', '.join(beside)}"
    return _judge(given, "min_releases", len({*crashing, *beside}), behavior, reason)


@claim("bounds_check", thresholds=("max_cases",))
def judge_bounds_check(given: ClaimCases) -> ClaimJudgement:
    """Judge the reads out of bounds, noticed or not, of the releases that have the bounds check."""
    behavior = {
        name: counts
        for name, counts in _count_by_release(given).items()
        if Version(name.partition("@")[2]) >= Version(BOUNDS_CHECK)
    }
    if not behavior:
        return untested(f"no release from {BOUNDS_CHECK} on ran: --flashinfer X.Y.Z=PATH")
    newest, newest_counts = list(behavior.items())[-1]
    reason = f"{newest}: " + ", ".join(f"{what} in {count} cases" for what, count in newest_counts.items())
    bad = [counts[ILLEGAL] + counts[OUT_OF_BOUNDS] for counts in behavior.values()]
    return _judge(given, "max_cases", bad, behavior, reason)


@claim("whole_runner")
def judge_whole_runner(given: ClaimCases) -> ClaimJudgement:
    """Leave the claim open, for only maps and finalize are compiled. Name what they did with one expert."""
    behavior = _count_by_release(given, ids=("one_expert",))
    reason = "the whole cutlass_fused_moe was not built"
    if not behavior:
        return untested(f"{reason}; nor did its maps and finalize run")
    crashes = ", ".join(f"{name} in {row[ILLEGAL]} of {row.total()} cases" for name, row in behavior.items())
    reason += f"; its maps and finalize alone, all tokens on one expert, crash: {crashes}"
    return untested(reason, _make_table(behavior))


# --- Claims that measurements in the release's own code decide ------------------------------------------

_LAB = "moedoctor.faults.routing.duplicate_ids_lab"
_SHOWN = 20
"""Exceptions that the evidence holds in full."""
_MEASURED = {
    "units": lambda subjects: releases(subjects, "flashinfer"),
    "needs_gpu": True,
    "needs": "a release's own code: --flashinfer X.Y.Z=PATH",
}
Row = Mapping[str, Any]


@claim("maps", measure=f"{_LAB}:measure_maps", thresholds=("max_maps",), **_MEASURED)
def judge_maps(given: ClaimCases) -> ClaimJudgement:
    """Judge whether the three-step sort leaves one entry unwritten for each repeated id, and no other.

    Both by the rows that were sorted and by the map itself, which holds there what it held before.
    """
    rows = given.rows(unit_as="release")
    three_step = [row for row in rows if row["path"] == "three-step"]
    different = [
        row
        for row in three_step
        if not row["entries_as_before"] == row["unwritten_entries"] == row["repeated_slots"]
    ]
    reason = (
        f"in {len(three_step) - len(different)} of {len(three_step)} maps of {_count_releases(three_step)}"
    )
    evidence = {"paths": _make_path_table(rows), "different": different[:_SHOWN]}
    return _decide_measured(given, given.keeps("max_maps", len(different)), three_step, evidence, reason)


@claim("boundary", measure=f"{_LAB}:measure_boundary", thresholds=("experts", "tokens"), **_MEASURED)
def judge_boundary(given: ClaimCases) -> ClaimJudgement:
    """Judge the largest number of local experts that the fused prologue takes, by tokens."""
    rows = given.rows(unit_as="release")
    claimed = [row for row in rows if row["tokens"] <= given.limits["tokens"]]
    holds = all(row["most_experts"] == given.limits["experts"] for row in claimed)
    most: dict[int, set[int]] = {}
    for row in rows:
        most.setdefault(row["tokens"], set()).add(row["most_experts"])
    by_tokens = "; ".join(
        f"{tokens} tokens: {', '.join(map(str, sorted(experts)))}" for tokens, experts in most.items()
    )
    table = [
        {"release": unit, **{f"{row['tokens']} tokens": row["most_experts"] for row in figures["rows"]}}
        for unit, figures in given.measured()
    ]
    reason = f"the most local experts, {by_tokens or 'not measured'}"
    return _decide_measured(given, holds, claimed, {"most_local_experts": table}, reason)


def _decide_measured(
    given: ClaimCases, holds: bool, relevant: Sequence[Row], evidence: Evidence, reason: str
) -> ClaimJudgement:
    """Refute by a counterexample. Confirm nothing if a release died or no relevant row was measured."""
    crashes = {unit.unit: unit.outcome for unit in given.measurements if isinstance(unit.outcome, Crash)}
    skips = {unit.unit: unit.outcome for unit in given.measurements if isinstance(unit.outcome, Skip)}
    died = [f"{unit} died: {crash.message}" for unit, crash in crashes.items()]
    skipped = [f"{unit} not run: {skip.reason}" for unit, skip in skips.items()]
    reason = "; ".join((reason, *died, *skipped))
    if holds and (died or not relevant):
        return untested(reason, evidence)
    return decide(holds, evidence, reason)


def _count_releases(rows: Sequence[Row]) -> str:
    """Count the named releases. The installed one may be among them, so it is counted apart."""
    names = {row["release"] for row in rows}
    named = len(names - {"installed"})
    parts = [f"{named} named release{'s' * (named != 1)}"] * (named > 0)
    parts += ["the installed one"] * ("installed" in names)
    return " and ".join(parts) or "no release"


def _make_path_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return who makes the map: tokens and top_k down, local experts across. Differing releases are named."""
    table: dict[tuple[int, int], dict[str, Any]] = {}
    key = itemgetter("tokens", "top_k", "experts")
    for (tokens, top_k, experts), group in groupby(sorted(rows, key=key), key):
        by_path: dict[str, set[str]] = {}
        for row in group:
            by_path.setdefault(row["path"], set()).add(row["release"])
        named = [f"{path}: {', '.join(sorted(names))}" for path, names in sorted(by_path.items())]
        line = table.setdefault((tokens, top_k), {"tokens": tokens, "top_k": top_k})
        line[f"{experts} experts"] = "; ".join(named if len(by_path) > 1 else by_path)
    return list(table.values())


class DuplicateIds(CountFault):
    """Duplicate expert ids in FlashInfer's CUTLASS MoE.

    At the tier `kernel` the control is the installed FlashInfer's own code, given the ids as they are, and
    the fix is `deduplicate` before the same code.
    """

    id = "MD011"
    together = 4
    parameters = DuplicateIdsParameters
    tiers = list_tiers(Tier.MODEL, Tier.KERNEL, installed=Tier.KERNEL, flashinfer=Tier.KERNEL)
    restated_on_cpu = True
    claims = (judge_illegal_access, judge_bounds_check, judge_maps, judge_boundary, judge_whole_runner)
    installed_package = "flashinfer"
    symptoms: ClassVar = {
        "entries_out_of_bounds": "{} entries of the map lead out of bounds",
        "rows_out_of_bounds": f"{OUT_OF_BOUNDS} in {{}} of {{rows}} rows, without an error",
        "rows_wrong": "{} of {rows} rows hold a wrong sum, without an error",
        "rows_with_the_repeat_dropped": "the repeat is dropped in {} of {rows} rows",
        "unwritten_entries": "{} entries of the map are not written",
    }
    right = "{rows} of {rows} rows are right, {path}"

    def judge_crash(self, case: Case, crash: Crash) -> Judgement:
        if crash.death is Death.ILLEGAL_MEMORY_ACCESS:
            return Judgement(CaseVerdict.REPRODUCED, "illegal memory access in finalize")
        return super().judge_crash(case, crash)

    def absent(self, results: Sequence[CaseResult]) -> str | None:
        """If the installed FlashInfer gives right sums, the control cannot show anything at this tier."""
        control = [case for case in results if case.subject == "faulty"]
        clean = [case for case in control if case.verdict is CaseVerdict.CLEAN]
        if not clean or any(case.tier is not Tier.KERNEL for case in clean):
            return None
        kernel = sum(case.tier is Tier.KERNEL for case in control)
        return f"the installed FlashInfer gives the right sums in {len(clean)} of {kernel} cases"

    def conclude(self, results: Sequence[CaseResult]) -> Evidence:
        """Show what each release does with each kind of call."""
        table: dict[str, dict[str, str]] = {}
        for case in results:
            if case.subject not in ("faulty", "fixed") and case.verdict is not CaseVerdict.SKIPPED:
                table.setdefault(self.describe(case.parameters), {})[case.subject] = describe_behavior(case)
        names = list(dict.fromkeys(case.subject for case in results))
        columns = [name for name in names if any(name in row for row in table.values())]
        rows = [{"call": call, **{key: row.get(key, "") for key in columns}} for call, row in table.items()]
        return {"finalize": rows} if rows else {}

    def describe(self, parameters: Mapping[str, Scalar]) -> str:
        shape = f"T={parameters['tokens']} E={parameters['experts']} K={parameters['top_k']}"
        kernel = "" if parameters["finalize"] == "normal" else " no_filling"
        ranks = f" rank {parameters['rank']}/{parameters['ranks']}" if parameters["ranks"] != 1 else ""
        return f"{shape} {parameters['ids']} {parameters['memory']}{kernel}{ranks}"
