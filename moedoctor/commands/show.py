"""`moedoctor show REPORT`: a stored report in another format."""

from __future__ import annotations

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
    deliver_report,
)
from moedoctor.commands.pages import deliver_document
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
    from moedoctor import catalogue
    from moedoctor.redaction import Redactor
    from moedoctor.results import ReportError, load_report, read_json

    with convert_errors(ReportError, catalogue.PluginError):
        document = read_json(report)
        command = document.get("command") if isinstance(document, dict) else None
        if isinstance(command, str) and "page" in load_documents().get(command, ()):
            return _show_page(report, document, format, output, full=full, verbose=verbose)
        stored = Redactor.from_this_process().record(load_report(report))
        _, problem = deliver_report(stored, format, output, verbose=verbose, full=full)
        return problem or 0


def _show_page(
    path: Path, document: dict[str, Any], format: str, output: Path | None, *, full: bool, verbose: bool
) -> int:
    """Show the report of a command that gives a page. Raises ReportError and InputError."""
    from moedoctor.reporters.json import Head
    from moedoctor.reporters.schemas import import_document_type
    from moedoctor.results import ReportError, check_version, from_json

    command, file = document["command"], str(path)
    check_version(document, file)
    from_json(Head, {"schema_version": 1, **document}, file)
    stored: Any = from_json(import_document_type(command), document, file)
    formats = CHECK_FORMATS if "findings" in load_documents()[command] else PAGE_FORMATS
    if format not in formats:
        raise InputError(f"--format {format}: {suggest_expected(format, formats)}")
    try:
        return deliver_document(stored, format, output, full=full, verbose=verbose, stored=document)
    except ReportError:
        raise
    except (LookupError, StopIteration, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        # Each value has the type that it needs, but names what is not there.
        why = shorten(join_lines(f"{type(error).__name__}: {error}"))
        raise ReportError(
            file, f"the parts of this report of `{command}` do not fit together: {why}"
        ) from None
