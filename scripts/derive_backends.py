"""Turns what vLLM answered at every point of the grid into rows that a person can read.

A kernel's answers are taken apart into the predicates that vLLM asks one after the other (device, gate,
activation, scheme, parallelism); where that does not give back every single answer, the rest is kept as
exceptions, so a table is exact or the derivation fails. `scripts/extract_backends.py` calls this.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Point = tuple[str, str, str]
"""(capability, parallel, activation)."""

_KINDS = (
    (re.compile(r"^kernel does not support current device cuda"), "device"),
    (re.compile(r"^kernel does not support no act_and_mul MLP layer$"), "gate"),
    (re.compile(r"^kernel does not support MoEActivation\.\w+ activation$"), "activation"),
    (re.compile(r"^kernel does not support quantization scheme "), "scheme"),
    (re.compile(r"^kernel does not support parallel config "), "parallel"),
    (re.compile(r"^kernel does not support \('standard',\) activation format$"), "format"),
)


def kind(reason: str | None) -> str:
    """What kind of reason upstream's text is: empty for a kernel that fits, the text itself where it is of
    no kind."""
    if reason is None:
        return ""
    return next((name for pattern, name in _KINDS if pattern.match(reason)), reason)


PREDICATES = ("device", "gate", "activation", "scheme", "parallel")
"""In the order in which vLLM asks. What a kernel asks beyond them may come before or after."""


def predicates(answers: Mapping[Point, str]) -> dict[str, Any]:
    """The columns of one kernel's row, from the kind of its answer at every point.

    Raises AssertionError where the row does not give back every answer. Where a kernel's own check comes
    before the common ones, another reason of the same refusal may be named first.
    """
    axes = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*answers, strict=True))
    row: dict[str, Any] = {}
    left = dict(answers)
    for name, column, axis in (
        ("device", "devices", 0),
        ("gate", "gates", 2),
        ("activation", "activations", 2),
        ("scheme", "scheme_devices", 0),
        ("parallel", "parallel", 1),
    ):
        row[column] = [one for one in axes[axis] if _passes(name, [left[p] for p in left if p[axis] == one])]
        left = {point: answer for point, answer in left.items() if point[axis] in row[column]}
    gates = row.pop("gates")
    row["ungated"] = any(one.endswith("_no_mul") for one in gates)
    if row["scheme_devices"] == row["devices"]:
        del row["scheme_devices"]
    refused = {point: answer for point, answer in left.items() if answer}
    open_to_all = frozenset(answers) - {point for point, answer in left.items() if not answer}
    row["then"] = [
        {"reason": reason, **box}
        for reason in dict.fromkeys(refused.values())
        for box in boxes(
            [p for p in refused if refused[p] == reason], open_to_all - _others(refused, reason), axes
        )
    ]
    for point, answer in answers.items():
        said = first_failing(row, point)
        assert said == answer or (said and answer and answer not in (*PREDICATES, "format")), (
            row,
            point,
            answer,
        )
    return {name: value for name, value in row.items() if name != "then" or value}


def _passes(name: str, answers: Sequence[str]) -> bool:
    """Whether the predicate lets at least one through; a kernel's own check may have answered before it."""
    own = [one for one in answers if one and one not in (*PREDICATES, "format")]
    return any(one != name for one in answers if one not in own) or bool(answers and len(own) == len(answers))


def _others(refused: Mapping[Point, str], reason: str) -> frozenset[Point]:
    return frozenset(point for point, one in refused.items() if one != reason)


def first_failing(row: Mapping[str, Any], point: Point) -> str:
    """What the row says of a point: the kind of the first reason, empty where the kernel fits."""
    capability, parallel, activation = point
    if capability not in row["devices"]:
        return "device"
    if activation.endswith("_no_mul") and not row["ungated"]:
        return "gate"
    if activation not in row["activations"]:
        return "activation"
    if capability not in row.get("scheme_devices", row["devices"]):
        return "scheme"
    if parallel not in row["parallel"]:
        return "parallel"
    return next((str(one["reason"]) for one in row.get("then", ()) if contains(one, point)), "")


def contains(box: Mapping[str, Any], point: Point) -> bool:
    """Whether the point lies in a box; a side that is not named is open."""
    names = ("capabilities", "parallel", "activations")
    return all(name not in box or value in box[name] for name, value in zip(names, point, strict=True))


def boxes(
    points: Iterable[Point], allowed: frozenset[Point], axes: Sequence[Sequence[str]]
) -> list[dict[str, list[str]]]:
    """Few boxes that cover all of `points` and lie within `allowed`; a side that is as long as its axis is
    left out."""
    left, found = set(points), []
    names = ("capabilities", "parallel", "activations")
    while left:
        seed = min(left, key=lambda p: tuple(axis.index(one) for axis, one in zip(axes, p, strict=True)))
        grown = [_grown(seed, order, allowed, axes) for order in itertools.permutations(range(3))]
        best = max(
            grown, key=lambda sides: (len(left & set(itertools.product(*sides))), sum(map(len, sides)))
        )
        left -= set(itertools.product(*best))
        sides = zip(names, best, axes, strict=True)
        found.append({name: list(side) for name, side, axis in sides if len(side) < len(axis)})
    return found


def _grown(
    seed: Point, order: Sequence[int], allowed: frozenset[Point], axes: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    sides: list[tuple[str, ...]] = [(one,) for one in seed]
    for axis in order:
        fits = [
            one
            for one in axes[axis]
            if all(p in allowed for p in itertools.product(*sides[:axis], (one,), *sides[axis + 1 :]))
        ]
        sides[axis] = tuple(fits)
    return sides


def pack(values: Sequence[str], axis: Sequence[str]) -> str:
    """``*`` for all, runs of capabilities as ``7.5-9.0``, else the values with spaces between."""
    if list(values) == list(axis):
        return "*"
    if not axis[0][0].isdigit():
        return " ".join(values)
    runs: list[list[str]] = []
    for value in values:
        if runs and axis.index(value) == axis.index(runs[-1][-1]) + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(run) for run in runs)


def merge(
    rows: Iterable[tuple[str, dict[str, Any]]], releases: Iterable[str], key: str
) -> list[dict[str, Any]]:
    """One row for each run of consecutive releases in which its facts are the same; the source is the
    first's."""
    order = list(releases)
    runs: dict[str, dict[str, Any]] = {}
    done: list[dict[str, Any]] = []
    for release, row in rows:
        facts = json.dumps({name: value for name, value in row.items() if name != "source"})
        run = runs.get(facts)
        if run is None or order.index(release) > run["last"] + 1:
            run = runs[facts] = {"first": order.index(release), "last": 0, "row": row}
            done.append(run)
        run["last"] = order.index(release)
    found = []
    for run in done:
        first, last = order[run["first"]], order[run["last"]]
        source = run["row"].pop("source")
        found.append(
            {
                "releases": first if first == last else f"{first}-{last}",
                **run["row"],
                "source": f"{first}: {source}",
            }
        )
    return found
