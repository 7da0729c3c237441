"""`sarif`: SARIF 2.1.0, as GitHub's code scanning and editors read it.

GitHub takes 25,000 results and shows the first 5,000, 25,000 rules, and 10 tags of a rule; names may have 255
characters, descriptions 1,024. The worst findings come first, and what is left out is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from moedoctor import __version__
from moedoctor.entries import entries
from moedoctor.interfaces import Reporter
from moedoctor.reporters.findings import LEVELS, Finding, Findings, of_run, short
from moedoctor.results import Report, to_json

MOST_RESULTS = 5_000
MOST_TEXT = 1_024
MOST_HELP = 20_000
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_PROBLEM = {"error": "error", "warning": "warning", "note": "recommendation"}


class SarifReporter(Reporter):
    """A result for each scenario that shows a failure, and for each regression."""

    name = "sarif"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return to_sarif(of_run(report))


def to_sarif(findings: Findings) -> str:
    """Return the findings of one command as a SARIF log with one run."""
    ordered = sorted(findings.found, key=lambda finding: LEVELS.index(finding.level))
    shown = ordered[:MOST_RESULTS]
    rules = list(dict.fromkeys(finding.rule for finding in shown))
    left = len(ordered) - len(shown)
    notes = [{"level": "note", "message": {"text": f"{left} more findings are left out"}}] if left else []
    run = {
        "tool": {
            "driver": {
                "name": "moedoctor",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_rule(id, findings, shown) for id in rules],
            }
        },
        "automationDetails": {"id": f"moedoctor/{findings.command}/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": list(_results(shown, rules)),
    }
    return to_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(id: str, findings: Findings, shown: Sequence[Finding]) -> dict[str, Any]:
    own = [finding for finding in shown if finding.rule == id]
    entry = entries().get(id)
    title, effect = findings.titles.get(id, (own[0].title, ""))
    rule: dict[str, Any] = {
        "id": id,
        "name": entry.name if entry else short(id, 255),
        "shortDescription": {"text": short(entry.title if entry else title, MOST_TEXT)},
        "fullDescription": {"text": short(entry.mechanism if entry else effect or title, MOST_TEXT)},
        "defaultConfiguration": {"level": own[0].level},
    }
    if entry:
        sections = {"What happens": entry.mechanism, "Who is affected": entry.affected, "Fix": entry.fix}
        body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
        rule["help"] = {
            "text": short(f"{entry.next} Fix: {entry.fix}", MOST_HELP),
            "markdown": f"{entry.next}\n\n{body}"[:MOST_HELP],
        }
        if entry.links:
            rule["helpUri"] = entry.links[0].url
    else:
        rule["help"] = {"text": short(effect or title, MOST_HELP)}
    rule["properties"] = {
        "tags": ["mixture-of-experts", findings.command],
        "precision": _precision(own[0].confidence),
        "problem.severity": _PROBLEM[own[0].level],
    }
    return rule


def _precision(confidence: float | None) -> str:
    if confidence is None or confidence >= 0.9:
        return "very-high"
    return "high" if confidence >= 0.7 else "medium" if confidence >= 0.4 else "low"


def _results(shown: Sequence[Finding], rules: Sequence[str]) -> Any:
    counts: Counter[str] = Counter()
    for finding in shown:
        mark = fingerprint(finding)
        counts[mark] += 1
        place: dict[str, Any] = {
            "physicalLocation": {
                "artifactLocation": {"uri": quote(finding.file, safe="/~!()*',;=@+$", errors="replace")},
                "region": {"startLine": finding.line or 1},
            }
        }
        if finding.logical:
            place["logicalLocations"] = [{"fullyQualifiedName": short(finding.logical, MOST_TEXT)}]
        yield {
            "ruleId": finding.rule,
            "ruleIndex": rules.index(finding.rule),
            "level": finding.level,
            "message": {"text": short(finding.message, MOST_TEXT)},
            "locations": [place],
            # GitHub compares primaryLocationLineHash; the number tells equal findings of one file apart.
            "partialFingerprints": {
                "primaryLocationLineHash": f"{mark[:16]}:{counts[mark]}",
                "moedoctor/v1": mark,
            },
        }


def fingerprint(finding: Finding) -> str:
    """Return what stays the same between runs and if lines move: a hash of rule, file and key."""
    identity = json.dumps([finding.rule, finding.file, *finding.key])
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()
