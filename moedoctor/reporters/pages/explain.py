"""The page of the catalogue, and that of one known failure: words, claims and what came of them, links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, get_args

from moedoctor.entries import find_builtin_folder, find_reports_folder
from moedoctor.entries.entry import SECTIONS, Entry, Family, Link, record_hint
from moedoctor.interfaces import Fault
from moedoctor.reporters.page import (
    Answer,
    Block,
    Heading,
    Item,
    Paragraph,
    Prose,
    Span,
    Step,
    list_section,
    show_table,
)
from moedoctor.reporters.text import count_of
from moedoctor.results import Report, ReportError, from_json, read_json
from moedoctor.scenario.file import ClaimDocument, ScenarioDocument
from moedoctor.text import TextFileError, print_message, read_yaml, validate

NOT_YET = "moedoctor cannot run this one yet: it has no scenario."


@dataclass(frozen=True)
class Outcome:
    """The verdict of one machine on a claim."""

    machine: str
    """The folder of the report."""
    verdict: str
    reason: str | None


@dataclass(frozen=True)
class Claim:
    """A statement from upstream, with the evidence so far."""

    text: str
    source: str
    outcomes: tuple[Outcome, ...] = ()
    subject: str = ""
    conditions: str = ""
    """The conditions under which it was said to hold."""


@dataclass(frozen=True)
class Explained:
    """One known failure in full. The texts are Markdown."""

    command: ClassVar[str] = "explain"
    id: str
    name: str
    title: str
    runs: bool
    """True if moedoctor can run it."""
    where: str = ""
    """The people affected, in one line."""
    next: str = ""
    """The step to take today, in one line."""
    fixed: str = ""
    """The release that fixes it, or ``no``."""
    record: str = ""
    """A command that records a wrong call; empty if no call shows it."""
    releases: tuple[tuple[str, str], ...] = ()
    """(range of releases, which of them were run)."""
    mechanism: str = ""
    affected: str = ""
    detection: str = ""
    fix: str = ""
    claims: tuple[Claim, ...] = ()
    links: tuple[Link, ...] = ()

    @classmethod
    def from_entry(cls, entry: Entry, *, runs: bool) -> Explained:
        """Explain a failure of our catalogue."""
        names = ("where", "next", "fixed", "mechanism", "affected", "detection", "fix")
        words = {name: getattr(entry, name) for name in names}
        words["record"] = record_hint(entry)
        words["releases"] = tuple((each.range, each.evidence) for each in entry.releases)
        claims = _read_claims(entry.id, entry.name) if runs else ()
        return cls(entry.id, entry.name, entry.title, runs, **words, claims=claims, links=entry.links)

    @classmethod
    def from_fault(cls, fault: Fault) -> Explained:
        """Explain a known failure of another project, as far as it explains itself."""
        words = asdict(fault.explanation) if fault.explanation else {}
        links = tuple(Link(url, "") for url in words.pop("links", ()))
        claims = _read_claims(fault.id, fault.name)
        return cls(fault.id, fault.name, fault.title, True, **words, claims=claims, links=links)

    def summarize(self) -> str:
        """Return who has it and what fixes it."""
        who = f": {self.where}" if self.where else ""
        return f"{self.id}{who}" + (f"; fixed in: {self.fixed}" if self.fixed else "")

    def _answer(self) -> Answer:
        """Return who has it, what came out of the claims about it, and what to do today."""
        words = [f"{count} {verdict}" for verdict, count in Counter(map(_find_verdict, self.claims)).items()]
        claims = [f"{count_of(len(self.claims), 'claim')}: {', '.join(words)}"] if words else []
        call = f"`moedoctor run {self.id}`"
        steps = [text for text in (self.next, self.record) if text]
        if call not in self.next:
            steps.append(f"{call} runs it" if self.runs else NOT_YET)
        looked_at = "the catalogue of known failures, and the reports that come with moedoctor"
        return Answer([looked_at], [self.summarize(), *claims], steps)

    def make_page(self, *, brief: bool = False) -> list[Block]:
        """Return the page, with a heading for everything that is known.

        A brief page fits on two screens: it has the verdict on each claim without figures, and not what the
        releases rest on.
        """
        page: list[Block] = [Heading(f"{self.id} {self.name}: {self.title}", 1), self._answer()]
        first = {
            "Affected": self.where,
            "Do today": self.next,
            "Fixed in": self.fixed,
            "Record it": self.record,
        }
        if self.where:
            lines = (f"- **{label}**: {text}" for label, text in first.items() if text)
            page.append(Prose("\n".join(lines), in_answer=True))
        words = (self.mechanism, self.affected, self.detection, self.fix)
        for heading, text in zip(SECTIONS, words, strict=False):
            if text:
                page += [Heading(heading), Prose(text)]
        if not brief:
            rows = [f"{releases}: {evidence}" for releases, evidence in self.releases]
            page += list_section("What that rests on", rows)
        if self.claims:
            page.append(Heading("Claims, and what came out"))
        for claim in self.claims:
            # Several reports of one machine may say the same.
            verdicts = ((each, filter(None, (each.verdict, each.reason))) for each in claim.outcomes)
            outcomes = list(dict.fromkeys((each.machine, ": ".join(words)) for each, words in verdicts))
            title = (f"{claim.text} (", Span(claim.source, "source"), ")")
            about = [("about", "; ".join(filter(None, (claim.subject, claim.conditions))))]
            figures = [line for line in (*about, *(outcomes or [("", "not measured yet")])) if line[1]]
            page.append(Item(_find_verdict(claim), title, [] if brief else figures))
        links = [Span(f"{link.url} {link.text}".rstrip(), "source") for link in self.links]
        page += list_section(SECTIONS[-1], links)
        run: Sequence[str | Span] = ("Run it: ", Span(f"moedoctor run {self.id}", "code"))
        if self.runs and brief:
            run = (*run, ". The figures behind the claims: ", Span(f"moedoctor explain {self.id} -v", "code"))
        return [*page, Paragraph(tuple(run) if self.runs else NOT_YET)]


@dataclass(frozen=True)
class Row:
    """One known failure in the catalogue."""

    id: str
    name: str
    scenario: bool
    """True if moedoctor can run it."""
    title: str
    affects: str
    """The releases that it strikes."""
    fixed_in: str
    """The release that fixes it, or ``no``."""
    family: str
    """Its subject, such as ``routing``; empty for a failure of another project."""


@dataclass(frozen=True)
class Catalogue:
    """Known failures, all of them or those that some words are about."""

    command: ClassVar[str] = "list"
    catalogue: tuple[Row, ...]

    def make_page(self) -> list[Block]:
        """Return the catalogue by families, and how to get more of it."""
        page: list[Block] = [Heading("Known failures", 1)]
        for family in (*get_args(Family), ""):
            cells = [
                (row.id, row.title, row.affects, row.fixed_in)
                for row in self.catalogue
                if row.family == family
            ]
            titles = ("id", "failure", "affects", "fixed in")
            page += show_table(family or "others", titles, cells)
        details, run = Span("moedoctor explain ID", "code"), Span("moedoctor run ID", "code")
        more = Step((details, " gives details, ", run, " runs one"))
        return [*page, more]

    def summarize(self) -> str:
        """Return ``21 known failures; moedoctor runs 19 of them; no release fixes 7``."""
        runs = sum(row.scenario for row in self.catalogue)
        unfixed = sum(re.match(r"no\b", row.fixed_in) is not None for row in self.catalogue)
        count = count_of(len(self.catalogue), "known failure")
        return f"{count}; moedoctor runs {runs} of them; no release fixes {unfixed}"


def _find_verdict(claim: Claim) -> str:
    """Return the first verdict on a claim that a machine tested."""
    verdicts = [outcome.verdict for outcome in claim.outcomes]
    return next((verdict for verdict in verdicts if verdict != "untested"), "untested")


def _read_claims(id: str, name: str) -> tuple[Claim, ...]:
    """Return the claims of the built-in scenario. Another project's scenario may be elsewhere."""
    try:
        document = validate(ScenarioDocument, read_yaml(find_builtin_folder() / f"{name}.yaml"))
    except TextFileError:
        return ()
    reports, claims = _load_reports() if document.claims else (), []
    for claim in document.claims:
        outcomes = tuple(_list_outcomes(id, claim, reports))
        claims.append(Claim(claim.text, claim.source, outcomes, claim.subject, claim.conditions))
    return tuple(claims)


def _list_outcomes(id: str, claim: ClaimDocument, reports: Sequence[tuple[str, Report]]) -> Iterator[Outcome]:
    for machine, report in reports:
        for scenario in report.scenarios:
            for stored in scenario.claims:
                if (scenario.id, stored.text) == (id, claim.text):
                    # A report may be older than the claim's subject and conditions.
                    answer = claim.qualify(stored.verdict, stored.reason, report.environment.get("gpu"))
                    yield Outcome(machine, answer[0].value, answer[1])


def _load_reports() -> Sequence[tuple[str, Report]]:
    """Return (machine, report) of each run that is evidence of ours, without the baselines of CI.

    Reports of other commands have no claims.
    """
    reports = []
    for file in sorted(find_reports_folder().glob("*/*.json")):
        if file.parent.name == "baselines":
            continue
        try:
            data = read_json(file)
            if isinstance(data, dict) and data.get("command") == "run":
                reports.append((file.parent.name, from_json(Report, data, str(file))))
        except ReportError as error:
            print_message(str(error))
    return reports
