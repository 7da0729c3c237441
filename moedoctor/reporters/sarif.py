"""`sarif`: SARIF 2.1.0, as GitHub's code scanning and editors read it.

GitHub takes files of up to 10 MB after gzip, 25,000 results and 25,000 rules. It shows 5,000 results and
10 tags of a rule. Names may have 255 characters, descriptions 1,024. The worst findings come first, and
what is left out is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from moedoctor import __version__
from moedoctor.entries import load_entries
from moedoctor.interfaces import Reporter
from moedoctor.reporters.findings import LEVELS, Finding, Findings, find_in_run, shorten_line
from moedoctor.results import Report, to_json
from moedoctor.text import shorten

MOST_RESULTS = 5_000
MOST_TEXT = 1_024
MOST_HELP = 20_000
MOST_BYTES = 10_000_000
"""Before gzip, which makes a file no larger than this and a few bytes."""
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_PRECISIONS = ((0.9, "very-high"), (0.7, "high"), (0.4, "medium"), (0.0, "low"))
_PROBLEM = {"error": "error", "warning": "warning", "note": "recommendation"}


class SarifReporter(Reporter):
    """A result for each scenario that shows a failure, and for each regression."""

    name = "sarif"

    def render(self, report: Report, *, colour: bool = False, width: int | None = None) -> str:
        return to_sarif(find_in_run(report))


def to_sarif(findings: Findings) -> str:
    """Return the findings of one command as a SARIF log with one run of at most `MOST_BYTES`."""
    ordered = sorted(findings.found, key=lambda finding: LEVELS.index(finding.level))
    most = MOST_RESULTS
    while len((text := _write_log(findings, ordered, most)).encode("utf-8", "replace")) > MOST_BYTES:
        most //= 2
    return text


def _write_log(findings: Findings, ordered: Sequence[Finding], most: int) -> str:
    shown = ordered[:most]
    firsts = {finding.rule: finding for finding in reversed(shown)}
    rules = {rule: index for index, rule in enumerate(dict.fromkeys(finding.rule for finding in shown))}
    left = len(ordered) - len(shown)
    notes = [{"level": "note", "message": {"text": f"{left} more findings are left out"}}] if left else []
    run = {
        "tool": {
            "driver": {
                "name": "moedoctor",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_make_rule(firsts[rule], findings) for rule in rules],
            }
        },
        "automationDetails": {"id": f"moedoctor/{findings.command}/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": list(_make_results(shown, rules)),
    }
    return to_json({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _make_rule(worst: Finding, findings: Findings) -> dict[str, Any]:
    """Return the rule of a finding, the worst of its rule."""
    id = worst.rule
    entry = load_entries().get(id)
    title, effect = findings.titles.get(id, (worst.title, ""))
    rule: dict[str, Any] = {
        "id": id,
        "name": entry.name if entry else shorten_line(id, 255),
        "shortDescription": {"text": shorten_line(entry.title if entry else title, MOST_TEXT)},
        "fullDescription": {"text": shorten_line(entry.mechanism if entry else effect or title, MOST_TEXT)},
        "defaultConfiguration": {"level": worst.level},
    }
    if entry:
        sections = {"What happens": entry.mechanism, "Who is affected": entry.affected, "Fix": entry.fix}
        body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
        rule["help"] = {
            "text": shorten_line(f"{entry.next} Fix: {entry.fix}", MOST_HELP),
            "markdown": shorten(f"{entry.next}\n\n{body}", MOST_HELP),
        }
        if entry.links:
            rule["helpUri"] = entry.links[0].url
    else:
        rule["help"] = {"text": shorten_line(effect or title, MOST_HELP)}
    sure = 1.0 if worst.confidence is None else worst.confidence
    rule["properties"] = {
        "tags": ["mixture-of-experts", findings.command],
        "precision": next(word for least, word in _PRECISIONS if sure >= least),
        "problem.severity": _PROBLEM[worst.level],
    }
    return rule


def _make_results(shown: Sequence[Finding], rules: Mapping[str, int]) -> Any:
    counts: Counter[str] = Counter()
    for finding in shown:
        mark = hash_finding(finding)
        counts[mark] += 1
        place: dict[str, Any] = {
            "physicalLocation": {
                "artifactLocation": {"uri": quote(finding.file, safe="/~!()*',;=@+$", errors="replace")},
                "region": {"startLine": finding.line or 1},
            }
        }
        if finding.logical:
            place["logicalLocations"] = [{"fullyQualifiedName": shorten_line(finding.logical, MOST_TEXT)}]
        yield {
            "ruleId": finding.rule,
            "ruleIndex": rules[finding.rule],
            "level": finding.level,
            "message": {"text": shorten_line(finding.message, MOST_TEXT)},
            "locations": [place],
            # GitHub compares primaryLocationLineHash; the number tells equal findings of one file apart.
            "partialFingerprints": {
                "primaryLocationLineHash": f"{mark[:16]}:{counts[mark]}",
                "moedoctor/v1": mark,
            },
        }


def hash_finding(finding: Finding) -> str:
    """Return what stays the same between runs and if lines move: a hash of rule, file and key."""
    identity = json.dumps([finding.rule, finding.file, *finding.key])
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()
