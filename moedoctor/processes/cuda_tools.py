"""CUDA's command-line tools on this machine: finding them, their versions, and running them.

They come from CUDA_HOME, from PATH or else the usual place of an installed toolkit, and from Triton's
package, which has ptxas (often two, of different CUDA releases), cuobjdump and nvdisasm.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedoctor.processes.guardian import end_tree

_RELEASE = re.compile(r"release (\d+)\.(\d+), V(\d+\.\d+\.\d+)")
_VERSION_SECONDS = 20.0
_MAX_TEXT = 64 << 20


@dataclass(frozen=True)
class Tool:
    """One executable of a CUDA release."""

    name: str
    """``ptxas``, ``nvcc``, ``cuobjdump`` …"""
    path: str
    cuda: tuple[int, int]
    """The release, (12, 8)."""
    version: str
    """In full, ``12.8.93``."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Outcome:
    """The output of a tool; `code` is None if it ran out of time."""

    code: int | None
    stdout: str
    stderr: str

    @property
    def first_line(self) -> str:
        """The first line of its errors, else of its output."""
        text = self.stderr.strip() or self.stdout.strip()
        return text.splitlines()[0].strip() if text else ""


def find_tools(names: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[Tool, ...]:
    """Return the tools of these names, one of each version, the oldest first."""
    tools: dict[str, Tool] = {}
    for path in _list_candidates(names, os.environ if environ is None else environ):
        tool = _identify(str(path)) if os.access(path, os.X_OK) and path.is_file() else None
        if tool is not None:
            tools.setdefault(tool.version, tool)
    return tuple(sorted(tools.values(), key=lambda tool: [int(part) for part in tool.version.split(".")]))


def run_tool(
    path: str, arguments: Sequence[str], *, folder: str | None = None, seconds: float = 60.0
) -> Outcome:
    """Run the tool at `path` without a shell, in `folder`, for `seconds` at most.

    It is ended after 64 MiB of output. Nothing that it started in its session is left. Raises OSError if it
    cannot start.
    """
    pipe, until = subprocess.PIPE, time.monotonic() + seconds
    with subprocess.Popen(
        [path, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    ) as process:
        try:
            texts = _read_pipes(process, until)
            if max(map(len, texts)) < _MAX_TEXT:
                process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Outcome(None, "", f"{Path(path).name}: no answer within {seconds:g} s")
        finally:
            end_tree(process.pid)
    stdout, stderr = (text.decode("utf-8", "replace") for text in texts)
    return Outcome(process.returncode, stdout, stderr)


def _read_pipes(process: subprocess.Popen[bytes], until: float) -> list[bytearray]:
    """Return stdout and stderr, up to their ends or to the bound of one. Raises TimeoutExpired."""
    assert process.stdout
    assert process.stderr
    texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in texts:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and max(map(len, texts.values())) < _MAX_TEXT:
            left = until - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                raise subprocess.TimeoutExpired(process.args, left)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                texts[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
    return list(texts.values())


def _list_candidates(names: Sequence[str], environ: Mapping[str, str]) -> Iterator[Path]:
    folders = [Path(environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    for name in names:
        for folder in folders:
            yield folder / name
        on_path = shutil.which(name, path=environ.get("PATH", ""))
        # The tool on PATH is nearly always that of the usual place, and each question costs time.
        yield Path(on_path) if on_path else Path("/usr/local/cuda/bin") / name
        for folder in _find_triton_folders():
            yield from sorted(folder.glob(f"{name}*"))


def _find_triton_folders() -> list[Path]:
    """Return the folders with the tools of Triton's package, without importing it."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return []
    roots = (spec.submodule_search_locations or []) if spec else []
    return [Path(root) / "backends" / "nvidia" / "bin" for root in roots]


@functools.lru_cache(maxsize=64)
def _identify(path: str) -> Tool | None:
    """Return the tool at `path` with its version, or None. Each path is asked once a process."""
    try:
        outcome = run_tool(path, ["--version"], seconds=_VERSION_SECONDS)
    except OSError:
        return None
    match = _RELEASE.search(outcome.stdout)
    if outcome.code != 0 or match is None:
        return None
    return Tool(Path(path).name.partition("-")[0], path, (int(match[1]), int(match[2])), match[3])
