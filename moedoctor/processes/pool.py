"""Runs jobs, each in a child process of its own, and turns every way of dying into a record.

Children are forked from a fork server that has imported torch but never touched CUDA, so a case
costs milliseconds, not an import, and no case sees another one's CUDA context. Where there is no
fork server (Windows) they are spawned.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from moedoctor.processes import child, deaths
from moedoctor.results import Crash, Death, Observation, Skip

Outcome = Observation | Crash | Skip

_GRACE_SECONDS = 2.0
_MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """One request and its limits."""

    request: child.Request
    timeout: float
    """Seconds until the child is killed, from its start."""

    @property
    def device(self) -> str:
        return self.request.device


@dataclass(frozen=True)
class Finished:
    """A job that ran, in whatever way it ended."""

    index: int
    """The job's place in the sequence given to `run_jobs`."""
    outcome: Outcome
    seconds: float


@dataclass
class _Running:
    index: int
    job: Job
    process: BaseProcess
    answer: Connection
    stderr: Path
    started: float

    @property
    def deadline(self) -> float:
        return self.started + self.job.timeout


class RunInterruptedError(Exception):
    """Ctrl-C or SIGTERM: every child is dead, `finished` holds what was done before."""

    def __init__(self, finished: Sequence[Finished]) -> None:
        super().__init__("interrupted")
        self.finished = tuple(finished)


def run_jobs(
    jobs: Sequence[Job], *, parallel: int, on_finished: Callable[[Finished], None] = lambda _: None
) -> list[Finished]:
    """Run all jobs: those of ``cpu`` up to `parallel` at once, those of a GPU one at a time per device.

    Returns them in the order of `jobs`. Raises RunInterruptedError, with all children killed, on Ctrl-C.
    """
    context = _context()
    waiting = list(range(len(jobs)))
    running: list[_Running] = []
    finished: list[Finished] = []
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        try:
            while waiting or running:
                for index in _startable(waiting, running, jobs, parallel):
                    waiting.remove(index)
                    running.append(_start(context, index, jobs[index], Path(folder)))
                for one in _ended(running):
                    running.remove(one)
                    done = Finished(one.index, _collect(one), time.monotonic() - one.started)
                    finished.append(done)
                    on_finished(done)
        except KeyboardInterrupt:
            raise RunInterruptedError(sorted(finished, key=lambda one: one.index)) from None
        finally:
            for one in running:
                _kill(one)
    return sorted(finished, key=lambda one: one.index)


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "moedoctor.processes.child", "moedoctor.cli", "moedoctor.processes.preload"]
    )
    return context


def _startable(
    waiting: Sequence[int], running: Sequence[_Running], jobs: Sequence[Job], parallel: int
) -> list[int]:
    busy = {one.job.device for one in running if one.job.device != "cpu"}
    room = parallel - sum(one.job.device == "cpu" for one in running)
    chosen = []
    for index in waiting:
        device = jobs[index].device
        if device == "cpu" and room > 0:
            room -= 1
            chosen.append(index)
        elif device != "cpu" and device not in busy:
            busy.add(device)
            chosen.append(index)
    return chosen


def _start(context: BaseContext, index: int, job: Job, folder: Path) -> _Running:
    receive, send = context.Pipe(duplex=False)
    stderr = folder / f"{index}.stderr"
    process = context.Process(target=child.main, args=(job.request, send, str(stderr)), daemon=True)  # type: ignore[attr-defined]
    process.start()  # returns when the child exists; the fork server's own start-up is not the child's time
    send.close()  # only the child may hold it, so that its death closes the pipe
    return _Running(index, job, process, receive, stderr, time.monotonic())


def _ended(running: Sequence[_Running]) -> list[_Running]:
    """The children that answered, died or ran out of time; waits for the first of them."""
    if not running:
        return []
    patience = max(0.0, min(one.deadline for one in running) - time.monotonic())
    ready = set(
        wait([*(one.answer for one in running), *(one.process.sentinel for one in running)], patience)
    )
    now = time.monotonic()
    return [
        one for one in running if one.answer in ready or one.process.sentinel in ready or one.deadline <= now
    ]


def _collect(one: _Running) -> Outcome:
    try:
        if not one.answer.poll() and one.process.is_alive():
            _kill(one)
            return deaths.hang(one.job.timeout, _stderr(one))
        payload = one.answer.recv_bytes(_MAX_ANSWER_BYTES)
    except (EOFError, OSError):
        one.process.join(_GRACE_SECONDS)
        if one.process.is_alive():
            _kill(one)
        return deaths.from_exit(one.process.exitcode or 0, _stderr(one))
    finally:
        _kill(one)
    return _decode(payload, one)


def _decode(payload: bytes, one: _Running) -> Outcome:
    try:
        reply = json.loads(payload)
        if "evidence" in reply:
            return Observation(reply["evidence"])
        if "skip" in reply:
            return Skip(reply["skip"])
        return Crash(Death(reply["death"]), reply["message"], deaths.last_lines(_stderr(one)))
    except (ValueError, KeyError, TypeError) as error:
        return Crash(Death.SILENT, f"answer cannot be read: {error}", deaths.last_lines(_stderr(one)))


def _kill(one: _Running) -> None:
    """End the child and everything that it started."""
    one.answer.close()
    if hasattr(os, "killpg") and one.process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)  # the child leads its group, also after its own death
    if one.process.is_alive():
        one.process.kill()
    one.process.join(_GRACE_SECONDS)


def _stderr(one: _Running) -> str:
    try:
        with one.stderr.open("rb") as file:
            file.seek(max(0, one.stderr.stat().st_size - deaths.TAIL_BYTES))
            return file.read().decode("utf-8", "backslashreplace")
    except OSError:
        return ""
