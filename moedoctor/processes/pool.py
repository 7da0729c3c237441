"""Runs jobs, each in a child process of its own, and turns every way of dying into a record.

Children are forked from a fork server that has imported torch but never touched CUDA, so a case costs
milliseconds, not an import, and no case sees the CUDA context of another. Without a fork server (Windows)
they are spawned.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from moedoctor.processes import deaths
from moedoctor.processes.child import Request, main
from moedoctor.processes.group import kill_group, read_tail
from moedoctor.results import Crash, Death, Observation, Outcome, Skip

_GRACE_SECONDS = 2.0
_MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True)
class Finished:
    """A request that was carried out, in whatever way it ended."""

    index: int
    """The index of the request among those given to `run_requests`."""
    outcome: Outcome
    seconds: float


@dataclass
class _Running:
    index: int
    request: Request
    process: BaseProcess
    answer: Connection
    stderr: Path
    started: float

    @property
    def deadline(self) -> float:
        return self.started + self.request.timeout

    def read_stderr(self) -> str:
        return read_tail(self.stderr, deaths.TAIL_BYTES)

    def kill(self) -> None:
        """End the child and everything that it started."""
        self.answer.close()
        if self.process.pid is not None:
            kill_group(self.process.pid)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_GRACE_SECONDS)


class RunInterruptedError(Exception):
    """Ctrl-C or SIGTERM: every child is dead, `finished` holds what was done before."""

    def __init__(self, finished: Sequence[Finished]) -> None:
        super().__init__("interrupted")
        self.finished = tuple(finished)


def run_requests(
    requests: Sequence[Request], *, parallel: int, on_finished: Callable[[Finished], None] = lambda _: None
) -> list[Finished]:
    """Carry out requests: those of ``cpu`` up to `parallel` at once, those of a GPU one at a time per device.

    Returns them in the order of `requests`. Raises RunInterruptedError, with all children killed, on Ctrl-C.
    """
    context = _context()
    waiting = list(range(len(requests)))
    running: list[_Running] = []
    finished: list[Finished] = []
    with tempfile.TemporaryDirectory(prefix="moedoctor-") as folder:
        try:
            while waiting or running:
                for index in _startable(waiting, running, requests, parallel):
                    waiting.remove(index)
                    running.append(_start(context, index, requests[index], Path(folder)))
                for child in _ended(running):
                    running.remove(child)
                    done = Finished(child.index, _collect(child), time.monotonic() - child.started)
                    finished.append(done)
                    on_finished(done)
        except KeyboardInterrupt:
            raise RunInterruptedError(sorted(finished, key=lambda done: done.index)) from None
        finally:
            for child in running:
                child.kill()
    return sorted(finished, key=lambda done: done.index)


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "moedoctor.processes.child", "moedoctor.cli", "moedoctor.processes.preload"]
    )
    return context


def _startable(
    waiting: Sequence[int], running: Sequence[_Running], requests: Sequence[Request], parallel: int
) -> list[int]:
    busy = {child.request.device for child in running if child.request.device != "cpu"}
    room = parallel - sum(child.request.device == "cpu" for child in running)
    startable = []
    for index in waiting:
        device = requests[index].device
        if device == "cpu" and room > 0:
            room -= 1
            startable.append(index)
        elif device != "cpu" and device not in busy:
            busy.add(device)
            startable.append(index)
    return startable


def _start(context: BaseContext, index: int, request: Request, folder: Path) -> _Running:
    receive, send = context.Pipe(duplex=False)
    stderr = folder / f"{index}.stderr"
    process = context.Process(target=main, args=(request, send, str(stderr)), daemon=True)  # type: ignore[attr-defined]
    process.start()  # returns when the child exists; the fork server's own start-up is not the child's time
    send.close()  # only the child may hold it, so that its death closes the pipe
    return _Running(index, request, process, receive, stderr, time.monotonic())


def _ended(running: Sequence[_Running]) -> list[_Running]:
    """Wait until a child answers, dies or runs out of time, and return all that did."""
    if not running:
        return []
    patience = max(0.0, min(child.deadline for child in running) - time.monotonic())
    answers = [child.answer for child in running]
    ready = set(wait([*answers, *(child.process.sentinel for child in running)], patience))
    now = time.monotonic()
    return [
        child
        for child in running
        if child.answer in ready or child.process.sentinel in ready or child.deadline <= now
    ]


def _collect(child: _Running) -> Outcome:
    try:
        if not child.answer.poll() and child.process.is_alive():
            child.kill()
            return deaths.hang(child.request.timeout, child.read_stderr())
        payload = child.answer.recv_bytes(_MAX_ANSWER_BYTES)
    except (EOFError, OSError):
        child.process.join(_GRACE_SECONDS)
        if child.process.is_alive():
            child.kill()
        return deaths.from_exit(child.process.exitcode or 0, child.read_stderr())
    finally:
        child.kill()
    try:
        reply = json.loads(payload)
        if "evidence" in reply:
            return Observation(reply["evidence"])
        if "skip" in reply:
            return Skip(reply["skip"])
        death, message = Death(reply["death"]), reply["message"]
    except (ValueError, KeyError, TypeError) as error:
        death, message = Death.SILENT, f"answer cannot be read: {error}"
    return Crash(death, message, deaths.last_lines(child.read_stderr()))
