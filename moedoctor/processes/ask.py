"""Runs ``python -m module`` in a child process: a JSON request in, JSON answers out, within a time limit.

The parent calls `ask` for one answer, or `run_module` for all that the child wrote before it ended. The
child module ends with ``if __name__ == "__main__": answer(function)``. It may import anything and die in any
way. Nothing of it is left: neither what it started, nor byte code, nor its folder (see `guardian`). Request
and answers go through files without a name, so no other process can take them away.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from moedoctor.processes import interrupts
from moedoctor.processes.deaths import find_first_line, name_signal
from moedoctor.processes.guardian import NO_FOLDER
from moedoctor.results import to_plain
from moedoctor.text import explain_missing_torch

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
CALLED_IN = "_MOEDOCTOR_CALLED_IN"
"""Names the folder in which moedoctor was called; for its children."""
_GRACE_SECONDS = 6.0
"""The time that a guardian has to end what it guards; it needs milliseconds."""


class ChildError(Exception):
    """A child that gave no answer; as text, why, in one line."""


@dataclass(frozen=True)
class Ended:
    """A child process that ended, in whatever way."""

    answers: tuple[Any, ...]
    """The values that it wrote, in order, also if it died after that."""
    code: int | None
    """Its exit status, negative for a signal; None if it was killed at the time limit."""
    log: str
    """The text that it printed, at most the last 32 MiB."""
    seconds: float
    limit: float
    interrupted: bool = False

    @property
    def problem(self) -> str | None:
        """The reason why it did not end well, in one line; None if it did."""
        if self.interrupted:
            return "interrupted"
        if self.code is None:
            return f"no answer within {self.limit:g} s"
        if self.code == 0:
            return None
        lines = self.log.strip().splitlines()
        last_words = find_first_line(lines[-1]) if lines else "it printed nothing"
        if self.code == NO_FOLDER:
            return last_words
        if self.code > 0 and (missing := explain_missing_torch(last_words)):
            return missing
        ended = f"killed by {name_signal(-self.code)}" if self.code < 0 else f"exit status {self.code}"
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
    watch: Callable[[Any], None] | None = None,
    python: str = sys.executable,
) -> Ended:
    """Run ``python -m module`` on `request`, for `seconds` at most.

    `environ` is set over this process's own variables. The variables in `caches` name the child's own folder,
    which is removed. The child's working directory is that folder. `watch` gets each answer as it comes, at
    most ten times a second. Another `python` needs a PYTHONPATH in `environ` that has moedoctor alone. Raises
    Interrupted, with the child ended, for a signal inside `interrupts.hold_signals`.
    """
    started, seen_bytes = time.monotonic(), 0
    with open_unnamed_file() as asked, open_unnamed_file() as answers:
        asked.write(json.dumps(request, default=to_plain).encode())
        files = (asked.fileno(), answers.fileno())
        variables = {**_QUIET, **(environ or {})}
        with Child(
            module, files, environ=variables, caches=caches, log=_MAX_LOG_BYTES, python=python
        ) as child:
            while child.wait(seconds - (time.monotonic() - started)):
                if watch is not None:
                    seen_bytes = _watch(answers, seen_bytes, watch)
                if interrupts.get_signal():
                    break
            code = child.process.poll()
        took = time.monotonic() - started
        number = None if code is not None else interrupts.get_signal()
        ended = Ended(
            tuple(read_answers(answers)), code, child.log.decode(), took, seconds, number is not None
        )
    if number is not None:
        raise interrupts.Interrupted(number, ended)
    return ended


def answer(respond: Callable[[Any], Any]) -> NoReturn:
    """In the child: call `respond` with the request, write what it returns, and end the process.

    If it returns an iterator, each value is written as it comes. The process ends at once, because the
    destructors of a broken CUDA context can hang.
    """
    faulthandler.enable()
    asked, answered = (int(number) for number in sys.argv[1:3])
    os.lseek(asked, 0, os.SEEK_SET)
    with os.fdopen(asked, encoding="utf-8") as file:
        request = json.load(file)
    with os.fdopen(answered, "w", encoding="utf-8") as out:
        values = respond(request)
        for value in values if isinstance(values, Iterator) else (values,):
            out.write(json.dumps(to_plain(value)) + "\n")
            out.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Tail:
    """The last bytes that came through a pipe, without limit to what came before."""

    def __init__(self, pipe: int, size: int) -> None:
        self.pipe = pipe
        self._size = size
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._cut = False
        self.ended = False
        """True if nobody can write to the pipe any more."""
        os.set_blocking(pipe, False)

    def read(self, most: int = 1 << 20) -> None:
        """Take up to about `most` bytes of what is there."""
        while most > 0 and not self.ended:
            try:
                chunk = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return
            self.ended = not chunk
            most -= len(chunk)
            self._chunks.append(chunk)
            self._held += len(chunk)
            while self._held - len(self._chunks[0]) >= self._size:
                self._held -= len(self._chunks.popleft())
                self._cut = True

    def decode(self) -> str:
        """Return what is kept, without the rest of a line or word whose start is lost; bytes are escaped.

        Masking would not recognize the rest of a secret.
        """
        kept = b"".join(self._chunks)
        if self._cut or len(kept) > self._size:
            kept = re.sub(rb"\A(?:[^\n]*\n|\S+)", b"", kept[-self._size :])
        return kept.decode("utf-8", "backslashreplace")


class Child(contextlib.AbstractContextManager["Child"]):
    """A guarded ``python -m module``, from its start to the end of a ``with`` block, which ends it.

    `descriptors` are inherited, and their numbers are its arguments.
    """

    def __init__(
        self,
        module: str,
        descriptors: Sequence[int],
        *,
        log: int,
        environ: Mapping[str, str] | None = None,
        caches: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        """Keep the last `log` bytes of what it prints; `environ` and `caches` as in `run_module`."""
        guardian = [python, "-m", "moedoctor.processes.guardian", ",".join(caches), module]
        read, write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*guardian, *map(str, descriptors)],
                stdin=subprocess.PIPE,  # closed when this process ends: the guardian then ends the child
                stdout=write,
                stderr=subprocess.STDOUT,
                cwd=os.path.abspath(os.sep),  # ours may be gone
                env={
                    **os.environ,
                    "PYTHONPATH": search_path(),
                    CALLED_IN: find_working_folder(),
                    **(environ or {}),
                },
                start_new_session=True,
                pass_fds=descriptors,
            )
        finally:
            os.close(write)
        self.log = Tail(read, log)
        self._over = False

    def wait(self, seconds: float) -> bool:
        """Read what it prints until it ends, for some time at most; return whether to call this again."""
        if seconds <= 0 or self.process.poll() is not None:
            return False
        # The pipe may end before the child. Outside Linux, a process with its own session may hold it open.
        pipe = () if self.log.ended else (self.log.pipe,)
        if interrupts.wait(pipe, min(seconds, 0.02 if self.log.ended else 0.1)):
            self.log.read()
        return True

    def end(self) -> None:
        """End it and everything that it started, and read the rest of what it printed."""
        if self._over:
            return
        self._over = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self.log.read()
            time.sleep(0.002)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.read()
        os.close(self.log.pipe)

    def __exit__(self, *_: object) -> None:
        self.end()


def open_unnamed_file() -> IO[bytes]:
    """Return an empty file that no folder lists and no other process can take away."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("moedoctor"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def make_absolute(paths: Iterable[str]) -> list[str]:
    """Return the paths as they are found from another working directory."""
    try:
        here = os.getcwd()
    except OSError:  # it is gone, and what is relative to it too
        here = os.sep
    return [os.path.join(here, path) for path in paths]


def find_working_folder() -> str:
    """Return the folder in which moedoctor was called; its children have folders of their own."""
    return os.environ.get(CALLED_IN) or os.path.normpath(*make_absolute(["."]))


def search_path() -> str:
    """The child's PYTHONPATH: it finds this moedoctor also if that is not an installed package."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*make_absolute(filter(None, given)), ours])


def make_helper_environment() -> dict[str, str]:
    """The environment of a process that helps an engine: it sees no GPU, and records nothing itself."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MOEDOCTOR_RECORD": "", "PYTHONPATH": search_path()}


def _watch(file: IO[bytes], start: int, watch: Callable[[Any], None]) -> int:
    """Call `watch` with the whole lines after `start`; return where the next one begins."""
    # The child writes at the file's own position, which it shares: reading must not move it.
    data = os.pread(file.fileno(), _MAX_ANSWER_BYTES, start)
    lines = data[: data.rfind(b"\n") + 1]
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            watch(json.loads(line))
    return start + len(lines)


def read_answers(file: IO[bytes]) -> Iterator[Any]:
    """Give what a child wrote, up to where it died while it wrote."""
    file.seek(0)
    for line in file.read(_MAX_ANSWER_BYTES).splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # the child died while it wrote
