"""Runs a program for a test, and says whether a process still runs."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which takes at most five minutes, and keep what it prints."""
    usual = {"capture_output": True, "encoding": "utf-8", "timeout": 300, "check": False}
    return subprocess.run(command, **{**usual, **options})


def still_runs(pid: int, seconds: float = 10) -> bool:
    """Return whether the process runs after that time at most; a zombie does not.

    A signal is sent before its process has ended, later on a busy machine.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    return True
