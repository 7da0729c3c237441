"""The page of `moedoctor fleet`: the groups, who is in them, and what differs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import moedoctor
from moedoctor.fleet.groups import Difference, NumberSpread
from moedoctor.fleet.report import FleetReport, describe, list_names
from moedoctor.fleet.rows import SKIPPED, Status
from moedoctor.reporters.findings import Finding, Findings
from moedoctor.reporters.page import Block, Heading, Item, Paragraph, Span, Step, Table, show_table
from moedoctor.reporters.text import count_of, format_value

_FIRST = ("finding ", "verdict ", "claim ", "driver", "vLLM", "FlashInfer", "torch")
"""The facts that a reader wants first; after them those that a rule calls wrong, and then the others."""
_ENTRY = re.compile(r"MD\d{3}|PARITY")


@dataclass(frozen=True)
class _Most:
    """The length at which a page cuts each list. The JSON document always has everything."""

    names: int = 20
    rows: int = 30
    """Of a table, and groups."""
    differences: int = 12


_ALL = _Most(*(1 << 30,) * 3)


def make_fleet_page(report: FleetReport, *, full: bool = False) -> list[Block]:
    """Return the differences first, and the largest group once. A page that is not `full` cuts long lists."""
    most = _ALL if full else _Most()
    asked = " ".join(report.question)
    stored = [] if report.reports is None else [f"Every {report.noun}'s report: {report.reports}"]
    return [
        Heading(f"moedoctor {moedoctor.__version__}: fleet {asked}", 1),
        Paragraph(summarize(report)),
        *_show_groups(report, most),
        *_show_unanswered(report, most),
        *_show_bits(report),
        *_show_outliers(report, most),
        *_show_numbers(report, most),
        *_show_not_compared(report),
        *_show_largest(report, most),
        *map(Paragraph, stored),
        *_suggest_steps(report),
    ]


def _suggest_steps(report: FleetReport) -> Iterator[Block]:
    """Give what to do next, a line for each kind of trouble."""
    for finding in report.findings[:3]:
        if _ENTRY.fullmatch(finding.id):
            yield Step(("run ", Span(f"moedoctor explain {finding.id}", "code"), " for what to do about it"))
    groups = [group for group in report.groups if not all(map(_ENTRY.fullmatch, group.findings))]
    if report.question[0] == "check" and groups:
        members = [name for group in groups for name in group.nodes]
        problems = [name for group in groups for name in group.findings if not _ENTRY.fullmatch(name)]
        what, named = list_names(list(dict.fromkeys(problems)), 2), list_names(members)
        yield Step(("run ", Span("moedoctor check", "code"), f" on {named} for what to do about {what}"))
    for group in report.groups[1:4]:
        facts = [each.fact for each in group.wrong if not each.fact.startswith("finding ")]
        if facts:
            yield Step(f"give {list_names(group.nodes)} what the others have: {list_names(facts)}")
    odd = [each.name for each in report.bits.oddities] if report.bits is not None else []
    slow = [outlier.name for outlier in report.outliers if outlier.worse]
    if names := list(dict.fromkeys([*odd, *slow])):
        what = "what stays odd in the second answer is the hardware or its driver"
        yield Step(f"ask {list_names(names)} once more; {what}")
    if any(node.status not in SKIPPED for node in report.unanswered):
        command = f"moedoctor fleet {' '.join(report.question)} --resume {report.reports}"
        yield Step(("run ", Span(command, "code"), " to ask only those that gave no report"))


def summarize(report: FleetReport) -> str:
    """Return ``64 nodes · 62 answered · 2 groups · 1 finding · 0 outliers · 2 without an answer``."""
    answered = len(report.nodes) - len(report.unanswered)
    parts = [
        count_of(len(report.nodes), report.noun),
        f"{answered} answered",
        count_of(len(report.groups), "group"),
        count_of(len(report.findings), "finding"),
        count_of(len(report.outliers), "outlier"),
    ]
    if report.bits is not None:
        parts.append(f"{len(report.bits.oddities)} with odd bits")
    return " · ".join([*parts, f"{len(report.unanswered)} without an answer"])


def _show_groups(report: FleetReport, most: _Most) -> Iterator[Block]:
    groups = report.groups
    if len(groups) < 2:
        answered = len(groups[0].nodes) if groups else 0
        if answered > 1:
            yield Paragraph(f"All {answered} {report.noun}s that answered are equal.")
        elif answered:
            yield Paragraph(f"A single {report.noun} answered: there is none to compare it with.")
        return
    total = sum(len(group.nodes) for group in groups)
    yield Heading("What differs")
    for number, group in enumerate(groups[1 : most.rows + 1], 2):
        differences = _order(group.differences)
        shown = "; ".join(describe(difference) for difference in differences[: most.differences])
        if len(differences) > most.differences:
            shown += f"; and {len(differences) - most.differences} more, which --full or --format json lists"
        names = list_names(group.nodes, most.names)
        title = f"{len(group.nodes)} of {count_of(total, report.noun)}: {shown}: {names}"
        lines = [("wrong", rule) for rule in dict.fromkeys(str(each.rule) for each in group.wrong)]
        if group.compared_with != 1:
            lines.append(("compared with", f"group {group.compared_with}, the largest with {group.kind}"))
        yield Item("error" if group.wrong else "note", f"group {number}, {title}", lines)
    if len(groups) > most.rows + 1:
        yield Paragraph(f"{len(groups) - most.rows - 1} more groups; --full or --format json lists all.")


def _order(differences: Sequence[Difference]) -> list[Difference]:
    def rank(difference: Difference) -> tuple[int, bool, str]:
        first = [index for index, start in enumerate(_FIRST) if difference.fact.startswith(start)]
        return (first[0] if first else len(_FIRST), difference.rule is None, difference.fact)

    return sorted(differences, key=rank)


def _show_unanswered(report: FleetReport, most: _Most) -> Iterator[Block]:
    """Give the nodes without an answer, with the same reason in one row."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in report.unanswered:
        reasons[(node.status.value, node.reason or "")].append(node.name)
    if reasons:
        yield Heading("Without an answer")
        rows = [
            (status, f"{len(names)}: {list_names(names, most.names)}", reason)
            for (status, reason), names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
        ]
        shown = rows[: most.rows]
        yield Table(("status", f"{report.noun}s", "reason"), shown)
        if len(rows) > len(shown):
            yield Paragraph(f"{len(rows) - len(shown)} more reasons; --full or --format json lists all.")


def _show_bits(report: FleetReport) -> Iterator[Block]:
    if report.bits is None:
        return
    yield Heading("Bits")
    for kind, count in report.bits.compared.items():
        model = "CPUs" if kind == "None" else kind
        if count > 1:
            yield Paragraph(f"{model}: {count} equal ones were compared with each other.")
        else:
            yield Paragraph(f"{model}: one of its kind, compared with itself and the reference only.")
    for odd in report.bits.oddities:
        yield Item("error", f"{odd.name}: {odd.case}: {odd.what}")
    for reason in report.bits.undecided:
        yield Item("warning", reason)
    if not report.bits.oddities and not report.bits.undecided:
        yield Paragraph(
            "Every run of every GPU gave the bits of its equals; a planted bit was noticed on each."
        )


def _show_outliers(report: FleetReport, most: _Most) -> Iterator[Block]:
    if not report.outliers:
        return
    yield Heading("Numbers far from the others'")
    rows = []
    for each in report.outliers[: most.rows]:
        value, median, distance = format_value(each.value), format_value(each.median), float(each.distance)
        word = "worse" if each.worse else "better"
        rows.append((each.name, each.number, value, median, f"{distance:+.1f}", word))
    header = (report.noun, "number", "value", "median", "distance", "that is")
    yield Table(header, rows, align="llrrrl")
    yield Paragraph("Distance: in robust standard deviations (1.4826 MAD, at least 1 % of the median).")
    if len(report.outliers) > most.rows:
        yield Paragraph(f"{len(report.outliers) - most.rows} more; --full or --format json lists all.")


def _show_numbers(report: FleetReport, most: _Most) -> Iterator[Block]:
    kinds: dict[str, list[NumberSpread]] = defaultdict(list)
    for spread in report.numbers:
        kinds[spread.kind].append(spread)
    header = ("number", f"{report.noun}s", "median", "MAD", "least", "largest")
    for kind, spreads in kinds.items():
        yield Heading(f"Numbers of {kind}")
        rows = [
            (each.number, str(each.of), *map(format_value, (each.median, each.mad, each.least, each.largest)))
            for each in spreads
        ]
        yield Table(header, rows[: most.rows], align="lrrrrr")
        if len(rows) > most.rows:
            yield Paragraph(f"{len(rows) - most.rows} more; --full or --format json lists all.")
    if kinds:
        yield Paragraph(
            f"Names are those of each {report.noun}'s own report. MAD: the median distance from the median."
        )


def _show_not_compared(report: FleetReport) -> list[Block]:
    rows = [
        (fact, f"{count} different values: most have their own") for fact, count in report.individual.items()
    ]
    rows += [
        (fact, f"not read in time on {count_of(count, report.noun)}")
        for fact, count in report.not_read.items()
    ]
    return show_table("Not compared", ("fact", "why"), rows)


def _show_largest(report: FleetReport, most: _Most) -> Iterator[Block]:
    if not report.groups:
        return
    largest = report.groups[0]
    yield Heading(f"The largest group: {count_of(len(largest.nodes), report.noun)}, {largest.kind}")
    yield Paragraph(list_names(largest.nodes, most.names))
    for name, title in largest.findings.items():
        yield Item("error", f"{name}: {title}")
    rows = [
        (fact, value)
        for fact, value in (largest.facts or {}).items()
        if value != "none" and not fact.startswith("finding ")
    ]
    yield Table(("fact", "value"), rows)


def find_in_fleet(report: FleetReport, summary: str) -> Findings:
    """Return each reason of the exit code as a finding; groups without one passed, nodes may be skipped."""
    rule = f"fleet-{report.question[0]}"
    found = [Finding(rule, "error", reason, reason, "fleet", key=(reason,)) for reason in report.closing]
    odd = {name for group in report.groups if group.findings for name in group.nodes}
    passed = [node.name for node in report.nodes if node.status is Status.ANSWERED and node.name not in odd]
    skipped = [
        (node.name, f"{node.status.value}: {node.reason}")
        for node in report.unanswered
        if node.status in SKIPPED
    ]
    titles = {rule: ("what is wrong in a fleet", "A node has a finding, or differs in a way that is wrong.")}
    return Findings(f"fleet {report.question[0]}", found, passed, skipped, summary, titles)
