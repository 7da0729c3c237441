"""The ways in which a child process can end without an answer.

CUDA reports most faults as text in an exception, or in a message on stderr before it aborts, so the
text decides first and the exit status second.
"""

from __future__ import annotations

import errno
import re
import signal
import tempfile

from moedoctor.redaction import Redactor
from moedoctor.results import Crash, Death

_TEXTS = {
    Death.ILLEGAL_MEMORY_ACCESS: "illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|misaligned address",
    Death.ILLEGAL_INSTRUCTION: (
        "illegal instruction (was|has been) encountered|CUDA_ERROR_ILLEGAL_INSTRUCTION"
    ),
    Death.DEVICE_ASSERT: "device-side assert|CUDA_ERROR_ASSERT",
    Death.NO_KERNEL_IMAGE: (
        "no kernel image is available|CUDA_ERROR_NO_BINARY_FOR_GPU|device kernel image is invalid"
    ),
    Death.OUT_OF_MEMORY: "CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUDA error: out of memory",
    Death.CUDA_ERROR: (r"CUDA(?: driver)? error|CUDA_ERROR_\w+|cudaError\w+|CUBLAS_STATUS_(?!SUCCESS)\w+"),
}
"""First match wins; wording of `cudaGetErrorString` and `cuGetErrorName`, CUDA 12 and 13."""

NO_ANSWER = 72
"""Exit status of a child that could not write its answer."""
TAIL_LINES = 20
TAIL_BYTES = 16_384
_NOISE = "Extension modules:"
"""Start of the line in which faulthandler lists every loaded extension."""


def classify(text: str) -> Death | None:
    """Return the CUDA fault that `text` reports, or None."""
    return next((death for death, pattern in _TEXTS.items() if re.search(pattern, text, re.I)), None)


def from_exception(error: BaseException) -> Crash:
    """Return a Python exception as a crash; its text decides whether a CUDA fault is behind it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"a disk is full, perhaps the disk of temporary files ({tempfile.gettempdir()}): {text}"
        return Crash(Death.DISK_FULL, find_first_line(text))
    death = Death.OUT_OF_MEMORY if isinstance(error, MemoryError) else classify(text) or Death.EXCEPTION
    return Crash(death, find_first_line(text))


def from_exit(exit_code: int, stderr: str) -> Crash:
    """Return the crash of a child without an answer, from its exit status and what it wrote to stderr.

    `exit_code` is negative for a signal, as `multiprocessing` gives it.
    """
    tail = last_lines(stderr)
    reported = classify(stderr)
    if reported is not None:
        line = next((line for line in reversed(stderr.splitlines()) if classify(line) is reported), "")
        return Crash(reported, find_first_line(line) or reported.value, tail)
    if exit_code == NO_ANSWER:
        return Crash(Death.SILENT, "the case closed the file that its answer goes to", tail)
    if exit_code < 0:
        name = name_signal(-exit_code)
        hint = " (the kernel kills so when memory runs out)" if name == "SIGKILL" else ""
        return Crash(Death.SIGNAL, f"killed by {name}{hint}", tail)
    return Crash(Death.SILENT, f"ended with exit status {exit_code} and no answer", tail)


def name_signal(number: int) -> str:
    """Return ``SIGSEGV``, or ``signal 63`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def hang(seconds: float, stderr: str) -> Crash:
    """Return the crash of a child that gave no answer within `seconds`."""
    return Crash(Death.HANG, f"no answer within {seconds:g} s", last_lines(stderr))


def find_first_line(text: str) -> str:
    """Return the first line of `text` that is not blank, masked and shortened."""
    return _mask(next((line.strip() for line in text.splitlines() if line.strip()), ""))


def last_lines(text: str) -> tuple[str, ...]:
    """Return the last lines of `text` that are not blank, at most TAIL_LINES, masked and shortened."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return tuple(map(_mask, lines[-TAIL_LINES:]))


def _mask(line: str) -> str:
    line = Redactor.from_this_process().mask(line)  # before the cut, which could halve a secret
    return line if len(line) <= 300 else line[:299] + "…"
