"""`moedoctor show REPORT`: a stored report in another format."""

from __future__ import annotations

from pathlib import Path

from moedoctor import catalogue
from moedoctor.commands.errors import InputError, as_input_error
from moedoctor.reporters.output import OutputError, check_writable, emit
from moedoctor.results import ReportError, load_report, read_json


def show_command(path: Path, format: str, output: Path | None) -> int:
    """Render the JSON report at `path`; nothing is run and nothing is judged again."""
    with as_input_error(ReportError, OutputError, catalogue.PluginError):
        report = load_report(path)
        if report.command == "bench":
            return _show_bench(path, format, output)
        if format not in catalogue.reporters():
            raise InputError(f"--format {format}: expected one of {', '.join(catalogue.reporters())}")
        check_writable(output)
        emit(report, catalogue.reporters()[format], output)
    return 0


def _show_bench(path: Path, format: str, output: Path | None) -> int:
    """A benchmark of the expert cache or of backends, with its pictures beside a Markdown file."""
    from moedoctor.commands import bench_backends
    from moedoctor.commands.bench_cache import check_format, write_report
    from moedoctor.reporters.bench_backends_json import from_dict as backends_from_dict
    from moedoctor.reporters.bench_backends_json import is_backend_bench
    from moedoctor.reporters.bench_cache_json import from_dict, is_cache_bench

    check_format(format)
    document = read_json(path)
    if is_backend_bench(document):
        with as_input_error(ReportError, OutputError):
            check_writable(output)
            bench_backends.write_report(backends_from_dict(document), format, output)
        return 0
    if not is_cache_bench(document):
        raise InputError(
            f"{path}: is no benchmark that can be shown; expected one of the expert cache or of backends"
        )
    with as_input_error(ReportError, OutputError):
        check_writable(output)
        write_report(from_dict(document), format, output)
    return 0
