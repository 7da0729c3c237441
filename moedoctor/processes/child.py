"""What runs inside a child process: one case, or one unit of a claim.

The request comes as an argument, the answer goes back as JSON through a pipe. Nothing is unpickled
from a child, so one that went wrong cannot reach into the parent.
"""

from __future__ import annotations

import ctypes
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
from moedoctor.results import Case, Observation, UnavailableError, plain

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Request:
    """What a child is to do."""

    fault: str
    """Catalogue id."""
    sources: Mapping[str, str]
    """Subject name -> path of its code."""
    case: Case | None = None
    claim: str | None = None
    """Key of the claim test, if `case` is None."""
    unit: str = ""
    device: str = "cpu"


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
    sys.stdout.flush()
    sys.stderr.flush()
    # A poisoned CUDA context can hang or abort in its destructors; the answer is out, so leave at once.
    os._exit(0)


def _perform(request: Request) -> Observation:
    fault = catalogue.faults()[request.fault]
    _prepare_torch(request.device)
    if request.case is not None:
        kind = catalogue.subject_kind(request.case.subject)
        provider = catalogue.subjects()[kind or ""]
        implementation = provider.implementation(fault, request.case, request.sources)
        observation = fault.observe(request.case, implementation)
    else:
        test = next(test for test in fault.claims if test.key == request.claim)
        assert test.measure is not None
        observation = test.measure(request.unit, request.device, request.sources)
    _surface_cuda_errors(request.device)
    return observation


def _prepare_torch(device: str) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if device == "cpu":
        torch.set_num_threads(1)  # cases run side by side, one thread each
    else:
        torch.cuda.set_device(device)


def _surface_cuda_errors(device: str) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and device != "cpu" and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an illegal access shows only at the next synchronisation


def _detach(stderr_path: str) -> None:
    """Get a process group and a stderr file of our own, and end when the fork server ends."""
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    handle = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.enable(file=sys.stderr)
