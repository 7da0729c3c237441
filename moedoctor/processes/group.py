"""The life of a child process: it leads a group, ends with its parent, and is killed with what it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def kill_group(leader: int) -> None:
    """End the process `leader` and everything that it started, also after its own death."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_with_fork_server() -> None:
    """In a child of the fork server: lead a group of its own, and end when the fork server ends."""
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_stdin() -> None:
    """In the leader of a group: let nothing of it outlive the parent, whose end closes our stdin.

    A process of its own waits for that, because a thread would also wait for the interpreter's lock.
    """
    if not hasattr(os, "fork"):
        return
    if os.fork() == 0:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        if os.getpgid(0) == os.getppid():  # not if the module was started by hand
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def exit_now() -> NoReturn:
    """End this process without destructors: those of a broken CUDA context can hang or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def read_tail(file: Path, limit: int) -> str:
    """Return the last `limit` bytes of a child's output as text; nothing if there is no such file."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - limit))
            return stream.read().decode("utf-8", "backslashreplace")
    except OSError:
        return ""
