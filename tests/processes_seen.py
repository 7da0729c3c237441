"""Whether a process still runs, for tests of what ends them."""

import time
from pathlib import Path


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
