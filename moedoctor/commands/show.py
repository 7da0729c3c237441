"""`moedoctor show REPORT`: a stored report in another format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moedoctor.commands.options import (
    CHECK_FORMATS,
    FULL_FORMATS,
    PAGE_FORMATS,
    Full,
    InputError,
    Output,
    ReportFormat,
    Verbose,
    as_input_error,
    deliver,
    rendered,
)
from moedoctor.text import expected_names, one_line, shorten

if TYPE_CHECKING:
    from moedoctor.diagnose.check.records import CheckResult
    from moedoctor.reporters.findings import Findings
    from moedoctor.reporters.page import Block
    from moedoctor.reporters.pages.audit import AuditDocument
    from moedoctor.reporters.pages.backends import BackendsDocument
    from moedoctor.reporters.pages.compare import CompareDocument
    from moedoctor.reporters.pages.explain import Catalogue, Explained
    from moedoctor.reporters.pages.fleet import FleetDocument
    from moedoctor.reporters.pages.lint import LintDocument
    from moedoctor.reporters.pages.plan import PlanDocument
    from moedoctor.reporters.pages.replay import CapsuleDocument, ReplayDocument
    from moedoctor.reporters.pages.triage import TriageDocument

    Shown = tuple[list[Block], str, Callable[[], Findings] | None]
    """The page, its summary, and what the formats for machines show."""


def show(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A JSON report of any command.")],
    format: ReportFormat = "table",
    output: Output = None,
    full: Full = False,
    verbose: Verbose = False,
) -> int:
    """Show a stored JSON report in another format.

    Nothing is run and nothing is judged again.
    """
    from moedoctor.results import ReportError, read_json

    with as_input_error(ReportError):
        document = read_json(report)
        command = document.get("command") if isinstance(document, dict) else None
        if isinstance(command, str) and command in _PAGES:
            _show_page(report, document, _Wanted(format, full, verbose), output)
            return 0
        return _show_run(report, format, output, full=full, verbose=verbose)


def _show_run(path: Path, format: str, output: Path | None, *, full: bool, verbose: bool) -> int:
    """Show a report of `run`. Raises ReportError for anything that is none."""
    from moedoctor import catalogue
    from moedoctor.redaction import Redactor
    from moedoctor.reporters.github import step_summary
    from moedoctor.reporters.output import append_step_summary, emit
    from moedoctor.reporters.text import summary_line
    from moedoctor.results import load_report

    stored = Redactor.of_this_process().record(load_report(path))
    with as_input_error(catalogue.PluginError):
        text, problem = rendered(stored, format, output, verbose=verbose, full=full)
        emit(text, output, summary_line(stored))
    if format == "github":
        append_step_summary(step_summary(stored), os.environ)
    return problem or 0


def _show_page(path: Path, document: dict[str, Any], wanted: _Wanted, output: Path | None) -> None:
    """Show the report of a command that gives a page. Raises ReportError and InputError."""
    from moedoctor.reporters.json import Head
    from moedoctor.reporters.schemas import document_type
    from moedoctor.results import ReportError, check_version, from_json

    command, file = document["command"], str(path)
    check_version(document, file)
    from_json(Head, {"schema_version": 1, **document}, file)
    stored: Any = from_json(document_type(command), document, file)
    if command == "bench":  # each kind of benchmark reads its own part
        stored = document
    try:
        page, summary, findings = _PAGES[command](stored, wanted)
        formats = PAGE_FORMATS if findings is None else CHECK_FORMATS
        if wanted.format not in formats:
            raise InputError(f"--format {wanted.format}: {expected_names(wanted.format, formats)}")
        deliver(
            page,
            {**document, "origin": document.get("origin")},
            format=wanted.format,
            output=output,
            summary=summary,
            full=wanted.full,
            findings=findings,
            stored=True,
        )
    except ReportError:
        raise
    except (LookupError, StopIteration, TypeError, ValueError, AttributeError) as error:
        # Each value has the type that it needs, but names what is not there.
        why = shorten(one_line(f"{type(error).__name__}: {error}"))
        raise ReportError(
            file, f"the parts of this report of `{command}` do not fit together: {why}"
        ) from None


class _Wanted(NamedTuple):
    """What a page depends on."""

    format: str
    full: bool
    verbose: bool


def _check(result: CheckResult, wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.check import check_page, summary_line

    summary = summary_line(result)
    return check_page(result), summary, lambda: findings.of_check(result, summary)


def _triage(document: TriageDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.triage import count_line, triage_page

    results = document.results()
    return triage_page(results), count_line(results), lambda: findings.of_triage(results, count_line(results))


def _lint(document: LintDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.lint import lint_page, summary_line

    summary = summary_line(document)
    return lint_page(document), summary, lambda: findings.of_lint(document, summary)


def _audit(document: AuditDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.audit import audit_page, summary_line

    items, summary = document.items, summary_line(document)
    return audit_page(document), summary, lambda: findings.of_audit(items, document.wrong, summary)


def _fleet(document: FleetDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.fleet import fleet_findings, fleet_page, summary_line

    report = document.report()
    return fleet_page(report, full=wanted.full), summary_line(report), lambda: fleet_findings(report)


def _plan(document: PlanDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.plan import plan_page, summary_line

    return plan_page(document), summary_line(document.plan), None


def _backends(document: BackendsDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.backends import backends_page, summary_line

    return backends_page(document), summary_line(document), None


def _compare(document: CompareDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.compare import compare_page, summary_line

    return compare_page(document), summary_line(document), None


def _replay(document: ReplayDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.replay import answer_of, replay_page

    return replay_page(document, full=wanted.format in FULL_FORMATS), answer_of(document), None


def _capsule(document: CapsuleDocument, wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.replay import capsule_line, capsule_page

    return capsule_page(document), capsule_line(document), None


def _explain(explained: Explained, wanted: _Wanted) -> Shown:
    page = explained.page(brief=wanted.format == "table" and not wanted.verbose)
    return page, explained.summary_line(), None


def _list(document: Catalogue, wanted: _Wanted) -> Shown:
    return document.page(), document.summary_line(), None


def _bench(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages import bench_backends, bench_cache, bench_engines

    kinds: Mapping[str, Any] = {"backends": bench_backends, "cache": bench_cache, "engines": bench_engines}
    name = next((name for name in kinds if name in document["bench"]), None)
    if name is None:
        raise ValueError("bench is none of backends, cache and engines")
    kind = kinds[name]
    bench = kind.from_dict(document)
    return kind.bench_page(bench, full=wanted.format in FULL_FORMATS), kind.summary_line(bench), None


_PAGES: Mapping[str, Callable[[Any, _Wanted], Shown]] = {
    "check": _check,
    "triage": _triage,
    "lint": _lint,
    "audit": _audit,
    "fleet": _fleet,
    "plan": _plan,
    "backends": _backends,
    "compare": _compare,
    "replay": _replay,
    "capsule": _capsule,
    "explain": _explain,
    "list": _list,
    "bench": _bench,
}
"""Command -> what shows its report; a report of `run` is rendered as a whole."""
