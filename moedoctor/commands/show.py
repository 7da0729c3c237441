"""`moedoctor show REPORT`: a stored report in another format."""

from __future__ import annotations

from pathlib import Path

from moedoctor import catalogue
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.output import OutputError, check_writable, emit
from moedoctor.serialise import ReportError, load_report


def show_command(path: Path, format: str, output: Path | None) -> int:
    """Render the JSON report at `path`; nothing is run and nothing is judged again."""
    with as_input_error(ReportError, OutputError, catalogue.PluginError):
        if format not in catalogue.reporters():
            raise InputError(f"--format {format}: expected one of {', '.join(catalogue.reporters())}")
        check_writable(output)
        emit(load_report(path), catalogue.reporters()[format], output)
    return 0
