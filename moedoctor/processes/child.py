"""What runs inside a child process: one case, or one unit of a claim.

The request comes as an argument, the answer goes back as JSON through a pipe. Nothing is unpickled
from a child, so one that went wrong cannot reach into the parent.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from moedoctor import catalogue
from moedoctor.processes import deaths
from moedoctor.processes.group import end_with_fork_server, exit_now
from moedoctor.results import Case, Observation, UnavailableError, plain


@dataclass(frozen=True)
class Request:
    """What a child is to do."""

    fault: str
    """Catalogue id."""
    sources: Mapping[str, str]
    """Subject name -> path of its code."""
    timeout: float
    """Seconds until the child is killed, from its start."""
    case: Case | None = None
    claim: str | None = None
    """Key of the claim test, if `case` is None."""
    unit: str = ""
    device: str = "cpu"
    """``cpu`` or ``cuda:N``; that of the case, if there is one."""


def main(request: Request, answer: Connection, stderr_path: str) -> None:
    """Carry out `request`, send the answer as JSON bytes, end the process."""
    _detach(stderr_path)
    try:
        observation = _perform(request)
        reply: dict[str, Any] = {"evidence": plain(observation.evidence)}
    except UnavailableError as error:
        reply = {"skip": deaths.first_line(str(error))}
    except BaseException as error:
        traceback.print_exc()
        crash = deaths.from_exception(error)
        reply = {"death": crash.death.value, "message": crash.message}
    answer.send_bytes(json.dumps(reply, allow_nan=False).encode())
    answer.close()
    exit_now()


def _perform(request: Request) -> Observation:
    fault = catalogue.faults()[request.fault]
    torch = sys.modules.get("torch")
    if torch is not None and request.device == "cpu":
        torch.set_num_threads(1)  # cases run side by side, one thread each
    elif torch is not None:
        torch.cuda.set_device(request.device)
    if request.case is not None:
        provider = catalogue.subjects()[catalogue.subject_kind(request.case.subject) or ""]
        implementation = provider.implementation(fault, request.case, request.sources)
        observation = fault.observe(request.case, implementation)
    else:
        test = next(test for test in fault.claims if test.key == request.claim)
        assert test.measure is not None
        observation = test.measure(request.unit, request.device, request.sources)
    torch = sys.modules.get("torch")
    if torch is not None and request.device != "cpu" and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an illegal access shows only at the next synchronisation
    return observation


def _detach(stderr_path: str) -> None:
    """Get a process group and a stderr file of our own."""
    end_with_fork_server()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    handle = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.enable(file=sys.stderr)
