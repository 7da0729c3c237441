"""Every way in which a child process can end, with real processes."""

import errno
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes_seen import still_runs

from moedoctor.processes import guardian, interrupts
from moedoctor.results import Case, Crash, Death, Observation, Outcome, Tier
from moedoctor.runner import pool
from moedoctor.runner.child import Request
from moedoctor.runner.pool import Finished, run_requests

pytestmark = pytest.mark.usefixtures("dying_plugin", "server_without_torch")

START = pool._Server


def job(way: str, timeout: float = 60.0, device: str = "cpu") -> Request:
    ways = {"faulty": way, "fixed": "answers", "third": "answers"}
    parameters = {**ways, "symptom_faulty": True, "symptom_fixed": False, "absent": False}
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
        ("device_assert_abort", Death.DEVICE_ASSERT, "device-side assert triggered", ""),
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


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("hang_with_grandchild", "no answer within 1 s"),
        ("hangs_with_session", "no answer within 1 s"),
        ("dies_with_session", "killed by SIGSEGV"),
        ("answers_with_session", None),
    ],
)
def test_what_a_child_started_ends_with_it(way: str, message: str | None) -> None:
    ended = outcome(way, timeout=1.0 if way.startswith("hang") else 60.0)
    assert (ended.message if isinstance(ended, Crash) else None) == message
    assert _list_left() == []


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("flood", None),
        ("write_everywhere", None),
        ("remove_temporary_folders", None),
        ("close_everything", "the case closed the file that its answer goes to"),
        ("kill_server", "the case ended the process that runs the cases"),
        pytest.param(
            "kill_guardian", "the case ended the process that runs the cases", marks=pytest.mark.slow
        ),
        ("full_disk", "a disk is full, perhaps the disk of temporary files"),
    ],
)
def test_a_child_that_breaks_things_harms_no_sibling(way: str, message: str | None) -> None:
    ways = ["answers", way, "answers", "signal", "answers"]
    ended = [done.outcome for done in run_requests([job(way) for way in ways], parallel=3)]
    harmed = ended.pop(1)
    assert [isinstance(outcome, Observation) for outcome in ended] == [True, True, False, True]
    assert "SIGSEGV" in ended[2].message  # type: ignore[union-attr]
    if message is None:
        assert isinstance(harmed, Observation)
    else:
        assert isinstance(harmed, Crash)
        assert harmed.message.startswith(message)
    assert "xxxx" not in str(harmed), "only the tail of what it printed is kept"


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "OSError: libcudart.so.13: no such file"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os.abort()", "its import ended the process: killed by SIGABRT"),
        pytest.param(
            "import time; time.sleep(600)", "its import gave no answer within 3 s", marks=pytest.mark.slow
        ),
    ],
)
def test_a_torch_that_cannot_be_imported_is_the_cause(torch, message, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pool, "_Server", START)
    monkeypatch.setattr(pool, "_IMPORT_SECONDS", 3.0)
    pool._stop_server()
    try:
        ended = crash("imports_torch")
        assert ended.death is Death.BROKEN_LIBRARY
        assert ended.message == f"torch cannot be imported: {message}"
        assert isinstance(outcome("answers"), Observation)
    finally:
        pool._stop_server()


def test_a_machine_without_room_for_a_process_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "_server", None)
    monkeypatch.setattr(pool, "Child", no_room)
    with pytest.raises(pool.ServerError, match=r"^no child process can be started: Resource temporarily"):
        list(run_requests([job("answers")], parallel=1))


def test_a_crash_does_not_affect_the_next_case() -> None:
    ways = ["answers", "signal", "answers", "device_assert", "silent", "answers"]
    ended = run_requests([job(way) for way in ways], parallel=2)
    assert [child.index for child in ended] == list(range(len(ways)))
    assert [isinstance(child.outcome, Observation) for child in ended] == [way == "answers" for way in ways]
    pids = [child.outcome.evidence["pid"] for child in ended if isinstance(child.outcome, Observation)]
    assert len({*pids, os.getpid()}) == len(pids) + 1, "every case has a process of its own"


@given(
    st.lists(st.tuples(st.sampled_from(["cuda:0", "cuda:1"]), st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_gpu_jobs_share_a_gpu_as_far_as_each_allows(given_jobs, already, parallel):
    jobs = [replace(job("answers", device=device), together=together) for device, together in given_jobs]
    running = pool._choose_startable(range(len(jobs)), [], jobs, parallel)[:already]
    waiting = [index for index in range(len(jobs)) if index not in running]
    busy = [*running, *pool._choose_startable(waiting, running, jobs, parallel)]
    for device in {job.device for job in jobs}:
        here = [jobs[index].together for index in busy if jobs[index].device == device]
        assert here, "a free GPU is used"
        assert len(here) <= max(1, min(*here, parallel)), "no job has more neighbors than it allows"
        if len(here) < min(*here, parallel):
            left = [jobs[index] for index in waiting if index not in busy and jobs[index].device == device]
            assert all(job.together <= len(here) for job in left[:1]), "the first that waits cannot start"
        places = [index in busy for index in waiting if jobs[index].device == device]
        assert places == sorted(places, reverse=True), "no job overtakes another"


def test_a_signal_kills_the_children_and_keeps_what_finished() -> None:
    reported: list[Finished] = []

    def after_first(child: Finished) -> None:
        reported.append(child)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

    started = time.monotonic()
    with pytest.raises(interrupts.Interrupted) as stop:
        run_requests([job("answers"), job("hang", timeout=600)], parallel=1, on_finished=after_first)
    assert time.monotonic() - started < 30
    assert [child.index for child in stop.value.ended] == [0]
    assert stop.value.number == signal.SIGTERM
    assert _list_left() == []


@pytest.mark.gpu
def test_real_cuda_faults_are_classified_and_do_not_affect_the_next_case(monkeypatch):
    monkeypatch.setattr(pool, "_Server", START)
    pool._stop_server()
    deaths = {
        "gpu_illegal_memory_access": Death.ILLEGAL_MEMORY_ACCESS,
        "gpu_illegal_instruction": Death.ILLEGAL_INSTRUCTION,
        "gpu_device_assert": Death.DEVICE_ASSERT,
        "gpu_no_kernel_image": Death.NO_KERNEL_IMAGE,
    }
    ways = [way for death in deaths for way in (death, "gpu_answers")]
    ended = run_requests([job(way, device="cuda:0") for way in ways], parallel=1)
    outcomes = {way: child.outcome for way, child in zip(ways, ended, strict=True) if way != "gpu_answers"}
    found = {way: getattr(outcome, "death", outcome) for way, outcome in outcomes.items()}
    assert found == deaths
    assert all(isinstance(child.outcome, Observation) for child in ended[1::2])


def _list_left() -> list[int]:
    """Return every process that cases left, and that still runs after a while."""
    below = set(guardian._list_below(os.getpid())) - _servers() - _OTHERS
    return [pid for pid in below if still_runs(pid)]


_OTHERS: set[int] = set()
"""Left running on purpose by tests before these: the process that removes temporary folders."""


@pytest.fixture(autouse=True, scope="module")
def _others() -> None:
    _OTHERS.update(set(guardian._list_below(os.getpid())) - _servers())


def _servers() -> set[int]:
    """Return the fork server's guardian and the fork server."""
    if pool._server is None:
        return set()
    guard = pool._server.child.process.pid
    return {guard, *guardian._list_children().get(guard, ())}
