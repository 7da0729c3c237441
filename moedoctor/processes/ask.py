"""Runs ``python -m module`` in a child process: a JSON request in, JSON answers out, within a time limit.

The parent calls `ask` for one answer, or `run_module` for all that the child wrote before it ended. The
child module ends with ``if __name__ == "__main__": answer(function)``. It may import anything and die in any
way. Nothing of it is left: neither what it started, nor byte code, nor its folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from moedoctor.processes.deaths import first_line, signal_name
from moedoctor.processes.group import end_with_stdin, exit_now, kill_group, read_tail
from moedoctor.results import plain

CACHES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "FLASHINFER_WORKSPACE_BASE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
)
"""Variables that name the folders in which torch, Triton, vLLM and FlashInfer keep things."""
_QUIET = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_MAX_ANSWER_BYTES = 64 << 20
_MAX_LOG_BYTES = 32 << 20


class ChildError(Exception):
    """A child that gave no answer; as text, why, in one line."""


@dataclass(frozen=True)
class Ended:
    """A child process that ended, in whatever way."""

    answers: tuple[Any, ...]
    """What it wrote, in order, also if it died after that."""
    code: int | None
    """Its exit status, negative for a signal; None if it was killed at the time limit."""
    log: str
    """What it printed, at most the last 32 MiB."""
    seconds: float
    limit: float

    @property
    def problem(self) -> str | None:
        """Why it did not end well, in one line; None if it did."""
        if self.code is None:
            return f"no answer within {self.limit:g} s"
        if self.code == 0:
            return None
        lines = self.log.strip().splitlines()
        last_words = first_line(lines[-1]) if lines else "it printed nothing"
        ended = f"killed by {signal_name(-self.code)}" if self.code < 0 else f"exit status {self.code}"
        return f"{ended}: {last_words}"


def ask(module: str, request: Any = None, *, seconds: float, **options: Any) -> dict[str, Any]:
    """Return the one JSON object that the child answers. The options are those of `run_module`.

    Raises ChildError for the time limit, an exit status, or an answer that is not one JSON object.
    """
    ended = run_module(module, request, seconds=seconds, **options)
    if ended.problem is not None:
        raise ChildError(ended.problem)
    if len(ended.answers) != 1 or not isinstance(ended.answers[0], dict):
        raise ChildError("its answer is not one JSON object")
    return ended.answers[0]


def run_module(
    module: str,
    request: Any = None,
    *,
    seconds: float,
    environ: Mapping[str, str] | None = None,
    caches: Sequence[str] = (),
) -> Ended:
    """Run ``python -m module`` on `request`, for `seconds` at most.

    `environ` is set over this process's own variables. The variables in `caches` name the child's own folder,
    which is removed. The child's working directory is that folder.
    """
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as name:
        folder = Path(name)
        (folder / "request").write_text(json.dumps(plain(request)), encoding="utf-8")
        private = dict.fromkeys(caches, str(folder / "cache"))
        (folder / "cache").mkdir()
        started = time.monotonic()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, name],
                stdin=subprocess.PIPE,  # closed when this process ends: the child then ends its whole group
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": _search_path(), **_QUIET, **private, **(environ or {})},
                start_new_session=True,
            )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process.pid)
            process.kill()
            process.communicate()
        took = time.monotonic() - started
        answers = tuple(_answers(folder / "answers"))
        return Ended(answers, code, read_tail(folder / "log", _MAX_LOG_BYTES), took, seconds)


def answer(respond: Callable[[Any], Any]) -> NoReturn:
    """In the child: call `respond` with the request, write what it returns, and end the process.

    If it returns an iterator, each value is written as it comes.
    """
    end_with_stdin()
    faulthandler.enable()
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request").read_text(encoding="utf-8"))
    with (folder / "answers").open("w", encoding="utf-8") as out:
        values = respond(request)
        for value in values if isinstance(values, Iterator) else (values,):
            out.write(json.dumps(plain(value)) + "\n")
            out.flush()
    exit_now()


def _search_path() -> str:
    """The child's PYTHONPATH: it finds this moedoctor also if that is not an installed package."""
    ours = str(Path(__file__).resolve().parent.parent.parent)
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, ours])


def _answers(file: Path) -> Iterator[Any]:
    try:
        with file.open("rb") as stream:
            lines = stream.read(_MAX_ANSWER_BYTES).splitlines(keepends=True)
    except OSError:
        return
    for line in lines:
        if not line.endswith(b"\n"):
            return  # the child died while it wrote
        yield json.loads(line)
