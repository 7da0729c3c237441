"""Calls something once when a process of vLLM ends, or a fork of it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing import util
from typing import Any

_FIRST = 100
"""Priority of the finalizer: high ones run first, while the device can still be read."""


class ProcessEnd:
    """Calls `action` at the end of this process, and of its forks, once each.

    vLLM forks its engine through `multiprocessing`. Before Python 3.13 such a child ends without `atexit`: it
    runs only the finalizers that were registered since the fork.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._ready: int | None = None
        self._ran: int | None = None
        util.register_after_fork(self, ProcessEnd.prepare)
        self.prepare()

    def prepare(self) -> None:
        """Register for the end of the process that calls this."""
        if self._ready == os.getpid():
            return
        self._ready = os.getpid()
        atexit.register(self.run)
        self._finalize: Any = util.Finalize(None, self.run, exitpriority=_FIRST)

    def run(self) -> None:
        """Call the action, unless this process did so before."""
        if self._ran == os.getpid():
            return
        self._ran = os.getpid()
        self._action()
