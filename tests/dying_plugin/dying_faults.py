"""A known failure of the test suite's own: its cases end in every way in which a child can end.

Registered by `tests/conftest.py` through the same entry-point groups that other projects use.
"""

import contextlib
import errno
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from moedoctor import interfaces
from moedoctor.processes.ask import find_working_folder
from moedoctor.results import Case, CaseVerdict, ClaimVerdict, Observation, Tier, UnavailableError


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _segfault() -> None:
    _say("about to be killed")
    os.kill(os.getpid(), signal.SIGSEGV)


def _abort_after_cuda_message() -> None:
    # CUDA's runtime ends like this if a destructor raises an error.
    _say("terminate called after throwing an instance of 'c10::AcceleratorError'")
    _say("  what():  CUDA error: device-side assert triggered")
    os.abort()


def _silent() -> None:
    _say("last words")
    os._exit(0)


def _hang() -> None:
    if marker := os.environ.get("HANGING"):  # a file that a test waits for
        open(marker, "w").close()
    _say("going to sleep")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _hang_with_grandchild() -> None:
    os.fork()
    time.sleep(600)


def _start_session(then: Callable[[], None]) -> None:
    """Start a grandchild in its own session that keeps every descriptor, and go on with `then`."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
        os._exit(0)
    then()


def _flood() -> None:
    line = b"x" * 65536
    for _ in range(2000):
        os.write(2, line)


def _close_everything() -> None:
    os.closerange(0, 1024)


def _write_everywhere() -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"{")


def _remove_temporary_folders() -> None:
    own = tempfile.gettempdir()  # moedoctor-xxxxxxxx-3
    shared, _, number = own.rpartition("-")
    assert os.path.basename(own).startswith("moedoctor-"), "nothing else may be removed"
    assert number.isdigit(), "nothing else may be removed"
    shutil.rmtree(own)
    shutil.rmtree(shared)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    time.sleep(600)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


ERRORS = {
    "illegal_memory_access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "device_assert": RuntimeError("CUDA error: device-side assert triggered"),
    "out_of_memory": MemoryError("no more"),
    "exception": KeyError("w13_weight"),
    "system_exit": SystemExit(3),
    "full_disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x"),
    "skip": UnavailableError("no such thing here"),
}
WAYS: dict[str, Callable[[], None]] = {
    "answers": lambda: None,
    "device_assert_abort": _abort_after_cuda_message,
    "signal": _segfault,
    "silent": _silent,
    "exit_status": lambda: os._exit(7),
    "hang": _hang,
    "hang_with_grandchild": _hang_with_grandchild,
    "answers_with_session": lambda: _start_session(lambda: None),
    "dies_with_session": lambda: _start_session(_segfault),
    "hangs_with_session": lambda: _start_session(lambda: time.sleep(600)),
    "imports_torch": lambda: __import__("torch"),
    "flood": _flood,
    "close_everything": _close_everything,
    "write_everywhere": _write_everywhere,
    "remove_temporary_folders": _remove_temporary_folders,
    "kill_server": lambda: _kill(os.getppid()),
    "kill_guardian": lambda: _kill(_parent_of(os.getppid())),
}


def end(way: str) -> None:
    """End this process in one of these ways; ``gpu_…`` names a function of `dying_kernels`."""
    if way in ERRORS:
        raise ERRORS[way]
    if way.startswith("gpu_"):
        import dying_kernels

        getattr(dying_kernels, way.removeprefix("gpu_"))()
    else:
        WAYS[way]()


class DyingParameters(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    faulty: str = "answers"
    """The behavior of the control."""
    fixed: str = "answers"
    third: str = "answers"
    """The behavior of another project's subject."""
    symptom_faulty: bool = True
    symptom_fixed: bool = False
    absent: bool = False


def _three(unit: str, device: str, sources: Mapping[str, str]) -> Observation:
    return Observation({"value": 3})


def _judge(cases: Any, units: Any, limits: Mapping[str, float]) -> interfaces.ClaimJudgement:
    evidence = units[0].outcome.evidence
    enough = evidence["value"] >= limits.get("at_least", math.inf)
    return interfaces.ClaimJudgement(ClaimVerdict.CONFIRMED if enough else ClaimVerdict.REFUTED, evidence)


class Dying(interfaces.Fault):
    id = "MD901"
    name = "dying"
    title = "a case that ends in the way it is told to"
    parameters = DyingParameters
    tiers = {  # noqa: RUF012
        "faulty": (Tier.MODEL,),
        "fixed": (Tier.MODEL,),
        "third": (Tier.MODEL,),
        "installed": (Tier.KERNEL,),
    }
    explanation = interfaces.Explanation("m", "a", "d", "f")
    claims = (
        interfaces.ClaimTest("measured", _judge, _three, thresholds=("at_least",)),
        interfaces.ClaimTest("measured_too", _judge, _three),
        interfaces.ClaimTest("needs_gpu", _judge, _three, needs_gpu=True),
        interfaces.ClaimTest("dies", _judge, lambda *unit: Observation({"value": {}["boom"]})),
    )

    def faulty(self, case: Case) -> Any:
        return "faulty"

    def fixed(self, case: Case) -> Any:
        return "fixed"

    def observe(self, case: Case, implementation: Any) -> Observation:
        end(str(case.parameters[implementation]))
        place = {"pid": os.getpid(), "called_in": find_working_folder()}
        return Observation({"symptom": bool(case.parameters.get(f"symptom_{implementation}")), **place})

    def judge(self, case: Case, observation: Observation) -> interfaces.Judgement:
        symptom = observation.evidence["symptom"]
        verdict = CaseVerdict.REPRODUCED if symptom else CaseVerdict.CLEAN
        return interfaces.Judgement(verdict, f"symptom {symptom}")

    def absent(self, results: Any) -> str | None:
        return "told to be absent" if any(result.parameters["absent"] for result in results) else None


class Third(interfaces.SubjectProvider):
    """A subject provider of another project."""

    kind = "third"

    def implementation(self, fault: interfaces.Fault, case: Case, sources: interfaces.Sources) -> Any:
        return "third"
