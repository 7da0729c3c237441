"""Writes files: whole or not at all, and never in place of something that is not a file.

A symlink is followed to its target. ``/dev/stdout`` and ``/dev/fd/N`` are streams. Every error is an
OutputError.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from moedoctor.processes import interrupts
from moedoctor.processes.streams import Unfailing, is_reader_gone, reason
from moedoctor.text import shorten

_MOST_LINKS = 40
_TRIED_BYTES = 4096


class OutputError(OSError):
    """A place that cannot be written to; one line says why."""


def check_writable(path: Path) -> None:
    """Raise OutputError now if `write` would fail later, so that no run is lost."""
    with _errors(path):
        target, descriptor = _target(path)
        if descriptor is not None:
            _check_open(descriptor)
            return
        old = _existing(target)
        try:
            os.stat(os.path.dirname(target) or ".")
        except (FileNotFoundError, NotADirectoryError):
            raise OutputError("its folder does not exist; create it first") from None
        with _temporary(target, old) as (file, _):
            _write_all(file, bytes(_TRIED_BYTES))  # a full disk still takes an empty file


def write(path: Path, data: str | bytes) -> None:
    """Write `data` to a file beside `path` and rename it: a reader never sees half a report.

    Half of a surrogate pair has no bytes in UTF-8. It is written as JSON writes it: ``\\ud800``.
    Raises OutputError if `path` cannot be written to.
    """
    with _errors(path):
        target, descriptor = _target(path)
        if descriptor is not None:
            _write_stream(descriptor, data)
            return
        with _temporary(target, _existing(target)) as (file, name):
            _write_all(file, _encoded(data))
            os.replace(name, target)


def append(path: Path, text: str) -> None:
    """Add `text` to the end of the file `path`. Raises OutputError."""
    with _errors(path):
        target, descriptor = _target(path)
        if descriptor is not None:
            _write_stream(descriptor, text)
            return
        _existing(target)
        file = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        _write_all(file, _encoded(text))


def stream_of(path: Path) -> int | None:
    """Return the descriptor of the stream that `path` names, or None if it names a file."""
    with _errors(path):
        return _target(path)[1]


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    shown = shorten(os.fspath(path), 200)
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{shown}: {error}") from None
    except (OSError, ValueError) as error:
        raise OutputError(f"{shown}: cannot be written: {reason(error)}") from error


def _target(path: Path) -> tuple[str, int | None]:
    """Return the file that `path` leads to, and the descriptor if it is a stream of this process."""
    name, descriptors = os.fspath(path), ("/dev/fd", f"/proc/{os.getpid()}/fd")
    for _ in range(_MOST_LINKS):
        folder, last = os.path.split(name)
        number = int(last) if last.isdecimal() and len(last) < 9 else None
        if number is not None and os.path.realpath(folder or ".") in descriptors:
            return name, number
        if not os.path.islink(name):
            return name, None
        name = os.path.join(folder, os.readlink(name))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _existing(target: str) -> os.stat_result | None:
    """Return the facts about the file `target`, or None if there is none yet."""
    try:
        info = os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(info.st_mode):
        raise OutputError("is a folder; expected the name of a file")
    if not stat.S_ISREG(info.st_mode):
        raise OutputError("is a device, pipe or socket; expected the name of a file, or /dev/stdout")
    return info


@contextlib.contextmanager
def _temporary(target: str, old: os.stat_result | None) -> Iterator[tuple[int, str]]:
    """Give a new file beside `target` with the owner and permissions of the `old` one, else as umask says.

    It is gone afterwards, also if a signal ends this process.
    """
    name = os.path.join(os.path.dirname(target), f".moedoctor.{os.urandom(8).hex()}")
    blocked = None
    if hasattr(signal, "pthread_sigmask"):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    interrupts.half_written.add(name)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file = os.open(name, flags, 0o666 if old is None else 0o600)
        if old is not None:
            with contextlib.suppress(OSError, AttributeError):  # only root may give a file away
                os.chown(name, old.st_uid, old.st_gid)
            with contextlib.suppress(OSError):  # a file system without permissions
                os.chmod(name, stat.S_IMODE(old.st_mode) & 0o777)
        yield file, name
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
        interrupts.half_written.discard(name)
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _write_all(file: int, data: bytes) -> None:
    """Write `data` and close `file`: some file systems report a full disk only then."""
    with os.fdopen(file, "wb") as stream:
        stream.write(data)


def _check_open(descriptor: int) -> None:
    """Raise OSError if `descriptor` cannot be written to."""
    import fcntl

    if descriptor in (1, 2):
        (sys.stdout if descriptor == 1 else sys.stderr).fileno()  # raises if we found it closed
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OutputError("is not open for writing")


def _write_stream(descriptor: int, data: str | bytes) -> None:
    sys.stdout.flush()  # what was printed before comes first
    with os.fdopen(os.dup(descriptor), "wb", buffering=0) as file:
        raw = Unfailing(file)
        with io.BufferedWriter(raw) as stream:
            stream.write(_encoded(data))
    if raw.error is not None and not is_reader_gone(raw.error):
        raise raw.error


def _encoded(data: str | bytes) -> bytes:
    return data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
