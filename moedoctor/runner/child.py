"""The code that runs inside a child process: one case, or one unit of a claim.

The request comes as an argument, the answer goes back as JSON in a file without a name. Nothing is unpickled
from a child, so one that went wrong cannot reach into the parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from moedoctor import catalogue
from moedoctor.entries import load_entries
from moedoctor.interfaces import Fault
from moedoctor.processes import deaths, guardian, interrupts
from moedoctor.results import Case, Crash, Death, Observation, Tier, UnavailableError, to_plain


@dataclass(frozen=True)
class Request:
    """The task of a child."""

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
    together: int = 1
    """The number of requests that may use its GPU at a time, itself among them."""
    capsules: str | None = None
    """The folder for MoE calls that turn out wrong; engines record theirs in a folder of the case in it."""


def main(request: Request, answer: IO[bytes], stderr: int, without: Mapping[str, str]) -> NoReturn:
    """Carry out `request`, write the answer as JSON, end the process.

    `without` maps each module that cannot be imported to the reason; its import fails at once.
    """
    _detach(stderr)
    try:
        observation = _perform(request)
        reply: dict[str, Any] = {"evidence": to_plain(observation.evidence)}
    except UnavailableError as error:
        reply = {"skip": deaths.find_first_line(str(error))}
    except BaseException as error:
        traceback.print_exc()
        missing = str(getattr(error, "name", "")).partition(".")[0] if isinstance(error, ImportError) else ""
        crash = deaths.from_exception(error)
        if missing in without:
            message = deaths.find_first_line(f"{missing} cannot be imported: {without[missing]}")
            crash = Crash(Death.BROKEN_LIBRARY, message)
        reply = {"death": crash.death.value, "message": crash.message}
    status = 0
    try:
        answer.seek(0)
        answer.write(json.dumps(reply, allow_nan=False).encode())
        answer.truncate()
    except (OSError, ValueError):  # the case closed it
        status = deaths.NO_ANSWER
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # A poisoned CUDA context can hang or abort in its destructors; the answer is out, so leave at once.
    os._exit(status)


def _perform(request: Request) -> Observation:
    fault = catalogue.load_faults()[request.fault]
    torch = sys.modules.get("torch")
    if torch is not None and request.device == "cpu":
        torch.set_num_threads(1)  # cases run side by side, one thread each
    elif torch is not None:
        torch.cuda.set_device(request.device)
    if request.case is not None:
        provider = catalogue.load_subjects()[catalogue.find_subject_kind(request.case.subject) or ""]
        implementation = provider.implementation(fault, request.case, request.sources)
        observation = _observe(fault, request, implementation)
    else:
        test = next(test for test in fault.claims if test.key == request.claim)
        assert test.measure is not None
        observation = test.measure(request.unit, request.device, request.sources)
    torch = sys.modules.get("torch")
    if torch is not None and request.device != "cpu" and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an illegal access shows only at the next synchronization
    return observation


def _observe(fault: Fault, request: Request, implementation: Any) -> Observation:
    """Measure a case; the names of the capsules that it left become part of the evidence."""
    assert request.case is not None
    if request.capsules is None:
        return fault.observe(request.case, implementation)
    from moedoctor.trace import wrong_calls

    case = request.case
    parameters = json.dumps(to_plain(case.parameters), sort_keys=True)
    digest = hashlib.sha256(parameters.encode()).hexdigest()[:8]
    name = f"{fault.name}-{case.subject}-{case.tier.value}-{digest}"
    folder = Path(request.capsules)
    wrong_calls.keep_in(folder, name, fault.describe(case.parameters))
    older = _list_capsules(folder / name)
    if case.tier is Tier.ENGINE:
        _record_in_engines(fault.id, folder / name)
    observation = fault.observe(case, implementation)
    recorded = sorted(_list_capsules(folder / name) - older)
    kept = [*wrong_calls.list_kept_files(), *(f"{name}/{file}" for file, _ in recorded)]
    return replace(observation, evidence={**observation.evidence, "capsules": kept}) if kept else observation


def _record_in_engines(fault: str, folder: Path) -> None:
    """Let the engines of this case record the call that shows a failure, if its entry names one."""
    from moedoctor.upstream.engine.engine import record_calls

    entry = load_entries().get(fault)
    if entry is not None and entry.record is not None:
        # The rate of an entry is for a server. These engines run few steps, and nobody measures their time.
        record_calls(folder, "nan" if entry.record == "nan" else "mismatch=1")


def _list_capsules(folder: Path) -> set[tuple[str, int]]:
    """Return the name of each capsule in the folder, and when it was written."""
    from moedoctor.trace.capsule import SUFFIX

    return {(file.name, file.stat().st_mtime_ns) for file in folder.glob(f"*{SUFFIX}")}


def _detach(stderr: int) -> None:
    """Get a process group of our own, print all to the pipe `stderr`, and keep orphans below us."""
    os.setsid()
    guardian.adopt_orphans()
    for number in interrupts.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(stderr, descriptor)
    os.close(stderr)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.enable(file=sys.stderr)
