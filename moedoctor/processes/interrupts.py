"""Ctrl-C, SIGTERM and SIGHUP end moedoctor with one line, after the report of what finished.

`install` makes them end the process at once. That is right while nothing is lost by it, and it can print no
traceback, because no exception is raised. Inside `hold_signals` they are only noted: what runs there looks at
`get_signal`, or waits with `wait`, ends by itself and reports. Inside `raise_signals` the first raises
Interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_SECONDS = 10.0
"""A signal so long after the first ends the process at once, also inside `hold_signals`."""

_noted: tuple[int, float] | None = None
"""The first signal inside `hold_signals`, and when it came."""
_wake: int | None = None
half_written: set[tuple[str, int]] = set()
"""Files that do not outlive a signal that ends the process: the name, and the descriptor of its folder."""


class Interrupted(KeyboardInterrupt):
    """The work was ended by a signal, whose number is `number`."""

    def __init__(self, number: int, ended: Any = None) -> None:
        """`ended` is what was done until then, if `run_module` or `run_requests` raises this."""
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.ended = ended


def install() -> None:
    """Let each signal end this process with one line and its exit code. What is ignored stays so (nohup)."""
    _handle(_end)


def block() -> None:
    """Let no signal change the exit code any more. Python gives them back to the system before it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def exit_code(otherwise: int = 130) -> int:
    """Return the exit code after a signal: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + _noted[0] if _noted else otherwise


def raise_signals() -> contextlib.AbstractContextManager[None]:
    """Raise Interrupted in the main thread for the first signal, and note the others."""
    return _handle_within(_raise)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Note signals instead of acting on them. Outside the main thread it does nothing."""
    global _wake
    if _wake is not None:  # already held further out
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    try:
        previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        _wake = read
        with _handle_within(_note):
            yield
    finally:
        if _wake is not None:
            signal.set_wakeup_fd(previous)
        _wake = None
        os.close(read)
        os.close(write)


def _handle(handler: Any) -> dict[int, Any]:
    """Set the handler of each signal that is not ignored; return what was set before."""
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    for number, before in previous.items():
        if before != signal.SIG_IGN:
            signal.signal(number, handler)
    return previous


@contextlib.contextmanager
def _handle_within(handler: Any) -> Iterator[None]:
    global _noted
    previous = _handle(handler)
    try:
        yield
    finally:
        if _end not in previous.values():  # a caller of the library goes on
            _noted = None
        # After an interrupt the report is written: a second Ctrl-C must not cost it.
        for number, before in previous.items():
            signal.signal(number, _note if _noted and before is _end else before)


def get_signal() -> int | None:
    """Return the number of the signal that came inside `hold_signals`, or None."""
    return _noted[0] if _noted else None


def check() -> None:
    """Raise Interrupted if a signal came inside `hold_signals`."""
    if _noted:
        raise Interrupted(_noted[0])


def wait(objects: Sequence[Any], seconds: float) -> list[Any]:
    """Return those of `objects` (connections, descriptors) that can be read, after at most `seconds`.

    A signal inside `hold_signals` ends the wait.
    """
    from multiprocessing.connection import wait

    wake = [] if _wake is None else [_wake]
    ready = wait([*objects, *wake], max(0.0, seconds))
    for pipe in wake:
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 4096)
    return [item for item in ready if item != _wake]


def _raise(number: int, frame: object) -> None:
    first = _noted is None
    _note(number, frame)
    if first:
        raise Interrupted(number)


def _note(number: int, frame: object) -> None:
    global _noted
    if _noted is None:
        _noted = (number, time.monotonic())
    elif time.monotonic() - _noted[1] > _PATIENCE_SECONDS:
        _end(number, frame)


def _end(number: int, frame: object) -> None:
    cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""  # a progress bar hides it
    for name, folder in half_written:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(OSError):
        os.write(2, f"{cursor}moedoctor: interrupted\n".encode())
    os._exit(128 + (_noted[0] if _noted else number))
