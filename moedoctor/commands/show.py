"""`moedoctor show REPORT`: a stored report in another format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from moedoctor.commands.options import (
    CHECK_FORMATS,
    PAGE_FORMATS,
    Full,
    InputError,
    Output,
    ReportFormat,
    Verbose,
    convert_errors,
    deliver,
    render,
)
from moedoctor.commands.pages import Wanted, make_page
from moedoctor.reporters.json import load_documents
from moedoctor.text import join_lines, shorten, suggest_expected


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

    with convert_errors(ReportError):
        document = read_json(report)
        command = document.get("command") if isinstance(document, dict) else None
        if isinstance(command, str) and "page" in load_documents().get(command, ()):
            _deliver_page(report, document, Wanted(format, full, verbose), output)
            return 0
        return _render_run(report, format, output, full=full, verbose=verbose)


def _render_run(path: Path, format: str, output: Path | None, *, full: bool, verbose: bool) -> int:
    """Show a report of `run`. Raises ReportError for anything that is none."""
    from moedoctor import catalogue
    from moedoctor.redaction import Redactor
    from moedoctor.reporters.github import step_summary
    from moedoctor.reporters.output import append_step_summary, emit
    from moedoctor.reporters.text import summarize
    from moedoctor.results import load_report

    stored = Redactor.from_this_process().record(load_report(path))
    with convert_errors(catalogue.PluginError):
        text, problem = render(stored, format, output, verbose=verbose, full=full)
        emit(text, output, summarize(stored))
    if format == "github":
        append_step_summary(step_summary(stored), os.environ)
    return problem or 0


def _deliver_page(path: Path, document: dict[str, Any], wanted: Wanted, output: Path | None) -> None:
    """Show the report of a command that gives a page. Raises ReportError and InputError."""
    from moedoctor.reporters.json import Head
    from moedoctor.reporters.pages.bench import read_bench
    from moedoctor.reporters.schemas import import_document_type
    from moedoctor.results import ReportError, check_version, from_json

    command, file = document["command"], str(path)
    check_version(document, file)
    from_json(Head, {"schema_version": 1, **document}, file)
    stored: Any = from_json(import_document_type(command), document, file)
    try:
        if command == "bench":
            stored = read_bench(document)
        page, summary, findings = make_page(command, stored, wanted)
        formats = PAGE_FORMATS if findings is None else CHECK_FORMATS
        if wanted.format not in formats:
            raise InputError(f"--format {wanted.format}: {suggest_expected(wanted.format, formats)}")
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
    except (LookupError, StopIteration, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        # Each value has the type that it needs, but names what is not there.
        why = shorten(join_lines(f"{type(error).__name__}: {error}"))
        raise ReportError(
            file, f"the parts of this report of `{command}` do not fit together: {why}"
        ) from None
