"""The first fault of a core dump as cuda-gdb shows it, where the CUDA toolkit has it."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moedoctor.processes.cuda_tools import run_tool
from moedoctor.text import escape, shorten

_SECONDS = 20.0
_MOST_KILOBYTES = 8 << 20
_MOST_LINES = 20
_SHELL = f'ulimit -v {_MOST_KILOBYTES} && exec "$0" "$@"'
_LINE = re.compile(r"(?:#\d+ |=> ).*")


@dataclass(frozen=True)
class Debugged:
    """The lines of cuda-gdb."""

    lines: tuple[str, ...]
    """The stack of the first thread that faulted, then its next instruction."""
    problem: str | None
    """The reason why there are none."""


def ask_cuda_gdb(file: Path) -> Debugged:
    """Ask cuda-gdb about a dump. It runs no script of a folder or of the dump."""
    path = shutil.which("cuda-gdb")
    if path is None:
        return Debugged(
            (), "cuda-gdb is not on PATH; it is part of the CUDA toolkit and shows inlined functions"
        )
    # cuda-gdb splits its commands at spaces, and this path to the file has none.
    commands = [f"target cudacore /proc/{os.getpid()}/fd/{{}}", "bt", "x/i $pc"]
    with file.open("rb") as stream:
        commands[0] = commands[0].format(stream.fileno())
        asked = [part for command in commands for part in ("-ex", command)]
        options = ["-nx", "-nh", "-batch", "-iex", "set auto-load off", *asked]
        outcome = run_tool("/bin/sh", ["-c", _SHELL, path, *options], folder=os.sep, seconds=_SECONDS)
    lines = [match[0] for line in outcome.stdout.splitlines() if (match := _LINE.match(line))]
    problem = None if lines else f"cuda-gdb: {outcome.first_line or 'it printed nothing'}"
    shown = dict.fromkeys(escape(shorten(" ".join(line.split()), 300)) for line in lines[:_MOST_LINES])
    return Debugged(tuple(shown), problem and escape(shorten(problem, 300)))
