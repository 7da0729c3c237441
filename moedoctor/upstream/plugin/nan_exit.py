"""Prints what a NaN trace found when the process ends, once.

vLLM forks its engine through `multiprocessing`, and before Python 3.13 such a child ends without `atexit`:
what it runs then are the finalizers that were registered since the fork.
"""

from __future__ import annotations

import atexit
import os
import sys
from multiprocessing import util
from typing import Any, Protocol

from moedoctor.trace.nan_report import NanReport

_FIRST = 100
"""Priority of the finalizer: high ones run first, while the device can still be read."""


class Trace(Protocol):
    """What prints its report; a process that only inherited its record does not."""

    process: int | None
    """The process that made the record, None before."""

    def report(self) -> NanReport | None: ...


class ExitReport:
    """The report of `trace` at the end of this process, and of those forked from it that made a record."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._ready: int | None = None
        self._printed: int | None = None
        util.register_after_fork(self, ExitReport.prepare)
        self.prepare()

    def prepare(self) -> None:
        """Register for the end of the process that calls this."""
        if self._ready == os.getpid():
            return
        self._ready = os.getpid()
        atexit.register(self.print)
        self._finalize: Any = util.Finalize(None, self.print, exitpriority=_FIRST)

    def print(self) -> None:
        """Print the report to standard error, if this process made a record and it was not printed yet."""
        process = os.getpid()
        if self._printed == process or self.trace.process != process:
            return
        self._printed = process
        try:
            report = self.trace.report()
        except Exception as error:  # after an illegal access nothing can be read any more
            print(f"moedoctor: the NaN trace cannot be read: {error}", file=sys.stderr, flush=True)
            return
        if report is not None:
            said = f"moedoctor: NaN trace of process {process}\n{report.text()}"
            print(said, file=sys.stderr, flush=True)
