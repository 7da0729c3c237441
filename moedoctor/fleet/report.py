"""What a fleet's answers say together: groups, outliers, odd bits, missing answers, and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moedoctor.fleet import parity
from moedoctor.fleet.facts import NO_GPU, Member, make_member
from moedoctor.fleet.groups import (
    Difference,
    Grouping,
    NumberSpread,
    Outlier,
    find_outliers,
    group,
    summarize_numbers,
)
from moedoctor.fleet.rows import SKIPPED, Place, Row, Status


@dataclass(frozen=True)
class FleetReport:
    """The whole answer."""

    question: tuple[str, ...]
    """The command with its arguments, as the nodes got it."""
    rows: tuple[tuple[str, Row], ...]
    """(name, row) of every node or GPU, by name; the rows hold no reports any more."""
    grouping: Grouping
    outliers: tuple[Outlier, ...]
    bits: parity.Judgement | None
    versions: Mapping[str, int]
    per_gpu: bool = False
    folder: str | None = None
    """Where the nodes' reports are."""
    exit_codes: tuple[int, ...] = ()
    interrupted: bool = False
    numbers: tuple[NumberSpread, ...] = ()
    """The numbers of equal GPUs, also if they are too few for an outlier."""

    @property
    def unanswered(self) -> tuple[tuple[str, Row], ...]:
        """The nodes of which nothing can be compared."""
        return tuple((name, row) for name, row in self.rows if row.status is not Status.ANSWERED)

    @property
    def findings(self) -> Mapping[str, int]:
        """Finding -> on how many nodes it strikes."""
        counts: Counter[str] = Counter()
        for one_group in self.grouping.groups:
            counts.update(dict.fromkeys(one_group.findings, len(one_group.members)))
        return dict(sorted(counts.items()))

    @property
    def noun(self) -> str:
        """The thing that is counted."""
        return "GPU" if self.per_gpu else "node"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for the exit code 1."""
        total = sum(len(one_group.members) for one_group in self.grouping.groups)
        reasons = [f"{name} on {count} of {total} {self.noun}s" for name, count in self.findings.items()]
        for one_group in self.grouping.groups:
            for difference in one_group.wrong:
                if not difference.fact.startswith("finding "):
                    names = ", ".join(one_group.members[:3])
                    more = f" and {len(one_group.members) - 3} more" if len(one_group.members) > 3 else ""
                    reasons.append(f"{names}{more}: {describe(difference)}: {difference.rule}")
        kinds = {name: each.kind for each in self.grouping.groups for name in each.members}
        for outlier in self.outliers:
            if outlier.worse and kinds[outlier.name] != NO_GPU:
                figures = f"{outlier.value:.4g}, the median {outlier.median:.4g}"
                reasons.append(f"{outlier.name}: {outlier.number} is {figures}")
        if self.bits is not None:
            reasons += [f"{odd.name}: {odd.case}: {odd.what}" for odd in self.bits.oddities]
            reasons += self.bits.undecided
        failed = [row for _, row in self.unanswered if row.status not in SKIPPED]
        for status, count in sorted(Counter(row.status.value for row in failed).items()):
            reasons.append(f"{count} of {len(self.rows)} {self.noun}s: {status}")
        return tuple(reasons)

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, 2 if no node answered or every node's own answer is 2, else 0."""
        refused = [row for _, row in self.unanswered if row.status is Status.REFUSED]
        if refused and len(refused) == len(self.rows):
            return 2
        if self.reasons:
            return 1
        return 2 if set(self.exit_codes) <= {2} else 0

    @property
    def closing(self) -> tuple[str, ...]:
        """The reasons, also of the exit code 2."""
        if self.reasons or self.exit_code != 2:
            return self.reasons
        if not self.exit_codes:
            return (f"no {self.noun} answered, so nothing was checked",)
        return (f"every {self.noun} answered with exit code 2: nothing could be checked there",)


class Collector:
    """Takes rows one by one and keeps what is compared: ten thousand reports are too much to hold."""

    def __init__(self, *, show_hosts: bool) -> None:
        self._show_hosts = show_hosts
        self._rows: list[tuple[Row, Member | None, Mapping[str, Any]]] = []
        """(row without its report, its facts, the report of its bits)"""
        self._versions: Counter[str] = Counter()
        self._exit_codes: list[int] = []

    def add(self, row: Row) -> None:
        """Take a row; its report is read and let go."""
        report = row.report or {}
        if (version := report.get("moedoctor")) is not None:
            self._versions[str(version)] += 1
        member, bits = None, report if report.get("command") == "fleet parity" else {}
        if row.status is Status.ANSWERED:
            member = make_member(row, "")
            self._exit_codes.append(row.exit_code)
        self._rows.append((replace(row, report=None, checksums={}), member, bits))

    def report(
        self,
        question: Sequence[str],
        *,
        per_gpu: bool = False,
        folder: str | None = None,
        interrupted: bool = False,
    ) -> FleetReport:
        """Compare what was taken; the order in which it came changes nothing."""
        ordered = sorted(self._rows, key=lambda taken: self._order(taken[0].place))
        names = _name_rows([row for row, _, _ in ordered], show_hosts=self._show_hosts)
        named = [(name, *taken) for name, taken in zip(names, ordered, strict=True)]
        members = [replace(member, name=name) for name, _, member, _ in named if member]
        bits = {name: bits for name, _, member, bits in named if member and bits}
        return FleetReport(
            tuple(question),
            tuple((name, row) for name, row, _, _ in named),
            group(members),
            find_outliers(members),
            parity.judge(bits) if bits else None,
            dict(sorted(self._versions.items())),
            per_gpu,
            folder,
            tuple(sorted(self._exit_codes)),
            interrupted,
            summarize_numbers(members),
        )

    def _order(self, place: Place) -> tuple[str, str, str]:
        """Return what sorts the rows. Files do not hold hosts, and give the numbers that the nodes gave."""
        hidden = ("", place.node or place.host, str(place.gpu))
        return (place.host, str(place.gpu), place.node) if self._show_hosts else hidden


def _name_rows(rows: Sequence[Row], *, show_hosts: bool) -> list[str]:
    """Return a name for each row: its host, or a number of the node. Equal names get a number behind them."""
    numbers: dict[str, int] = {}
    names: list[str] = []
    for row in rows:
        if show_hosts:
            names.append(row.place.name)
            continue
        number = numbers.setdefault(row.place.node or row.place.host, len(numbers) + 1)
        names.append(replace(row.place, host=f"node-{number:04d}").name)
    counts, used = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        if counts[name] > 1:
            used[name] += 1
            names[index] = f"{name} ({used[name]})"
    return names


def describe(difference: Difference) -> str:
    """Return ``FlashInfer 0.6.6 (others 0.7.2.post1)`` or ``MD011 strikes there only``."""
    subject, _, name = difference.fact.partition(" ")
    if subject == "finding" and name:
        if difference.value == "none":
            return f"{name} does not strike there"
        return f"{name} strikes there only" if difference.only_here else f"{name} strikes"
    return f"{difference.fact} {difference.value} (others {difference.others})"
