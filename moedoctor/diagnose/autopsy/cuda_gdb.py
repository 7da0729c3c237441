"""The first fault of a core dump as cuda-gdb shows it, where the CUDA toolkit has it."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from moedoctor.processes.cuda_tools import run_tool
from moedoctor.text import escape, shorten

_SECONDS = 20.0
"""For one dump."""
SECONDS = 40.0
"""For all dumps together: each rank of an engine leaves one."""
_MOST_KILOBYTES = 8 << 20
_MOST_LINES = 20
_SHELL = f'ulimit -v {_MOST_KILOBYTES} && exec "$0" "$@"'
_LINE = re.compile(r"(?:#\d+ |=> ).*")


def ask_cuda_gdb(file: Path, until: float) -> tuple[tuple[str, ...], str | None]:
    """Ask cuda-gdb about a dump, up to a time of `time.monotonic`. It runs no script of a folder or dump.

    Return the stack of the first thread that faulted with its next instruction, and why there is none.
    """
    path = shutil.which("cuda-gdb")
    if path is None:
        return (), "cuda-gdb is not on PATH; it is part of the CUDA toolkit and shows inlined functions"
    seconds = min(_SECONDS, until - time.monotonic())
    if seconds <= 0:
        return (), f"the dumps before it took the {SECONDS:g} s that cuda-gdb gets"
    with file.open("rb") as stream:
        # cuda-gdb splits its commands at spaces, and this path to the file has none.
        target = f"target cudacore /proc/{os.getpid()}/fd/{stream.fileno()}"
        asked = [part for command in (target, "bt", "x/i $pc") for part in ("-ex", command)]
        options = ["-nx", "-nh", "-batch", "-iex", "set auto-load off", *asked]
        outcome = run_tool(
            "/bin/sh", ["-c", _SHELL, os.path.abspath(path), *options], folder=os.sep, seconds=seconds
        )
    lines = [match[0] for line in outcome.stdout.splitlines() if (match := _LINE.match(line))]
    answer = outcome.first_line if outcome.code is not None else f"no answer within {seconds:.0f} s"
    problem = None if lines else f"cuda-gdb: {answer or 'it printed nothing'}"
    shown = dict.fromkeys(escape(shorten(" ".join(line.split()), 300)) for line in lines[:_MOST_LINES])
    return tuple(shown), problem and escape(shorten(problem, 300))
