"""Asks CUDA for core dumps of the processes of a command, and clears them away when they were read."""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENABLE, FLAGS, FILE = (
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_COREDUMP_GENERATION_FLAGS",
    "CUDA_COREDUMP_FILE",
)
_DEFAULT_FILE = "core_%t_%h_%p.nvcudmp"
"""CUDA's own, in the folder of the command."""
WITHOUT_MEMORY = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory"
)
"""CUDA_ENABLE_LIGHTWEIGHT_COREDUMP=1 did not do it: with driver 580 such a dump held the memory of the GPU.
`skip_abort` is not among the flags: with it, the program went on as if nothing had happened."""
MOST_BYTES = 2 * 2**30
"""Of a dump. One of an H200 with all its registers and no memory has some hundred megabytes."""
PATIENCE = 10.0
"""Seconds that a command gets to end after one of its processes died."""


@dataclass(frozen=True)
class DumpRequest:
    """The variables for a command, and the place of its dumps."""

    variables: Mapping[str, str]
    folder: Path
    """A folder of this record, for this user only."""
    started: float
    ours: bool
    """False if the user's own variables ask for dumps, or say where they go: these stay as they are."""

    @classmethod
    def make(cls, folder: Path, environ: Mapping[str, str]) -> DumpRequest:
        """Make the folder for dumps in `folder`. A variable that `environ` has is kept. Raises OSError."""
        private = Path(tempfile.mkdtemp(prefix="dumps-", dir=folder))
        own = str(private / "cuda.%p.core")
        # Who asks CUDA for dumps himself looks for them where CUDA puts them.
        wanted = {ENABLE: "1", FLAGS: WITHOUT_MEMORY, FILE: _DEFAULT_FILE if environ.get(ENABLE) else own}
        with suppress(OSError):
            # CUDA calls abort(), and a core file of the system would hold the memory of the host.
            Path("/proc/self/coredump_filter").write_text("0")
        variables = {name: environ.get(name) or value for name, value in wanted.items()}
        return cls(variables, private, time.time(), variables[FILE] == own)

    def list_dumps(self) -> list[Path]:
        """Return the dumps that were written since the request."""
        pattern = os.path.abspath(re.sub("%[a-zA-Z]", "*", glob.escape(self.variables[FILE])))
        return sorted(
            file
            for file in map(Path, glob.glob(pattern))
            if file.is_file() and not file.is_symlink() and file.stat().st_mtime >= self.started - 1
        )

    def limit(self) -> None:
        """Empty dumps of ours that are too large, also while they are written."""
        for file in self.list_dumps() if self.ours else ():
            with suppress(OSError):
                if file.stat().st_size > MOST_BYTES:
                    os.truncate(file, 0)

    def is_outlived(self) -> bool:
        """Return True if what wrote the dumps is dead, and has been for a while: the command does not end.

        vLLM's `LLM` waits for good if the process of its engine dies.
        """
        dumps = self.list_dumps() if self.ours else []
        return (
            bool(dumps)
            and time.time() - max(file.stat().st_mtime for file in dumps) > PATIENCE
            and not any(_runs(file.name.split(".")[1]) for file in dumps)
        )

    def keep(self, folder: Path) -> list[Path]:
        """Move dumps of ours to `folder`, for this user only. Return all dumps. Raises OSError."""
        if not self.ours:
            return self.list_dumps()
        for file in self.list_dumps():
            file.chmod(0o600)
        return [file.rename(folder / file.name) for file in self.list_dumps()]

    def clear(self) -> None:
        """Delete dumps of ours that were not kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _runs(process: str) -> bool:
    """Return True unless a process has ended; one that nobody waits for has ended, too."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")
