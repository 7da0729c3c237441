"""Everything there is to say about one known failure: words, claims and what came of them, links."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moedoctor.entries import builtin_folder, reports_folder
from moedoctor.entries.entry import SECTIONS, Entry, Link
from moedoctor.interfaces import Fault
from moedoctor.results import Report, ReportError, load_report
from moedoctor.text import TextFileError, read_yaml

NOT_YET = "moedoctor cannot run this one yet: it has no scenario."


@dataclass(frozen=True)
class Outcome:
    """What one machine said about a claim."""

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


@dataclass(frozen=True)
class Explained:
    """One known failure, in full. The texts are Markdown."""

    id: str
    name: str
    title: str
    runs: bool
    """Whether moedoctor can run it."""
    mechanism: str = ""
    affected: str = ""
    detection: str = ""
    fix: str = ""
    claims: tuple[Claim, ...] = ()
    links: tuple[Link, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    def markdown(self) -> Iterator[str]:
        """Line by line, with a heading for everything that there is."""
        yield f"# {self.id} {self.name}: {self.title}"
        texts = (self.mechanism, self.affected, self.detection, self.fix)
        for heading, text in zip(SECTIONS, texts, strict=False):
            if text:
                yield from ("", f"## {heading}", "", text)
        if self.claims:
            yield from ("", "## Claims, and what came out", "")
            for claim in self.claims:
                yield f"- {claim.text} ({claim.source})"
                yield from (f"  - {one.machine}: {_said(one)}" for one in claim.outcomes)
                if not claim.outcomes:
                    yield "  - not measured yet"
        if self.links:
            yield from (
                "",
                f"## {SECTIONS[-1]}",
                "",
                *(f"- {link.url} {link.text}".rstrip() for link in self.links),
            )
        yield from ("", f"Run it: `moedoctor run {self.id}`" if self.runs else NOT_YET)


def explained_entry(entry: Entry, *, runs: bool) -> Explained:
    """An entry of ours."""
    return Explained(
        id=entry.id,
        name=entry.name,
        title=entry.title,
        runs=runs,
        mechanism=entry.mechanism,
        affected=entry.affected,
        detection=entry.detection,
        fix=entry.fix,
        claims=_claims(entry.id, entry.name) if runs else (),
        links=entry.links,
    )


def explained_fault(fault: Fault) -> Explained:
    """A known failure of another project, as far as it explains itself."""
    said = fault.explanation
    return Explained(
        id=fault.id,
        name=fault.name,
        title=fault.title,
        runs=True,
        mechanism=said.mechanism if said else "",
        affected=said.affected if said else "",
        detection=said.detection if said else "",
        fix=said.fix if said else "",
        claims=_claims(fault.id, fault.name),
        links=tuple(Link(url, "") for url in said.links) if said else (),
    )


def _said(outcome: Outcome) -> str:
    return f"{outcome.verdict}: {outcome.reason}" if outcome.reason else outcome.verdict


def _claims(id: str, name: str) -> tuple[Claim, ...]:
    """The claims of the built-in scenario; another project's may lie elsewhere. Loads no fault."""
    try:
        data = read_yaml(builtin_folder() / f"{name}.yaml").data
    except TextFileError:
        return ()
    written = data.get("claims") if isinstance(data, dict) else None
    if not written:
        return ()
    reports = _reports()
    return tuple(
        Claim(one["text"], one["source"], tuple(_outcomes(id, one["text"], reports))) for one in written
    )


def _outcomes(id: str, text: str, reports: Sequence[tuple[str, Report]]) -> Iterator[Outcome]:
    for machine, report in reports:
        for scenario in report.scenarios:
            if scenario.id == id:
                for claim in scenario.claims:
                    if claim.text == text:
                        yield Outcome(machine, claim.verdict.value, claim.reason)


def _reports() -> Sequence[tuple[str, Report]]:
    """(machine, report) of the evidence that ships with moedoctor, without the baselines of CI."""
    found = []
    for file in sorted(reports_folder().glob("*/*.json")):
        if file.parent.name == "baselines":
            continue
        try:
            found.append((file.parent.name, load_report(file)))
        except ReportError as error:
            print(f"moedoctor: {error}", file=sys.stderr)
    return found
