"""The page of each command's JSON document, for the command that makes the document and for `show`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moedoctor.commands.options import FULL_FORMATS, deliver

if TYPE_CHECKING:
    from moedoctor.diagnose.check.records import CheckResult
    from moedoctor.diagnose.preflight.records import PreflightDocument
    from moedoctor.fleet.report import FleetReport
    from moedoctor.reporters.findings import Findings
    from moedoctor.reporters.json import Document
    from moedoctor.reporters.page import Block
    from moedoctor.reporters.pages.audit import AuditDocument
    from moedoctor.reporters.pages.backends import BackendsDocument
    from moedoctor.reporters.pages.compare import CompareDocument
    from moedoctor.reporters.pages.explain import Catalogue, Explained
    from moedoctor.reporters.pages.lint import LintDocument
    from moedoctor.reporters.pages.plan import PlanDocument
    from moedoctor.reporters.pages.replay import CapsuleDocument, ReplayDocument
    from moedoctor.reporters.pages.triage import TriageDocument

    Shown = tuple[list[Block], str, Callable[[], Findings] | None]
    """The page, its summary, and what the formats for machines show."""


class Wanted(NamedTuple):
    """The options that a page depends on."""

    format: str
    full: bool = False
    verbose: bool = False


def deliver_document(
    document: Document,
    format: str,
    output: Path | None,
    *,
    full: bool,
    verbose: bool = False,
    code: int = 0,
    reasons: Sequence[str] = (),
) -> int:
    """Write a command's document in a format, print why it ends with `code`, and return `code`."""
    page, summary, findings = PAGES[document.command](document, Wanted(format, full, verbose))
    deliver(
        page,
        document,
        format=format,
        output=output,
        summary=summary,
        code=code,
        reasons=reasons,
        full=full,
        findings=findings,
    )
    return code


def _show_check(result: CheckResult, wanted: Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.check import make_check_page, summarize

    summary = summarize(result)
    return make_check_page(result), summary, lambda: findings.find_in_check(result, summary)


def _show_triage(document: TriageDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.triage import count_line, triage_page

    results = document.to_results()
    summary = count_line(results)
    return triage_page(results), summary, lambda: findings.find_in_triage(results, summary)


def _show_lint(document: LintDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.lint import make_lint_page, summarize

    summary = summarize(document)
    return make_lint_page(document), summary, lambda: findings.find_in_lint(document, summary)


def _show_preflight(document: PreflightDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.preflight import build_preflight_page, summarize

    summary = summarize(document)
    return build_preflight_page(document), summary, lambda: findings.find_in_preflight(document, summary)


def _show_audit(document: AuditDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.audit import audit_page, summarize

    items, summary = document.items, summarize(document)
    page = audit_page(document, brief=wanted.format == "table")
    return page, summary, lambda: findings.find_in_audit(items, document.wrong, summary)


def _show_fleet(report: FleetReport, wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.fleet import find_in_fleet, make_fleet_page, summarize

    return make_fleet_page(report, full=wanted.full), summarize(report), lambda: find_in_fleet(report)


def _show_plan(document: PlanDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.plan import make_plan_page, summarize

    return make_plan_page(document), summarize(document.plan), None


def _show_backends(document: BackendsDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.backends import make_backends_page, summarize

    return make_backends_page(document), summarize(document), None


def _show_compare(document: CompareDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.compare import make_compare_page, summarize

    return make_compare_page(document), summarize(document), None


def _show_replay(document: ReplayDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.replay import answer_of, replay_page

    return replay_page(document, full=wanted.format in FULL_FORMATS), answer_of(document), None


def _show_capsule(document: CapsuleDocument, wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.replay import describe_capsule, make_capsule_page

    return make_capsule_page(document), describe_capsule(document), None


def _show_explained(explained: Explained, wanted: Wanted) -> Shown:
    page = explained.make_page(brief=wanted.format == "table" and not wanted.verbose)
    return page, explained.summarize(), None


def _show_catalogue(document: Catalogue, wanted: Wanted) -> Shown:
    return document.make_page(), document.summarize(), None


def _show_bench(document: Mapping[str, Any], wanted: Wanted) -> Shown:
    from moedoctor.reporters.pages.bench import make_bench_page, read_bench, summarize

    bench = read_bench(document)
    return make_bench_page(bench, full=wanted.format in FULL_FORMATS), summarize(bench), None


PAGES: Mapping[str, Callable[[Any, Wanted], Shown]] = {
    "check": _show_check,
    "triage": _show_triage,
    "lint": _show_lint,
    "preflight": _show_preflight,
    "audit": _show_audit,
    "fleet": _show_fleet,
    "plan": _show_plan,
    "backends": _show_backends,
    "compare": _show_compare,
    "replay": _show_replay,
    "capsule": _show_capsule,
    "explain": _show_explained,
    "list": _show_catalogue,
    "bench": _show_bench,
}
"""Command -> what shows its document; a report of `run` is rendered as a whole."""
