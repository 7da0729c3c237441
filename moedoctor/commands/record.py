"""`moedoctor record -- COMMAND`: runs a command whose MoE calls are watched, and says what was recorded."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moedoctor.commands.options import InputError, convert_errors, declare, number, option
from moedoctor.text import format_size, print_message

if TYPE_CHECKING:
    from moedoctor.diagnose.autopsy.dump_request import DumpRequest

_PATIENCE = 120.0
"""Seconds for what is still being written when the command has ended."""
_MOST_LINES = 10
_CAPSULE = ".moecapsule"
_REPLAY_SECONDS = 60.0
"""For each backend that computes the last call of a dead engine again."""


@declare(
    command=typer.Argument(metavar="COMMAND...", help="What to run, such as: vllm serve MODEL."),
    when=option(
        "CALL",
        "Which call to record. nan: the first whose output holds NaN or Inf while its input does not. "
        "first: the first call. call=LAYER:N: the Nth call of a layer, such as "
        "call=model.layers.3.mlp.experts:17. crash: the last calls of every layer if the engine dies; "
        "each call is copied to pinned host memory first, up to 16 MiB a layer. Where memory cannot be "
        "pinned, as on WSL, every layer waits for its copies, and CUDA graphs must be off. CUDA is asked "
        "for a core dump, so that the end names the kernel that faulted; CUDA then ends the process with "
        "SIGABRT, also where Python would have caught the error. The dump is asked for without the "
        "contents of memory, and so are core files of the system, but registers may hold parts of "
        "weights and prompts; nothing is uploaded. Variables for core dumps that you set are kept. "
        "mismatch=RATE: the first call that the float32 reference finds wrong; in a share RATE of the "
        "steps one layer's call is compared, by a process beside the engine on the CPU, with weights "
        "that are read from the checkpoint; while that goes on, no other call is compared. On an H200 "
        "nan and crash cost 1.2 % each of a decode step of 12 layers of Qwen3-30B-A3B, and mismatch=0.01 "
        "7.2 % of one of 4 layers, by the wall clock. `moedoctor bench --engine` with a --variant that "
        "sets MOEDOCTOR_RECORD and MOEDOCTOR_RECORD_WHEN measures it on your machine.",
    ),
    output=typer.Option("-o", "--output", metavar="FOLDER", help="Where the capsules go."),
    max_size=option(
        "MB",
        "Largest size of a capsule, in 10^6 bytes; if more is needed, the fewest tokens that show it.",
        number(most=100_000),
    ),
    keep="Keep CUDA's core dumps, which are else deleted when they were read.",
)
def record(
    command: list[str],
    when: str = "nan",
    output: Path = Path("capsules"),
    max_size: float = 256.0,
    keep: bool = False,
) -> int:
    """Run a command and record the MoE call of its vLLM that shows a failure.

    Sets MOEDOCTOR_RECORD, MOEDOCTOR_RECORD_WHEN and MOEDOCTOR_RECORD_SIZE for the command, which moedoctor's
    plug-in reads in every process of vLLM 0.21.0 and later. The exit code is the command's, or 2 if it
    is 0 and no MoE layer was watched. If a kernel faulted under --when crash, `moedoctor autopsy` and
    `moedoctor replay` answer at the end, also in a JSON file in the folder, which `moedoctor show` reads.
    """
    from moedoctor.diagnose.autopsy.dump_request import DumpRequest
    from moedoctor.processes.files import OutputError, make_folder
    from moedoctor.trace.call_keeper import Wish

    with convert_errors(ValueError):
        Wish.parse(when)
    with convert_errors(OutputError):
        make_folder(output)
    folder = Path(os.path.abspath(output))  # a link must not be followed before it is checked
    before = set(folder.iterdir())
    environ = {
        **os.environ,
        "MOEDOCTOR_RECORD": str(folder),
        "MOEDOCTOR_RECORD_WHEN": when,
        "MOEDOCTOR_RECORD_SIZE": f"{max_size:g}",
    }
    dumps = DumpRequest.make(folder, environ) if when.strip() == "crash" else None
    explained = False

    def list_new(suffix: str) -> list[Path]:
        return sorted(file for file in set(folder.iterdir()) - before if file.suffix == suffix)

    def watch() -> None:
        nonlocal explained
        assert dumps is not None
        dumps.limit()
        if not explained and dumps.is_outlived():
            explained = True
            print_message("record: a process of the command died, and the command still runs")
            _explain_crash(dumps, list_new(_CAPSULE), folder, None, keep=keep)

    try:
        code = _run(command, {**environ, **(dumps.variables if dumps else {})}, watch if dumps else None)
        _wait_for_writers(folder)
        capsules, marks = list_new(_CAPSULE), list_new(".watched")
        for mark in marks:
            mark.unlink(missing_ok=True)
        if dumps and not explained:
            _explain_crash(dumps, capsules, folder, code, keep=keep)
    finally:
        if dumps:
            dumps.clear()
    if not capsules and not marks:
        print_message(
            "record: no MoE layer was watched, so nothing is known about its calls: expected a command that "
            "runs a MoE model in vLLM 0.21.0 or later, in a Python that has moedoctor (`moedoctor check`)"
        )
        return code or 2
    _say(capsules, folder)
    return code


def _run(command: list[str], environ: dict[str, str], watch: Callable[[], None] | None) -> int:
    """Return the exit code of a command; 128 and the signal if one ended it. Calls `watch` each second."""
    try:
        child = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}") from error
    # Ctrl-C reaches the command by itself; what ends only this process is passed on.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda number, _: child.send_signal(number)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    code = None
    try:
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(1 if watch else None)
            if watch:
                watch()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _wait_for_writers(folder: Path) -> None:
    """Wait until no process that saves calls of a dead engine holds its lock on the folder."""
    lock = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < until:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.1)
        print_message(f"record: something still writes to {folder} after {_PATIENCE:g} s")
    finally:
        os.close(lock)


def _explain_crash(
    request: DumpRequest, capsules: Sequence[Path], folder: Path, code: int | None, *, keep: bool
) -> None:
    """Say which kernel faulted, compute its call again, and store the answer."""
    from moedoctor.commands.pages import deliver_document
    from moedoctor.diagnose.autopsy.autopsy import examine_files, find_last_call, is_of_moe
    from moedoctor.diagnose.autopsy.dump_request import MOST_BYTES
    from moedoctor.diagnose.autopsy.known_tensors import read_record
    from moedoctor.diagnose.autopsy.replay_call import replay_call
    from moedoctor.redaction import Redactor
    from moedoctor.reporters.pages.autopsy import describe_replay

    dumps = request.keep(folder) if keep else request.list_dumps()
    if dumps:
        most = format_size(MOST_BYTES)
        found = examine_files(
            [*dumps, *capsules],
            lambda line: print_message(f"record: {line} (a core dump of more than {most} is emptied)"),
        )
        document = Redactor.from_this_process().record(found)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the command's
            deliver_document(document, "table", None, full=False)
        answer = folder / f"autopsy-{os.getpid()}.json"
        answer.touch(0o600)  # what is written over it keeps its mode
        deliver_document(document, "json", answer, full=False)  # the replay may take minutes, and be ended
        last = find_last_call({file: read_record(file) for file in capsules}, [file.name for file in dumps])
        if last and is_of_moe(document.faults):
            print_message(f"record: every backend that runs here computes {last.name} again")
            replayed = replay_call(last, read_record(last), seconds=_REPLAY_SECONDS)
            print_message(f"record: {describe_replay(replayed)}")
            deliver_document(replace(document, replay=replayed), "json", answer, full=False)
    elif code:
        print_message(
            "record: no kernel is known to have faulted: CUDA wrote no core dump, and the command ended with "
            f"{code}"
        )
    if dumps and request.ours and not keep:
        print_message("record: the core dumps were read and are deleted; --keep keeps them")


def _say(capsules: list[Path], folder: Path) -> None:
    if not capsules:
        print_message(f"record: nothing was recorded in {folder}: no call was as --when says")
        return
    # What holds weights can be judged.
    capsules.sort(key=lambda file: file.stat().st_size, reverse=True)
    for file in capsules[:_MOST_LINES]:
        print_message(f"record: {file} ({format_size(file.stat().st_size)})")
    if len(capsules) > _MOST_LINES:
        print_message(f"record: and {len(capsules) - _MOST_LINES} more")
    print_message(f"record: judge it with `moedoctor replay {capsules[0]}`")
