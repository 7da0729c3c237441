"""Signals end moedoctor with their exit code, without a traceback, and leave no folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moedoctor.processes import interrupts

ROOT = Path(__file__).parents[2]
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def start(code: str, **environ: str) -> subprocess.Popen[str]:
    """Start Python with `code`, which prints a line when it is ready for a signal."""
    prelude = "import os, sys, time\nfrom moedoctor.processes import interrupts, guardian\n"
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_ends_the_program_with_one_line(number: signal.Signals, code: int) -> None:
    process = start("interrupts.install()\nprint('ready', flush=True)\ntime.sleep(60)")
    process.send_signal(number)
    assert process.communicate(timeout=30)[1] == "moedoctor: interrupted\n"
    assert process.returncode == code


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signals_are_only_noted_until_the_report_is_written(number: signal.Signals, code: int) -> None:
    process = start(
        "interrupts.install()\n"
        "with interrupts.hold_signals():\n"
        "    print('ready', flush=True)\n"
        "    while not interrupts.get_signal(): interrupts.wait([], 60)\n"
        "print('held', flush=True)\n"
        "time.sleep(0.5)\n"
        "print('report', flush=True)\n"
        "sys.exit(interrupts.exit_code())"
    )
    assert process.stdout is not None
    process.send_signal(number)
    assert process.stdout.readline() == "held\n"
    for again in (number, signal.SIGINT, signal.SIGTERM):
        process.send_signal(again)
    assert process.communicate(timeout=30) == ("report\n", "")
    assert process.returncode == code


def test_what_was_ignored_stays_ignored() -> None:
    process = start(
        "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\ninterrupts.install()\n"
        "print('ready', flush=True)\ntime.sleep(1)"
    )
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 0


def test_a_caller_of_the_library_keeps_its_own_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(interrupts.Interrupted), interrupts.raise_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    assert interrupts.get_signal() is None
    with interrupts.hold_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.get_signal() == signal.SIGINT
        assert interrupts.wait([], 60) == []
    assert interrupts.get_signal() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM])
def test_a_temporary_folder_is_removed_however_the_process_ends(tmp_path, number):
    process = start(
        "interrupts.install()\n"
        "with guardian.make_temporary_folder() as folder:\n"
        "    open(os.path.join(folder, 'file'), 'w').close()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)",
        TMPDIR=str(tmp_path),
    )
    assert list(tmp_path.rglob("file"))
    process.send_signal(number)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 2
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())
