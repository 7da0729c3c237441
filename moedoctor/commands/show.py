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
    from moedoctor.reporters.findings import Findings
    from moedoctor.reporters.page import Block

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
            _show_page(report, document, format, output, full=full)
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


def _show_page(path: Path, document: dict[str, Any], format: str, output: Path | None, *, full: bool) -> None:
    """Show the report of a command that gives a page. Raises ReportError and InputError."""
    from moedoctor.reporters.schemas import DOCUMENTS, Bench
    from moedoctor.results import ReportError, check_version, from_json

    command, file = document["command"], str(path)
    check_version(document, file)
    stored: Mapping[str, Any] = from_json(
        DOCUMENTS.get(command, Bench), {"schema_version": 1, **document}, file
    )
    try:
        page, summary, findings = _PAGES[command](stored, _Wanted(format, full))
        formats = PAGE_FORMATS if findings is None else CHECK_FORMATS
        if format not in formats:
            raise InputError(f"--format {format}: {expected_names(format, formats)}")
        deliver(
            page,
            {**document, "origin": document.get("origin")},
            format=format,
            output=output,
            summary=summary,
            full=full,
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


def _check(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.check import check_page, from_document, summary_line

    result = from_document(document)
    summary = summary_line(result)
    page = check_page(result, facts_last=wanted.format in FULL_FORMATS)
    return page, summary, lambda: findings.of_check(result, summary)


def _triage(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.triage import count_line, from_document, triage_page

    results = from_document(document)
    return triage_page(results), count_line(results), lambda: findings.of_triage(results, count_line(results))


def _lint(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.lint import lint_page, summary_line

    summary = summary_line(document)
    return lint_page(document), summary, lambda: findings.of_lint(document, summary)


def _audit(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters import findings
    from moedoctor.reporters.pages.audit import audit_page, from_document, summary_line, wrong

    items, gpu, tool = from_document(document)
    summary = summary_line(items)
    return audit_page(items, gpu, tool), summary, lambda: findings.of_audit(items, wrong(items), summary)


def _fleet(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.fleet import fleet_findings, fleet_page, from_document, summary_line

    report = from_document(document)
    return fleet_page(report, full=wanted.full), summary_line(report), lambda: fleet_findings(report)


def _plan(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.plan import from_document, plan_page, summary_line

    request, result = from_document(document)
    return plan_page(request, result), summary_line(result), None


def _backends(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.backends import shown

    return *shown(document), None


def _compare(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.compare import compare_page, summary_line

    return compare_page(document), summary_line(document), None


def _replay(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.replay import answer_of, replay_page

    return replay_page(document, full=wanted.format in FULL_FORMATS), answer_of(document), None


def _capsule(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.replay import capsule_line, capsule_page

    return capsule_page(document, document["file"]), capsule_line(document), None


def _explain(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.explain import Explained

    explained = Explained.of_document(document)
    return explained.page(), explained.summary(), None


def _list(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages.explain import list_line, list_page

    rows = document["catalogue"]
    return list_page(rows), list_line(rows), None


def _bench(document: Mapping[str, Any], wanted: _Wanted) -> Shown:
    from moedoctor.reporters.pages import bench_backends, bench_cache, bench_engines

    kinds: Mapping[str, Any] = {"backends": bench_backends, "cache": bench_cache, "engines": bench_engines}
    name = next((name for name in kinds if name in document["bench"]), None)
    if name is None:
        raise ValueError("bench is none of backends, cache and engines")
    kind = kinds[name]
    bench = kind.from_dict(document)
    return kind.bench_page(bench, full=wanted.format in FULL_FORMATS), kind.summary_line(bench), None


_PAGES: Mapping[str, Callable[[Mapping[str, Any], _Wanted], Shown]] = {
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
