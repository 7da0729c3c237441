"""The fork server: imports torch and the plug-ins once, then forks a child for each job.

It runs under a guardian, never touches CUDA, and speaks JSON with the pool through one socket. Requests are
``{"start": index, ...}`` and ``{"kill": index}``. Answers are ``{"loading": name}`` before each import,
``{"ready": true}``, and ``{"ended": index, ...}`` when a job and everything that it started are gone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from typing import IO, Any

from moedoctor.processes.ask import Tail, open_unnamed_file
from moedoctor.processes.deaths import TAIL_BYTES, find_first_line
from moedoctor.processes.guardian import adopt_orphans, end_children, end_tree, end_with, work_in
from moedoctor.results import from_json
from moedoctor.runner import child

MAX_ANSWER_BYTES = 64 << 20


@dataclass
class _Job:
    index: int
    answer: IO[bytes]
    stderr: Tail
    folder: str


class _Server:
    def __init__(self, link: Connection) -> None:
        self.link = link
        self.jobs: dict[int, _Job] = {}
        """Process id -> its job."""
        self.without: dict[str, str] = {}
        """Module that cannot be imported -> why."""

    def load(self, without: dict[str, str]) -> None:
        """Import what the jobs need. A module of `without` is not tried again: its import fails at once."""
        self.without = dict(without)
        for name in ("torch", *sorted(_list_our_plugins())):
            self.send(loading=name)
            if name not in self.without:
                try:
                    importlib.import_module(name)
                except BaseException as error:
                    self.without[name] = find_first_line(f"{type(error).__name__}: {error}")
            if name in self.without:
                for known in [known for known in sys.modules if known.partition(".")[0] == name]:
                    del sys.modules[known]
                sys.modules[name] = None  # type: ignore[assignment]
        self.send(ready=True)

    def serve(self) -> None:
        """Start and kill jobs until the other end closes the link."""
        adopt_orphans()
        wake, woken = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        while True:
            open_pipes = [job.stderr.pipe for job in self.jobs.values() if not job.stderr.ended]
            ready, _, _ = select.select([self.link.fileno(), wake, *open_pipes], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            for job in self.jobs.values():
                if job.stderr.pipe in ready:
                    job.stderr.read()
            self.reap()
            if self.link.fileno() in ready:
                try:
                    asked = json.loads(self.link.recv_bytes())
                except (EOFError, OSError):
                    return
                if "start" in asked:
                    self.start(asked)
                else:
                    for pid in [pid for pid, job in self.jobs.items() if job.index == asked["kill"]]:
                        end_tree(pid)

    def start(self, asked: dict[str, Any]) -> None:
        index = asked["start"]
        try:
            request = from_json(child.Request, asked["request"])
            folder = f"{tempfile.gettempdir()}-{index}"  # the guardian removes it too
            os.mkdir(folder, 0o700)
            answer = open_unnamed_file()
            read, write = os.pipe()
            server, pid = os.getpid(), os.fork()
        except OSError as error:
            # No process, descriptor or space is left. What was opened goes with the server.
            self.send(ended=index, failed=f"could not be started: {error.strerror}")
            return
        if pid == 0:
            try:
                end_with(server)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self.link.close()
                for job in self.jobs.values():
                    os.close(job.stderr.pipe)
                    job.answer.close()
                os.close(read)
                caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
                os.environ.clear()
                os.environ.update(asked["environ"])
                os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", caches)
                sys.path[:] = asked["path"]
                work_in(folder)
                child.main(request, answer, write, self.without)
            finally:
                os._exit(1)  # it must never go on as a second server
        os.close(write)
        self.jobs[pid] = _Job(index, answer, Tail(read, TAIL_BYTES), folder)

    def reap(self) -> None:
        """Report the jobs that ended, after everything that they started."""
        ended: list[tuple[_Job, int]] = []
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] in self.jobs:
                    ended.append((self.jobs.pop(reaped[0]), os.waitstatus_to_exitcode(reaped[1])))
        if ended:
            end_children(spare=self.jobs)
        for job, status in ended:
            job.stderr.read()
            os.close(job.stderr.pipe)
            job.answer.seek(0)
            answer = job.answer.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
            job.answer.close()
            shutil.rmtree(job.folder, ignore_errors=True)
            self.send(ended=job.index, status=status, answer=answer, stderr=job.stderr.decode())

    def send(self, **message: Any) -> None:
        self.link.send_bytes(json.dumps(message).encode())


def _list_our_plugins() -> set[str]:
    """Return the modules of moedoctor's own failures and subjects, so that no child has to import them."""
    groups = ("moedoctor.faults", "moedoctor.subjects")
    modules = {entry.module for group in groups for entry in entry_points(group=group)}
    return {module for module in modules if module.partition(".")[0] == "moedoctor"}


if __name__ == "__main__":
    _server = _Server(Connection(int(sys.argv[1])))
    _server.load(json.loads(_server.link.recv_bytes()))
    _server.serve()
