"""Where a report goes: to a file, whole or not at all, or to stdout."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from moedoctor.processes import files
from moedoctor.processes.files import OutputError
from moedoctor.processes.streams import report_loss
from moedoctor.text import print_message


def terminal(path: Path | None) -> tuple[bool, int | None]:
    """Return (colour, columns) of what shows the report; (False, None) for a file or a pipe."""
    if path is not None or not sys.stdout.isatty():
        return False, None
    return not os.environ.get("NO_COLOR"), shutil.get_terminal_size().columns


def emit(text: str, path: Path | None, summary: str) -> None:
    """Write `text` to stdout, or to `path` with one line about it on stderr.

    If `path` cannot be written to any more, `text` goes to stdout and moedoctor ends with 3.
    """
    if path is not None:
        try:
            files.write(path, text)
            print_message(f"{summary}; written to {path}")
            return
        except OutputError as error:
            report_loss(f"{error}; the report is on stdout instead")
    sys.stdout.write(text)
    sys.stdout.flush()


def append_step_summary(markdown: str, environ: Mapping[str, str]) -> None:
    """Add `markdown` to the summary page of a GitHub Actions step, if there is one."""
    if target := environ.get("GITHUB_STEP_SUMMARY"):
        try:
            files.append(Path(target), markdown + "\n")
        except OutputError as error:
            report_loss(f"the step summary is not written: {error}")
