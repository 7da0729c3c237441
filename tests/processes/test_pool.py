"""Every way in which a child process can end, with real processes."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from moedoctor.processes import pool
from moedoctor.processes.child import Request
from moedoctor.processes.pool import Finished, RunInterruptedError, run_requests
from moedoctor.results import Case, Crash, Death, Observation, Outcome, Skip, Tier

pytestmark = pytest.mark.usefixtures("dying_plugin")


def job(way: str, timeout: float = 60.0, device: str = "cpu") -> Request:
    parameters = {
        "faulty": way,
        "fixed": "answers",
        "third": "answers",
        "symptom_faulty": True,
        "symptom_fixed": False,
        "absent": False,
    }
    case = Case("MD901", "faulty", Tier.MODEL, parameters)
    return Request("MD901", {}, timeout, case=case, device=device)


def outcome(way: str, timeout: float = 60.0) -> Outcome:
    (finished,) = run_requests([job(way, timeout)], parallel=1)
    return finished.outcome


def crash(way: str, timeout: float = 60.0) -> Crash:
    ended = outcome(way, timeout)
    assert isinstance(ended, Crash), ended
    return ended


@pytest.mark.parametrize(
    ("way", "death", "message", "last_words"),
    [
        ("illegal_memory_access", Death.ILLEGAL_MEMORY_ACCESS, "illegal memory access", ""),
        ("illegal_instruction", Death.ILLEGAL_INSTRUCTION, "illegal instruction", ""),
        ("device_assert", Death.DEVICE_ASSERT, "device-side assert", ""),
        ("device_assert_abort", Death.DEVICE_ASSERT, "device-side assert triggered", ""),
        ("no_kernel_image", Death.NO_KERNEL_IMAGE, "no kernel image", ""),
        ("cuda_error", Death.CUDA_ERROR, "unspecified launch failure", ""),
        ("out_of_memory", Death.OUT_OF_MEMORY, "MemoryError: no more", ""),
        ("exception", Death.EXCEPTION, "KeyError: 'w13_weight'", "KeyError"),
        ("system_exit", Death.EXCEPTION, "SystemExit: 3", ""),
        ("signal", Death.SIGNAL, "killed by SIGSEGV", "about to be killed"),
        ("silent", Death.SILENT, "exit status 0", "last words"),
        ("exit_status", Death.SILENT, "exit status 7", ""),
    ],
)
def test_each_kind_of_crash_is_classified(way: str, death: Death, message: str, last_words: str) -> None:
    ended = crash(way)
    assert ended.death is death
    assert message in ended.message
    assert "\n" not in ended.message
    assert last_words in "\n".join(ended.stderr_tail)


def test_a_child_that_ignores_sigterm_is_killed_at_its_time_limit() -> None:
    started = time.monotonic()
    ended = crash("hang", timeout=1.0)
    assert ended.death is Death.HANG
    assert ended.message == "no answer within 1 s"
    assert "going to sleep" in ended.stderr_tail
    assert time.monotonic() - started < 20


def test_processes_started_by_a_child_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    crash("hang_with_grandchild", timeout=1.0)
    assert _still_running(tmp_path) == set()


def test_a_skip_raised_in_the_child_is_a_skip() -> None:
    assert outcome("skip") == Skip("no such thing here")


def test_a_crash_does_not_affect_the_next_case() -> None:
    ways = ["answers", "signal", "answers", "device_assert", "silent", "answers"]
    ended = run_requests([job(way) for way in ways], parallel=2)
    assert [child.index for child in ended] == list(range(len(ways)))
    assert [isinstance(child.outcome, Observation) for child in ended] == [way == "answers" for way in ways]
    pids = [child.outcome.evidence["pid"] for child in ended if isinstance(child.outcome, Observation)]
    assert len({*pids, os.getpid()}) == len(pids) + 1, "every case has a process of its own"


def test_cpu_jobs_run_side_by_side() -> None:
    started = time.monotonic()
    run_requests([job("hang", timeout=1.5) for _ in range(4)], parallel=4)
    assert time.monotonic() - started < 4 * 1.5


def test_gpu_jobs_run_one_at_a_time_per_device() -> None:
    jobs = [job("answers", device=device) for device in ("cuda:0", "cuda:0", "cuda:1", "cpu", "cpu")]
    assert pool._startable([0, 1, 2, 3, 4], [], jobs, parallel=1) == [0, 2, 3]


def test_interrupt_kills_the_children_and_keeps_what_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reported: list[Finished] = []

    def after_first(child: Finished) -> None:
        reported.append(child)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    started = time.monotonic()
    with pytest.raises(RunInterruptedError) as stop:
        run_requests([job("answers"), job("hang", timeout=600)], parallel=1, on_finished=after_first)
    assert time.monotonic() - started < 30
    assert [child.index for child in stop.value.finished] == [0]
    assert _still_running(tmp_path) == set()


@pytest.mark.gpu
def test_real_cuda_faults_are_classified_and_do_not_affect_the_next_case() -> None:
    deaths = {
        "gpu_illegal_memory_access": Death.ILLEGAL_MEMORY_ACCESS,
        "gpu_illegal_instruction": Death.ILLEGAL_INSTRUCTION,
        "gpu_device_assert": Death.DEVICE_ASSERT,
        "gpu_no_kernel_image": Death.NO_KERNEL_IMAGE,
    }
    ways = [way for death in deaths for way in (death, "gpu_answers")]
    ended = run_requests([job(way, device="cuda:0") for way in ways], parallel=1)
    outcomes = {way: child.outcome for way, child in zip(ways, ended, strict=True) if way != "gpu_answers"}
    found = {
        way: outcome.death if isinstance(outcome, Crash) else outcome for way, outcome in outcomes.items()
    }
    assert found == deaths
    assert all(isinstance(child.outcome, Observation) for child in ended[1::2])


def _still_running(folder: Path) -> set[int]:
    """Return the processes whose stderr is a file in `folder`, the temporary folder of a run."""
    deadline = time.monotonic() + 5
    while True:
        living = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                try:
                    target = os.readlink(entry / "fd" / "2")
                except OSError:
                    continue
                if target.startswith(str(folder)):
                    living.add(int(entry.name))
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.05)
