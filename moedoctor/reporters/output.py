"""Where a report goes: to a file, whole or not at all, or to stdout."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moedoctor.interfaces import Reporter
from moedoctor.results import Report


class OutputError(Exception):
    """A place that cannot be written to; one line says why."""


def check_writable(path: Path | None) -> None:
    """Raise OutputError now where `write` would fail later, so that no run is lost for it."""
    if path is None:
        return
    # os.path raises nothing for a name that cannot be one, as Path does.
    if os.path.isdir(path):
        raise OutputError(f"{path}: is a folder; expected the name of a file")
    if not os.path.isdir(path.parent):
        raise OutputError(f"{path}: its folder does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: its folder cannot be written to")


def emit(report: Report, reporter: Reporter, path: Path | None) -> None:
    """Render `report` to `path`, or to stdout, with colour only where a terminal shows it."""
    if path is not None:
        write(path, reporter.render(report))
        return
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    sys.stdout.write(reporter.render(report, colour=terminal and not os.environ.get("NO_COLOR"), width=width))
    sys.stdout.flush()


def write(path: Path, text: str) -> None:
    """Write `text` to a file beside `path` and rename it: a reader never sees half a report.

    Half of a surrogate pair, which UTF-8 has no bytes for, is written as JSON writes it: ``\\ud800``.
    Raises OutputError where `path` cannot be written to.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".moedoctor.")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def append_step_summary(markdown: str, environ: Mapping[str, str]) -> None:
    """Add `markdown` to the summary page of a GitHub Actions step, where there is one."""
    target = environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
