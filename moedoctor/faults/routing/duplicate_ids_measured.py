"""What MD011's own measurements say of a claim: figures of FlashInfer's code that need no case each.

A counterexample refutes. A release that died, or nothing of the kind seen, leaves the claim untested; who is
missing is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moedoctor.interfaces import ClaimJudgement, Measurement
from moedoctor.results import CaseResult, ClaimVerdict, Crash, Death, Observation, Skip

_SHOWN = 20
"""Exceptions that the evidence holds in full."""

Limits = Mapping[str, float]


def judge_maps(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Whether the three-step sort leaves exactly one entry unwritten for each repeated slot, and no other.

    Both by the rows that were sorted and by the map itself, which holds there what it held before.
    """
    rows = _rows(units)
    sorted_rows = [row for row in rows if row["path"] == "three-step"]
    off = [
        row
        for row in sorted_rows
        if not row["entries_as_before"] == row["unwritten_entries"] == row["repeated_slots"]
    ]
    verdict = _verdict(units, refuted=len(off) > limits["max_maps"], seen=sorted_rows)
    said = f"in {len(sorted_rows) - len(off)} of {len(sorted_rows)} maps of {_whose(sorted_rows)}"
    evidence = {"paths": _paths(rows), "different": off[:_SHOWN]}
    return ClaimJudgement(verdict, evidence, said + _missing(units))


def judge_fused(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Sums that are not right where the fused prologue made the map; an illegal access counts as one."""
    return _judge_sums(units, limits, lambda row: row["path"] == "fused")


def judge_right(cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits) -> ClaimJudgement:
    """Sums that are not right; an illegal access counts as one."""
    return _judge_sums(units, limits, lambda row: True)


def _judge_sums(
    units: Sequence[Measurement], limits: Limits, as_meant: Callable[[Mapping[str, Any]], bool]
) -> ClaimJudgement:
    rows = _rows(units)
    wrong = [row for row in rows if row["rows_right"] != row["rows"] or not as_meant(row)]
    illegal = [
        one
        for one in units
        if isinstance(one.outcome, Crash) and one.outcome.death is Death.ILLEGAL_MEMORY_ACCESS
    ]
    verdict = _verdict(units, refuted=len(wrong) + len(illegal) > limits["max_calls"], seen=rows)
    said = f"all rows right in {len(rows) - len(wrong)} of {len(rows)} calls of {_whose(rows)}"
    return ClaimJudgement(verdict, _calls(rows, wrong), said + _missing(units))


def judge_boundary(
    cases: Sequence[CaseResult], units: Sequence[Measurement], limits: Limits
) -> ClaimJudgement:
    """The largest number of local experts that the fused prologue takes, by tokens."""
    rows = _rows(units)
    claimed = [row for row in rows if row["tokens"] <= limits["tokens"]]
    off = [row for row in claimed if row["most_experts"] != limits["experts"]]
    said = "; ".join(
        f"{tokens} tokens: {', '.join(str(one) for one in sorted(found))}"
        for tokens, found in _experts_by_tokens(rows).items()
    )
    verdict = _verdict(units, refuted=bool(off), seen=claimed)
    table = [
        {"release": name, **{f"{row['tokens']} tokens": row["most_experts"] for row in seen["rows"]}}
        for name, seen in _seen(units)
    ]
    said = f"the most local experts, {said or 'not seen'}{_missing(units)}"
    return ClaimJudgement(verdict, {"most_local_experts": table}, said)


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


def _seen(units: Sequence[Measurement]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(one.unit, one.outcome.evidence) for one in units if isinstance(one.outcome, Observation)]


def _rows(units: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [{"release": unit, **row} for unit, seen in _seen(units) for row in seen["rows"]]


def _whose(rows: Sequence[Mapping[str, Any]]) -> str:
    """The installed release may be a named one, too, so it is not counted with them."""
    found = {row["release"] for row in rows}
    named = len(found - {"installed"})
    parts = [f"{named} named release{'s' * (named != 1)}"] if named else []
    return " and ".join([*parts, *(["the installed one"] if "installed" in found else [])]) or "no release"


def _verdict(
    units: Sequence[Measurement], *, refuted: bool, seen: Sequence[Mapping[str, Any]]
) -> ClaimVerdict:
    """Refuted by a counterexample; else nothing is confirmed where a release died or nothing was `seen`."""
    if refuted:
        return ClaimVerdict.REFUTED
    died = any(isinstance(one.outcome, Crash) for one in units)
    return ClaimVerdict.UNTESTED if died or not seen else ClaimVerdict.CONFIRMED


def _missing(units: Sequence[Measurement]) -> str:
    """The releases that the figures are not of, and why, to go after them."""
    died = [f"{one.unit} died: {one.outcome.message}" for one in units if isinstance(one.outcome, Crash)]
    left = [f"{one.unit} not run: {one.outcome.reason}" for one in units if isinstance(one.outcome, Skip)]
    return "".join(f"; {one}" for one in (*died, *left))
