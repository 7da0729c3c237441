"""Shared by the commands: their options, the error for bad input, and the way a page gets out."""

from __future__ import annotations

import contextlib
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from moedoctor.text import clean, join_lines, print_message, shorten, suggest_expected

if TYPE_CHECKING:
    from moedoctor.diagnose.ignores import Ignore
    from moedoctor.reporters.chart import Chart
    from moedoctor.results import Report

PAGE_FORMATS = ("table", "json", "markdown", "html")
TEXT_FORMATS = (*PAGE_FORMATS, "sarif")
CHECK_FORMATS = (*PAGE_FORMATS, "junit", "github", "sarif")
FULL_FORMATS = ("markdown", "html")
"""The formats of a file that a person reads at leisure: they also get the environment."""
_MAX_REASONS = 10
_WORD = re.compile(r"\w{4,}")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class InputError(Exception):
    """Wrong usage or bad input: exit code 2 and one line."""


@contextlib.contextmanager
def convert_errors(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Turn the errors of loaders and parsers into InputError and keep their line, with a text before it."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{before}{error}") from error


def option(metavar: str, help: str, parser: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """Return an option with the name of its value in the help; `parser` may raise ValueError."""
    return typer.Option(metavar=metavar, help=help, parser=parser, **more)


def declare(**declared: Any) -> Callable[[_Function], _Function]:
    """Give the parameters of a command their options, by name; a text is the help of a plain flag.

    The options stand together as a table, and the signature keeps the types and defaults.
    """

    def attach(function: _Function) -> _Function:
        types = get_type_hints(function)
        for parameter, made in declared.items():
            name = f"--{parameter.replace('_', '-')}"
            if isinstance(made, str):
                made = typer.Option(name, help=made)
            elif made.parser is not None:
                made.parser = name_errors(name, made.parser)
            function.__annotations__[parameter] = Annotated[types[parameter], made]
        return function

    return attach


def name_errors(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser whose errors name the option and the value that it was given."""

    def parse_named(value: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise InputError(f"{name} {value}: {error}") from None

    return parse_named


def choose_from(known: Sequence[str] | str) -> Callable[[str], str]:
    """Return a parser for an option that takes one of the known values, in any case.

    The values are given, or named as ``module:name``. The module is imported when the option is used, so
    that `--help` stays fast; a function there is called.
    """

    def parse(value: str) -> str:
        from moedoctor.catalogue import PluginError

        values: Any = pkgutil.resolve_name(known) if isinstance(known, str) else known
        with convert_errors(PluginError):
            valid = [str(known_value) for known_value in (values() if callable(values) else values)]
        for valid_value in valid:
            if value.lower() == valid_value.lower():
                return valid_value
        raise ValueError(suggest_expected(value, valid))

    return parse


def number(
    expected: str = "a number above 0", *, zero: bool = False, most: float = 1e12, whole: bool = False
) -> Callable[[str], float]:
    """Return a parser for a number above 0, or from 0 on with `zero`, and up to `most`."""

    def parse(value: str) -> float:
        try:
            parsed: float = int(value) if whole else float(value)
        except ValueError:
            parsed = math.nan
        if not (0 < parsed <= most or (zero and parsed == 0)):  # NaN is neither
            raise ValueError(f"expected {expected}")
        return parsed

    return parse


def require_writable(path: Path | None) -> Path | None:
    """Return `path`. Raises InputError before anything runs if it cannot be written to."""
    from moedoctor.processes.files import OutputError, check_writable

    if path is not None:
        with convert_errors(OutputError):
            check_writable(path)
    return path


def make_folder(path: Path | None) -> Path | None:
    """Return `path`, a folder that exists now. Raises InputError if files cannot be written into it."""
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be made a folder ({error.strerror})") from None
        require_writable(path / "moedoctor")
    return path


def _check_output(path: Path | None) -> Path | None:
    """Return a file to write to, or None for stdout. Raises InputError."""
    from moedoctor.processes.files import OutputError, stream_of

    with convert_errors(OutputError):
        return None if path is not None and stream_of(path) == 1 else require_writable(path)


def _check_device(name: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda:\d{1,2}", name) is None:
        raise InputError(f"--device {name}: expected auto, cpu or cuda:N")
    return name


_SUFFIXES = {
    ".json": "json",
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".sarif": "sarif",
    ".xml": "junit",
    ".txt": "table",
}
"""The end of a file's name -> the format that it asks for."""


def _format(known: Sequence[str] | str, help: str = "") -> Any:
    parse: Callable[[str], str] = name_errors("--format", choose_from(known))

    def choose_by_suffix(context: typer.Context, value: str) -> str:
        """Return the format that the name of the output asks for, unless one is given."""
        source = context.get_parameter_source("format")
        output = context.params.get("output")
        wanted = None if output is None else _SUFFIXES.get(output.suffix.lower())
        if wanted is None or (source is not None and source.name != "DEFAULT"):
            return value
        try:
            return parse(wanted)
        except InputError:
            raise InputError(
                f"-o {output}: this command has no format {wanted}; give --format, or another suffix"
            ) from None

    help = help or f"Format of the output: {', '.join(known[:-1])} or {known[-1]}."
    return typer.Option(
        "--format", "-f", metavar="FORMAT", parser=parse, callback=choose_by_suffix, help=help
    )


ReportFormat = Annotated[
    str,
    _format(
        "moedoctor.catalogue:load_reporters",
        "Format of the report: table, json, markdown, html, junit, github, sarif, or one of another package.",
    ),
]
PageFormat = Annotated[str, _format(PAGE_FORMATS)]
TextFormat = Annotated[str, _format(TEXT_FORMATS)]
CheckFormat = Annotated[str, _format(CHECK_FORMATS)]
Full = Annotated[
    bool, typer.Option("--full", help="Write all of a Markdown report, not a digest that fits into an issue.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=_check_output,
        help="Write the output to this file instead of stdout; its suffix chooses the format.",
    ),
]
FailOn = Annotated[
    str,
    option(
        "SEVERITY",
        "Exit with 1 for findings of this severity and worse: error, warning (default), note, or never.",
        name_errors("--fail-on", choose_from("moedoctor.diagnose.ignores:FAIL_ON")),
        show_default=False,
    ),
]
IgnoreOption = Annotated[
    list[str] | None,
    option(
        "ID=REASON",
        "Leave a finding out and say why, such as MD016='MARLIN is set until 2027-01-31'. After that day it "
        "counts again. May be repeated.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show every case and every claim in the table, not 120 lines.")
]
Tolerance = Annotated[
    list[str] | None,
    option("[KEY=]SHARE", "How much worse a figure may become: 5% for all figures, KEY=5% for one."),
]
Device = Annotated[
    str,
    option("GPU", "Where to run: cpu, cuda:N, or auto for a GPU if there is one.", callback=_check_device),
]
Capability = Annotated[
    str | None,
    option("X.Y", "Compute capability of the GPU, such as 12.0. Default: the GPU of this machine."),
]


def require_release(text: str) -> str:
    """Return a vLLM release of the tables, without a leading v. Raises InputError for another one."""
    from moedoctor.fixes.backends.release_tables import load_releases

    if text.removeprefix("v") not in load_releases():
        raise InputError(f"--release {text}: the tables know {', '.join(load_releases())}")
    return text.removeprefix("v")


def choose_release(text: str) -> tuple[str, str]:
    """Return a vLLM release of the tables and an empty text; for a newer one the newest, and a line about it.

    Raises InputError for an older one, and for text that is no version.
    """
    from packaging.version import InvalidVersion, Version

    from moedoctor.fixes.backends.release_tables import load_releases

    named, newest = text.removeprefix("v"), list(load_releases())[-1]
    with contextlib.suppress(InvalidVersion):
        if Version(named) > Version(newest):
            return newest, f"vLLM {named} is newer than the known releases: this is the answer for {newest}"
    return require_release(text), ""


def require_capability(text: str | None) -> str:
    """Return a compute capability of the tables, such as 12.0, for ``120`` too. Raises InputError.

    `text` is that of this machine if none is named, and None without a GPU.
    """
    from moedoctor.fixes.arch.targets import Target
    from moedoctor.fixes.backends.release_tables import CAPABILITIES

    if not text:
        raise InputError("no NVIDIA GPU is visible here; name one: --sm 12.0")
    try:
        target = Target.parse("".join(text.lower().split()))
        capability = f"{target.major}.{target.minor}"
    except ValueError:
        capability = ""
    if capability not in CAPABILITIES:
        raise InputError(f"--sm {text}: {suggest_expected(text, CAPABILITIES)}")
    return capability


def read_ignores(given: Sequence[str] | None, known: Callable[[str], Sequence[str]]) -> tuple[Ignore, ...]:
    """Return the rules of ``--ignore``; `known` gives the ids that a rule may have. Raises InputError."""
    from moedoctor.diagnose.ignores import IgnoreError, read_ignore

    with convert_errors(IgnoreError):
        return tuple(read_ignore(text, known(text.partition("=")[0].strip())) for text in given or ())


def split_texts(given: Sequence[str] | None) -> list[str]:
    """Return the texts of an option that may be repeated and may hold several, with commas between."""
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]


def parse_names(option_name: str, given: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names that an option gives, each once. Raises InputError for one that is not known."""
    given_names = tuple(dict.fromkeys(name.lower() for name in split_texts(given)))
    for name in given_names:
        if name not in known:
            raise InputError(f"{option_name} {name}: {suggest_expected(name, known)}")
    return given_names


def parse_numbers(
    option_name: str, given: Sequence[str] | None, most: int, expected: str, least: int = 1
) -> tuple[int, ...]:
    """Return the whole numbers from `least` to `most` that an option gives, sorted. Raises InputError."""
    values = set()
    for text in split_texts(given):
        if not (text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= most):
            raise InputError(f"{option_name} {shorten(text)}: expected {expected}")
        values.add(int(text))
    return tuple(sorted(values))


def check_gpu(device: str, facts: Mapping[str, Any]) -> None:
    """Raise InputError if `device` is a GPU that this machine does not have."""
    if not device.startswith("cuda"):
        return
    from moedoctor.environment import explain_missing_gpu

    reason = explain_missing_gpu(facts)
    if reason is None and int(device.partition(":")[2]) >= len(facts.get("gpus") or ()):
        reason = "there is no such GPU"
    if reason is not None:
        raise InputError(f"--device {device}: {reason}")


def deliver_report(
    report: Report, format: str, output: Path | None, *, verbose: bool, full: bool
) -> tuple[str, int | None]:
    """Write a report of `run`, also to the summary of GitHub. Return its text, and None.

    If its reporter raises, the report is written as JSON, and an exit code is returned: 3 for a reporter of
    ours, else 2. With `verbose` a table has every case and every claim; with `full` Markdown has them, too.
    """
    from moedoctor import catalogue
    from moedoctor.processes.deaths import find_first_line
    from moedoctor.reporters.github import step_summary
    from moedoctor.reporters.markdown import MarkdownReporter
    from moedoctor.reporters.output import append_step_summary, emit, inspect_terminal
    from moedoctor.reporters.table import TableReporter
    from moedoctor.reporters.text import summarize
    from moedoctor.results import to_json

    reporter, problem = catalogue.load_reporters()[format], None
    if verbose and isinstance(reporter, TableReporter):
        reporter = TableReporter(verbose=True)
    if full and isinstance(reporter, MarkdownReporter):
        reporter = MarkdownReporter(full=True)
    colour, width = inspect_terminal(output)
    try:
        text = reporter.render(report, colour=colour, width=width)
    except Exception as error:
        why = find_first_line(f"{type(error).__name__}: {error}")
        print_message(f"--format {format} failed, this is JSON instead: {why}")
        text, problem = to_json(report), 3 if catalogue.is_ours(reporter) else 2
    emit(text, output, summarize(report))
    if format == "github":
        append_step_summary(step_summary(report))
    return text, problem


def draw_picture(chart: Chart, path: Path) -> bool:
    """Draw a chart, and return whether that worked. If not, a line on stderr says why."""
    from moedoctor.processes.files import OutputError
    from moedoctor.processes.streams import report_loss
    from moedoctor.reporters.plots import PlotError, draw

    try:
        draw(chart, path)
        return True
    except PlotError as error:
        print_message(f"no picture: {error}")
    except OutputError as error:
        report_loss(f"no picture: {error}")
    return False


def print_reasons(code: int, reasons: Sequence[str], report: str, output: Path | None) -> None:
    """Print why the exit code is not 0, a line for each reason.

    A reason that a report on the terminal holds is not printed a second time: its page may say it in another
    order, and without the file that the command line names, so that words are compared.
    """
    from moedoctor.reporters.output import inspect_terminal

    if inspect_terminal(output)[1] is not None:
        shown = set(_WORD.findall(clean(" ".join((report, *sys.argv))).lower()))
        reasons = [reason for reason in reasons if not shown.issuperset(_WORD.findall(reason.lower()))]
    for reason in reasons[:_MAX_REASONS] if code else ():
        print_message(f"exit code {code}: {shorten(join_lines(reason), 400)}")
    if code and len(reasons) > _MAX_REASONS:
        more = len(reasons) - _MAX_REASONS
        print_message(f"exit code {code}: {more} more reasons; --format json lists all in summary.reasons")
