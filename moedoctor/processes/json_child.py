"""Asks a child process for facts: one JSON object on its stdout, within a time limit, or one line why not.

What is asked may import anything and die in any way: the parent sees a `ChildError`, never a crash. A child
writes nothing into the environment: no byte code, and caches go into a folder that is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moedoctor.processes.deaths import first_line

_CACHES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "FLASHINFER_WORKSPACE_BASE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
)
_QUIET = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class ChildError(Exception):
    """A child that gave no facts; one line says why."""


def ask(
    module: str, arguments: Sequence[str] = (), *, seconds: float, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object that ``python -m module arguments`` answers with, by `answer`.

    Raises ChildError for a time-out, an exit status, or an answer that is no JSON object.
    """
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**(os.environ if environ is None else environ), **_QUIET, **dict.fromkeys(_CACHES, folder)},
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ChildError(f"no answer within {seconds:g} s") from None
        finally:
            _end(process)
    if process.returncode:
        raise ChildError(_last_words(process.returncode, stderr.decode("utf-8", "replace")))
    try:
        answer = json.loads(stdout)
    except ValueError:
        raise ChildError("its answer is no JSON") from None
    if not isinstance(answer, dict):
        raise ChildError("its answer is no JSON object")
    return answer


def answer(collect: Callable[[], Mapping[str, Any]]) -> None:
    """In the child: answer with what `collect` gives. What anything prints meanwhile goes to stderr."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(stdout, "wb") as pipe:
        pipe.write(json.dumps(collect(), default=str).encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and everything that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the child leads its group, also after its own death
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _last_words(code: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    said = first_line(lines[-1]) if lines else "it said nothing"
    try:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    except ValueError:
        ended = f"killed by signal {-code}"
    return f"{ended}: {said}"
