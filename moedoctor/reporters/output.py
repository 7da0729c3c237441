"""The place of a report: to a file, whole or not at all, or to stdout."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from moedoctor.processes import files
from moedoctor.processes.files import OutputError
from moedoctor.processes.streams import report_loss
from moedoctor.text import join_lines, print_message, shorten

Progress = Callable[[int, int, str], None]
"""Takes how many jobs are done, how many there are, and what runs now."""
_DAY = 86_400


def inspect_terminal(path: Path | None) -> tuple[bool, int | None]:
    """Return (color, columns) of what shows the report; (False, None) for a file or a pipe."""
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


def append_step_summary(markdown: str) -> None:
    """Add `markdown` to the summary page of a GitHub Actions step, if there is one."""
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            files.append(Path(target), markdown + "\n")
        except OutputError as error:
            report_loss(f"the step summary is not written: {error}")


@contextlib.contextmanager
def show_progress(*, remaining: bool = False) -> Iterator[Progress]:
    """Give a function that shows how many jobs are done; it shows nothing if stderr is not a terminal.

    With `remaining`, the bar also says how long the rest will take, if it takes as long as what was done.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        *((progress.TextColumn("left, about"), progress.TimeRemainingColumn()) if remaining else ()),
    )
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True, speed_estimate_period=_DAY) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or 1, description=shorten(join_lines(what)))

        yield show
