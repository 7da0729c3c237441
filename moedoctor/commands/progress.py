"""A progress bar on stderr, where stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from moedoctor.runner.run import Progress


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Give a function that shows how many jobs are done; it does nothing away from a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or 1, description=what)

        yield show
