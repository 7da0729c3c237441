"""The answers of a fleet together: groups, outliers, odd bits, missing answers, and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from moedoctor.fleet import parity
from moedoctor.fleet.facts import NO_GPU, Member, make_member
from moedoctor.fleet.groups import (
    Difference,
    NodeGroup,
    NumberSpread,
    Outlier,
    find_outliers,
    group,
    summarize_numbers,
)
from moedoctor.fleet.rows import SKIPPED, Place, Row, Status


@dataclass(frozen=True)
class Node:
    """A node, or a GPU of one."""

    name: str
    status: Status
    reason: str | None
    """The reason why it gave no report that can be compared."""
    group: int | None
    seconds: float | None
    """The time of the command there."""
    start_seconds: float | None = field(default=None, kw_only=True)
    """The time to start a Ray worker there; 0 if one was there."""
    file: str | None
    """The node's own report, in the folder `reports`."""


@dataclass(frozen=True)
class NodesWithFinding:
    """The number of nodes that call something wrong."""

    id: str
    nodes: int


@dataclass(frozen=True)
class FleetSummary:
    """Nodes by what became of them, and the releases of moedoctor that answered."""

    statuses: Mapping[str, int]
    moedoctor_versions: Mapping[str, int]
    interrupted: bool
    exit_code: int
    """1 if something is wrong, 2 if no node answered or every node's own answer is 2, else 0."""


@dataclass(frozen=True)
class FleetReport:
    """The groups of a fleet, and what differs; each node's report is named by its file."""

    command: ClassVar[str] = "fleet"
    question: tuple[str, ...]
    """The command with its arguments, as the nodes got it."""
    per: Literal["node", "gpu"]
    reports: str | None
    """The folder of the nodes' reports."""
    nodes: tuple[Node, ...]
    groups: tuple[NodeGroup, ...]
    individual: Mapping[str, int]
    not_read: Mapping[str, int]
    outliers: tuple[Outlier, ...]
    bits: parity.Judgement | None
    findings: tuple[NodesWithFinding, ...]
    summary: FleetSummary
    numbers: tuple[NumberSpread, ...] = field(default=(), metadata={"sparse": True})
    """The numbers of equal GPUs, also if they are too few for an outlier. Older releases wrote none."""

    @property
    def noun(self) -> str:
        """The thing that is counted."""
        return "GPU" if self.per == "gpu" else "node"

    @property
    def unanswered(self) -> tuple[Node, ...]:
        """The nodes of which nothing can be compared."""
        return tuple(node for node in self.nodes if node.status is not Status.ANSWERED)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for the exit code 1."""
        total = sum(len(each.nodes) for each in self.groups)
        reasons = [f"{each.id} on {each.nodes} of {total} {self.noun}s" for each in self.findings]
        for each in self.groups:
            for difference in each.wrong:
                if not difference.fact.startswith("finding "):
                    what = f"{describe(difference)}: {difference.rule}"
                    reasons.append(f"{list_names(each.nodes)}: {what}")
        kinds = {name: each.kind for each in self.groups for name in each.nodes}
        for outlier in self.outliers:
            if outlier.worse and kinds[outlier.name] != NO_GPU:
                figures = f"{outlier.value:.4g}, the median {outlier.median:.4g}"
                reasons.append(f"{outlier.name}: {outlier.number} is {figures}")
        if self.bits is not None:
            reasons += [f"{odd.name}: {odd.case}: {odd.what}" for odd in self.bits.oddities]
            reasons += self.bits.undecided
        failed = Counter(node.status.value for node in self.unanswered if node.status not in SKIPPED)
        for status, count in sorted(failed.items()):
            reasons.append(f"{count} of {len(self.nodes)} {self.noun}s: {status}")
        return tuple(reasons)

    @property
    def closing(self) -> tuple[str, ...]:
        """The reasons, also of the exit code 2."""
        if self.reasons or self.summary.exit_code != 2:
            return self.reasons
        if len(self.unanswered) == len(self.nodes):
            return (f"no {self.noun} answered, so nothing was checked",)
        return (f"every {self.noun} answered with exit code 2: nothing could be checked there",)


class Collector:
    """Takes rows one by one and keeps what is compared: ten thousand reports are too much to hold."""

    def __init__(self, *, show_hosts: bool) -> None:
        self._show_hosts = show_hosts
        self._rows: list[tuple[Row, Member | None, Mapping[str, Any]]] = []
        """(row without its report, its facts, the report of its bits)"""
        self._versions: Counter[str] = Counter()
        self._exit_codes: set[int] = set()

    def add(self, row: Row) -> None:
        """Take a row; its report is read and let go."""
        report = row.report or {}
        if (version := report.get("moedoctor")) is not None:
            self._versions[str(version)] += 1
        member, bits = None, report if report.get("command") == "fleet parity" else {}
        if row.status is Status.ANSWERED:
            member = make_member(row, "")
            self._exit_codes.add(row.exit_code)
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
        grouping = group(members)
        groups = {name: each.group for each in grouping.groups for name in each.nodes}
        found: Counter[str] = Counter()
        for each in grouping.groups:
            found.update(dict.fromkeys(each.findings, len(each.nodes)))
        statuses = Counter(row.status.value for row, _, _ in ordered)
        versions = dict(sorted(self._versions.items()))
        report = FleetReport(
            question=tuple(question),
            per="gpu" if per_gpu else "node",
            reports=folder,
            nodes=tuple(
                Node(
                    name,
                    row.status,
                    row.reason,
                    groups.get(name),
                    row.seconds,
                    row.file,
                    start_seconds=row.start_seconds,
                )
                for name, row, _, _ in named
            ),
            **vars(grouping),
            outliers=find_outliers(members),
            bits=parity.judge(bits) if bits else None,
            findings=tuple(NodesWithFinding(*item) for item in sorted(found.items())),
            summary=FleetSummary(dict(sorted(statuses.items())), versions, interrupted, 0),
            numbers=summarize_numbers(members),
        )
        refused = statuses[Status.REFUSED.value] == len(report.nodes) > 0
        code = 2 if refused else 1 if report.reasons else 2 if self._exit_codes <= {2} else 0
        return replace(report, summary=replace(report.summary, exit_code=code))

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


def list_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def describe(difference: Difference) -> str:
    """Return ``FlashInfer 0.6.6 (others 0.7.2.post1)`` or ``MD011 strikes there only``."""
    subject, _, name = difference.fact.partition(" ")
    if subject == "finding" and name:
        if difference.value == "none":
            return f"{name} does not strike there"
        return f"{name} strikes there only" if difference.only_here else f"{name} strikes"
    return f"{difference.fact} {difference.value} (others {difference.others})"
