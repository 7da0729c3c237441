"""Where a report goes: to a file, whole or not at all, or to stdout."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moedoctor.text import print_message


class OutputError(Exception):
    """A place that cannot be written to; one line says why."""


def check_writable(path: Path | None) -> None:
    """Raise OutputError now if `write` would fail later, so that no run is lost."""
    if path is None:
        return
    # os.path accepts a name that cannot exist; Path raises.
    if os.path.isdir(path):
        raise OutputError(f"{path}: is a folder; expected the name of a file")
    if not os.path.isdir(path.parent):
        raise OutputError(f"{path}: its folder does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: its folder cannot be written to")


def terminal(path: Path | None) -> tuple[bool, int | None]:
    """Return (colour, columns) of what shows the report; (False, None) for a file or a pipe."""
    if path is not None or not sys.stdout.isatty():
        return False, None
    return not os.environ.get("NO_COLOR"), shutil.get_terminal_size().columns


def emit(text: str, path: Path | None, summary: str) -> None:
    """Write `text` to stdout, or to `path` with one line about it on stderr."""
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write(path, text)
    print_message(f"{summary}; written to {path}")


def write(path: Path, text: str) -> None:
    """Write `text` to a file beside `path` and rename it: a reader never sees half a report.

    Half of a surrogate pair has no bytes in UTF-8. It is written as JSON writes it: ``\\ud800``.
    Raises OutputError if `path` cannot be written to.
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
    """Add `markdown` to the summary page of a GitHub Actions step, if there is one."""
    target = environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
