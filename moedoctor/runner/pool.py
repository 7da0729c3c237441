"""Carries out requests, each in a child process of its own, and turns every way of dying into a record.

Children are forked from a fork server that has imported torch but never touched CUDA (see `server`), so a
case costs milliseconds, not an import, and no case sees the CUDA context of another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from moedoctor import catalogue
from moedoctor.processes import deaths, interrupts
from moedoctor.processes.ask import CALLED_IN, Child, find_working_folder, make_absolute
from moedoctor.results import Crash, Death, Observation, Outcome, Skip, to_plain
from moedoctor.runner.child import Request
from moedoctor.text import explain_missing_torch

_GRACE_SECONDS = 10.0
"""The time that the fork server has to end a job, and what that started; it needs milliseconds."""
_IMPORT_SECONDS = 60.0
"""The time that the import of torch may take."""


@dataclass(frozen=True)
class Finished:
    """A request that was carried out, in whatever way it ended."""

    index: int
    """The index of the request among those given to `run_requests`."""
    outcome: Outcome
    seconds: float


@dataclass
class _Running:
    started: float
    deadline: float
    killed: bool = False


class ServerError(Exception):
    """A fork server that does not start, or lacks torch; one line says why."""


def run_requests(
    requests: Sequence[Request],
    *,
    parallel: int,
    on_finished: Callable[[Finished], None] = lambda _: None,
    seconds: float | None = None,
) -> list[Finished]:
    """Carry out requests: those of ``cpu`` up to `parallel` at once, those of a GPU as each of them allows.

    A GPU's requests start in order; see `Request.together`. After `seconds` the children are killed.
    Returns what finished, in the order of `requests`. Raises Interrupted, with that and all children killed,
    on Ctrl-C, SIGTERM and SIGHUP, and ServerError if no process can be started or a request needs a torch
    that is not installed.
    """
    run = _Run(requests, parallel, on_finished, time.monotonic() + (math.inf if seconds is None else seconds))
    with interrupts.hold_signals():
        try:
            while (run.waiting or run.running) and time.monotonic() < run.end:
                run.step()
        except interrupts.Interrupted as stop:
            raise interrupts.Interrupted(stop.number, run.list_finished()) from None
        finally:
            if run.running:
                _stop_server()
    return run.list_finished()


class _Run:
    def __init__(
        self, requests: Sequence[Request], parallel: int, on_finished: Callable[[Finished], None], end: float
    ) -> None:
        self.requests = requests
        self.parallel = parallel
        self.on_finished = on_finished
        self.end = end
        """The time after which nothing may run, on the clock of `time.monotonic`."""
        self.waiting = list(range(len(requests)))
        self.running: dict[int, _Running] = {}
        self.finished: dict[int, Finished] = {}
        self.alone: set[int] = set()
        """Jobs that ran when the fork server died. One of them may have killed it: each runs again, alone."""

    def list_finished(self) -> list[Finished]:
        return [self.finished[index] for index in sorted(self.finished)]

    def step(self) -> None:
        """Start what can start, then wait until a job ends, a time limit passes or a signal comes."""
        interrupts.check()
        server = _ensure_server()
        try:
            for index in _choose_startable(
                self.waiting, self.running, self.requests, self.parallel, self.alone
            ):
                left_out = ",".join(sorted(catalogue.find_left_out()))
                environ = {**os.environ, CALLED_IN: find_working_folder(), catalogue.LEAVE_OUT: left_out}
                request = to_plain(self.requests[index])
                server.send(start=index, request=request, environ=environ, path=make_absolute(sys.path))
                now = time.monotonic()
                self.running[index] = _Running(now, now + self.requests[index].timeout)
                self.waiting.remove(index)
            patience = min(self.end, *(job.deadline for job in self.running.values())) - time.monotonic()
            message = server.receive(patience)
        except (EOFError, OSError):
            self.restart_server()
            return
        if message is not None:
            index = message["ended"]
            self.finish(index, _read_outcome(message, self.requests[index], self.running[index].killed))
        for index, job in list(self.running.items()):
            if job.deadline <= time.monotonic():
                self.end_late(server, index, job)

    def end_late(self, server: _Server, index: int, job: _Running) -> None:
        if job.killed:  # and the server did not report its end
            self.finish(index, deaths.hang(self.requests[index].timeout, ""))
            self.restart_server()
            return
        job.killed, job.deadline = True, time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(OSError):  # a dead server is noticed by the next step
            server.send(kill=index)

    def restart_server(self) -> None:
        _stop_server()
        if len(self.running) == 1:
            crash = Crash(Death.SIGNAL, "the case ended the process that runs the cases")
            self.finish(next(iter(self.running)), crash)
        self.alone.update(self.running)
        self.waiting = sorted([*self.waiting, *self.running])
        self.running = {}

    def finish(self, index: int, outcome: Outcome) -> None:
        if isinstance(outcome, Crash) and outcome.death is Death.BROKEN_LIBRARY:
            needed = explain_missing_torch(outcome.message)
            if needed:
                raise ServerError(f"{self.requests[index].fault}: {needed}")
        done = Finished(index, outcome, time.monotonic() - self.running.pop(index).started)
        self.finished[index] = done
        self.on_finished(done)


def _choose_startable(
    waiting: Sequence[int],
    running: Collection[int],
    requests: Sequence[Request],
    parallel: int,
    alone: Collection[int] = (),
) -> list[int]:
    if any(index in alone for index in running):
        return []
    if suspects := [index for index in waiting if index in alone]:
        return [] if running else suspects[:1]
    sharing: dict[str, list[int]] = {}
    """GPU -> how many each of its requests allows on it."""
    for index in running:
        sharing.setdefault(requests[index].device, []).append(requests[index].together)
    room = parallel - sum(requests[index].device == "cpu" for index in running)
    startable, full = [], set()
    for index in waiting:
        device = requests[index].device
        if device == "cpu" and room > 0:
            room -= 1
            startable.append(index)
        elif device != "cpu" and device not in full:
            limits = [*sharing.get(device, ()), requests[index].together, parallel]
            if len(limits) - 2 < max(1, min(limits)):
                sharing.setdefault(device, []).append(requests[index].together)
                startable.append(index)
            else:  # nobody overtakes it: it would wait until all others that share had run
                full.add(device)
    return startable


def _read_outcome(message: Mapping[str, Any], request: Request, killed: bool) -> Outcome:
    if "failed" in message:
        return Crash(Death.SILENT, message["failed"])
    text, stderr, status = message["answer"], message["stderr"], message["status"]
    if not text or status != 0:
        return deaths.hang(request.timeout, stderr) if killed else deaths.from_exit(status, stderr)
    try:
        reply = json.loads(text)
        if "evidence" in reply:
            return Observation(reply["evidence"])
        if "skip" in reply:
            return Skip(reply["skip"])
        return Crash(Death(reply["death"]), reply["message"], deaths.last_lines(stderr))
    except (ValueError, KeyError, TypeError) as error:
        return Crash(Death.SILENT, f"answer cannot be read: {error}", deaths.last_lines(stderr))


class _Server:
    """The fork server of this process, from our side."""

    def __init__(self, without: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.child = Child("moedoctor.runner.server", (theirs.fileno(),), log=deaths.TAIL_BYTES)
        self.link = Connection(ours.detach())
        self.link.send_bytes(json.dumps(dict(without)).encode())

    def send(self, **message: Any) -> None:
        self.link.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return its next message; None after `seconds`, or for a signal. Raises EOFError if it is dead."""
        deadline = time.monotonic() + seconds
        while not self.link.poll():
            log = self.child.log
            pipes = [] if log.ended else [log.pipe]
            ready = interrupts.wait([self.link, *pipes], deadline - time.monotonic())
            log.read()
            if not ready and (interrupts.get_signal() or time.monotonic() >= deadline):
                return None
        message: dict[str, Any] = json.loads(self.link.recv_bytes())
        return message

    def describe_end(self) -> str:
        """Return how it ended, in one line; called after it closed the link."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.process.wait(2.0)
        self.stop()
        return deaths.from_exit(self.child.process.returncode, self.child.log.decode()).message

    def stop(self) -> None:
        """End it and everything below it."""
        if not self.link.closed:
            self.link.close()
        self.child.end()


_server: _Server | None = None


def _ensure_server() -> _Server:
    """Return the fork server, started if there is none. What cannot be imported is left out of it."""
    global _server
    if _server is not None:
        return _server
    tempfile.gettempdir()  # raises FileNotFoundError if there is none; a child would end without an answer
    without: dict[str, str] = {}
    while True:
        try:
            server = _Server(without)
        except OSError as error:
            raise ServerError(f"no child process can be started: {error.strerror}") from error
        loading = ""
        try:
            while True:
                message = server.receive(_IMPORT_SECONDS)
                interrupts.check()
                if message is None:
                    why = f"its import gave no answer within {_IMPORT_SECONDS:g} s"
                    break
                loading = message.get("loading", loading)
                if "ready" in message:
                    _server = server
                    return server
        except (EOFError, OSError):
            why = f"its import ended the process: {server.describe_end()}"
        finally:
            if _server is None:
                server.stop()
        if not loading or loading in without:
            raise ServerError(f"no child process can be started: {server.describe_end()}")
        without[loading] = why


@atexit.register
def _stop_server() -> None:
    global _server
    if _server is not None:
        _server.stop()
        _server = None
