"""Groups of nodes with the same facts, what differs between them, and numbers far from the others'.

`group`, `find_outliers` and `summarize_numbers` are pure, and the order in which nodes come changes nothing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moedoctor.fleet.facts import Member, is_better_higher
from moedoctor.text import load_yaml

ABSENT = "none"
NOT_READ = "not read in time"
_LEAST_FOR_STATISTICS = 4
_LEAST_INDIVIDUAL = 4
_SET_OR_STRIKES = re.compile(r"[A-Z][A-Z0-9_]+|finding .+")
MOST_DISTANCE = 5.0
"""Robust standard deviations from the median, above which a number is an outlier."""
_MAD_TO_SIGMA = 1.4826
_LEAST_SIGMA = 0.01
"""Share of the median: repeated measurements of one GPU differ by about so much."""

RULES: Sequence[tuple[str, str]] = load_yaml("moedoctor.fleet", "rules.yaml")
"""A fact (as a pattern) that must not differ between nodes with the same GPUs, and why."""


@dataclass(frozen=True)
class Difference:
    """A fact of a group that is not that of the group it is compared with."""

    fact: str
    value: str
    others: str
    """The value in the group that this one is compared with."""
    only_here: bool
    """True if no other group has this value."""
    rule: str | None
    """The reason why it is wrong, or None for a difference that may be."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same facts. The first group is the largest."""

    group: int
    """Its number, from 1 on."""
    kind: str
    """The models of the GPUs."""
    nodes: tuple[str, ...]
    compared_with: int | None
    """The number of the group that it is compared with; None for the largest one."""
    differences: tuple[Difference, ...]
    findings: Mapping[str, str]
    facts: Mapping[str, str] | None = field(default=None, metadata={"sparse": True})
    """Of the first group only; each other group has `differences`."""

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that a rule calls wrong."""
        return tuple(difference for difference in self.differences if difference.rule is not None)


@dataclass(frozen=True)
class Grouping:
    """The groups, the largest first, and the facts that are not compared."""

    groups: tuple[NodeGroup, ...]
    individual: Mapping[str, int]
    """Facts with another value on most nodes -> how many values. They make no groups."""
    not_read: Mapping[str, int]
    """Checksums that some nodes had no time for -> on how many."""


@dataclass(frozen=True)
class Outlier:
    """A number that is far from that of equal nodes."""

    name: str
    number: str
    value: float
    median: float
    distance: float | Literal["inf", "-inf"]
    """In robust standard deviations (1.4826 MAD, at least 1 % of the median); negative below the median.
    Infinite beside numbers that are all 0, which JSON has as text."""
    worse: bool
    of: int
    """The number of nodes that the median is of."""


@dataclass(frozen=True)
class NumberSpread:
    """A number as nodes with the same GPUs measured it."""

    kind: str
    number: str
    of: int
    """The number of nodes that measured it."""
    median: float
    mad: float
    """The median distance from the median."""
    least: float
    largest: float


def group(members: Sequence[Member]) -> Grouping:
    """Return the groups of nodes with the same facts, each with what differs from the largest.

    A group is compared with the largest group of the same GPUs, and only then can a rule call a difference
    wrong. The largest group of its GPUs is compared with the largest of all.
    """
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for member in members:
        for fact, value in member.facts.items():
            values[fact][value] += 1
    for counts in values.values():
        if missing := len(members) - counts.total():
            counts[ABSENT] += missing
    not_read = {fact: counts[NOT_READ] for fact, counts in values.items() if counts[NOT_READ]}
    # Most nodes have a value of their own, as of a variable with the node's address.
    individual = {
        fact: len(counts)
        for fact, counts in values.items()
        if len(members) >= _LEAST_INDIVIDUAL and 2 * len(counts) > len(members)
    }
    shared = [fact for fact in values if fact not in not_read and fact not in individual]
    compared = sorted(fact for fact in shared if len(values[fact]) > 1)
    rooms: dict[tuple[str, ...], list[Member]] = defaultdict(list)
    for member in members:
        room = (member.kind, *(member.facts.get(fact, ABSENT) for fact in compared))
        rooms[room].append(member)
    ordered = sorted(
        rooms.items(), key=lambda room: (-len(room[1]), _count_unusual(compared, room[0]), room[0])
    )
    largest_of: dict[str, int] = {}
    for number, (key, _) in enumerate(ordered):
        largest_of.setdefault(key[0], number)
    groups = []
    for number, (key, inside) in enumerate(ordered):
        equal = largest_of[key[0]]
        other = None if number == 0 else equal if equal != number else 0
        others = key if other is None else ordered[other][0]
        differences = tuple(
            Difference(
                fact,
                own,
                theirs,
                only_here=values[fact][own] == len(inside),
                rule=find_rule(fact) if key[0] == others[0] else None,
            )
            for fact, own, theirs in zip(compared, key[1:], others[1:], strict=True)
            if own != theirs
        )
        names = tuple(sorted(member.name for member in inside))
        first = min(inside, key=lambda member: member.name)
        facts = {fact: first.facts.get(fact, ABSENT) for fact in sorted(shared)}
        findings = dict(sorted(first.findings.items()))
        compared_with, shown = (None, facts) if other is None else (other + 1, None)
        groups.append(NodeGroup(number + 1, key[0], names, compared_with, differences, findings, shown))
    return Grouping(tuple(groups), dict(sorted(individual.items())), dict(sorted(not_read.items())))


def _count_unusual(facts: Sequence[str], values: tuple[str, ...]) -> int:
    """Return how many variables are set and entries strike. Of groups of one size, fewer is usual."""
    return sum(
        value != ABSENT and bool(_SET_OR_STRIKES.fullmatch(fact))
        for fact, value in zip(facts, values[1:], strict=True)
    )


def find_rule(fact: str) -> str | None:
    """Return why a difference of this fact between equal nodes is wrong; None if it may be."""
    return next((why for pattern, why in RULES if re.fullmatch(pattern, fact)), None)


def find_outliers(members: Sequence[Member]) -> tuple[Outlier, ...]:
    """Return the numbers that are far from the median of nodes with the same GPUs, the farthest first.

    Fewer than four numbers have no outlier: the median of three cannot say which of them is odd.
    """
    found = []
    for (_, number), measured in _gather_numbers(members).items():
        if len(measured) < _LEAST_FOR_STATISTICS:
            continue
        median, spread = _compute_median_and_mad(measured.values())
        sigma = max(_MAD_TO_SIGMA * spread, _LEAST_SIGMA * abs(median))
        for name, value in measured.items():
            far = value - median
            distance = far / sigma if sigma else math.copysign(math.inf, far) if far else 0.0
            if abs(distance) > MOST_DISTANCE:
                worse = (distance < 0) == is_better_higher(number)
                found.append(Outlier(name, number, value, median, distance, worse, len(measured)))
    found.sort(key=lambda outlier: (-abs(float(outlier.distance)), outlier.name, outlier.number))
    return tuple(found)


def summarize_numbers(members: Sequence[Member]) -> tuple[NumberSpread, ...]:
    """Return every number of nodes with the same GPUs, by GPU and then in the order of the nodes' reports."""
    measured = _gather_numbers(sorted(members, key=lambda member: member.name))
    spreads = []
    for (kind, number), of in sorted(measured.items(), key=lambda item: item[0][0]):
        values = of.values()
        median, mad = _compute_median_and_mad(values)
        spreads.append(NumberSpread(kind, number, len(of), median, mad, min(values), max(values)))
    return tuple(spreads)


def _gather_numbers(members: Sequence[Member]) -> Mapping[tuple[str, str], Mapping[str, float]]:
    """Return (GPUs, number) -> node -> value."""
    numbers: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for member in members:
        for number, value in member.numbers.items():
            numbers[(member.kind, number)][member.name] = value
    return numbers


def _compute_median_and_mad(values: Collection[float]) -> tuple[float, float]:
    median = statistics.median(values)
    return median, statistics.median(abs(value - median) for value in values)
