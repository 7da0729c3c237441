"""`moedoctor show REPORT`: a stored report in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moedoctor.commands.options import (
    PAGE_FORMATS,
    Full,
    InputError,
    Output,
    ReportFormat,
    Verbose,
    as_input_error,
    rendered,
)
from moedoctor.text import expected_names


def show(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A JSON report.")],
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
    from moedoctor.reporters.output import emit
    from moedoctor.reporters.text import summary_line
    from moedoctor.results import ReportError, load_report

    with as_input_error(ReportError):
        stored = Redactor.of_this_process().record(load_report(report))
    if stored.command == "bench":
        _show_bench(report, format, output, full=full)
        return 0
    with as_input_error(catalogue.PluginError):
        text, problem = rendered(stored, format, output, verbose=verbose, full=full)
        emit(text, output, summary_line(stored))
    return problem or 0


def _show_bench(path: Path, format: str, output: Path | None, *, full: bool) -> None:
    """Show a benchmark of any kind, with its pictures beside a Markdown file."""
    from moedoctor.reporters.pages import bench_backends, bench_cache
    from moedoctor.reporters.pages.bench_engines import from_dict as from_engines
    from moedoctor.results import ReportError, read_json

    if format not in PAGE_FORMATS:
        raise InputError(f"--format {format}: {expected_names(format, PAGE_FORMATS)}")
    with as_input_error(ReportError):
        document = read_json(path)
        kinds = document.get("bench")
        if isinstance(kinds, dict) and "backends" in kinds:
            from moedoctor.commands.bench_backends import write_report

            write_report(bench_backends.from_dict(document), format, output, full=full)
        elif isinstance(kinds, dict) and "cache" in kinds:
            from moedoctor.commands import bench_cache as command

            command.write_report(bench_cache.from_dict(document), format, output, full=full)
        elif isinstance(kinds, dict) and "engines" in kinds:
            from moedoctor.commands import bench_engines

            bench_engines.write_report(from_engines(document), format, output, full=full)
        else:
            raise InputError(f"{path}: is not a benchmark of backends, of engines or of the expert cache")
