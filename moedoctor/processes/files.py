"""Writes files: whole or not at all, and never in place of something that is not a file.

A symlink is followed to its target. ``/dev/stdout`` and ``/dev/fd/N`` are streams. Every error is an
OutputError.

In a folder such as ``/tmp``, another user may have put a link or a file under the name that is written to.
The kernel's ``protected_symlinks`` and ``protected_regular`` refuse such names, but may be off, and see no
link that we follow by ourselves. So the same rule is applied here, and to everything on the way to a file:
what another user put into a shared folder is not used, unless that user owns the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moedoctor.processes import interrupts
from moedoctor.processes.streams import Unfailing, explain_error, is_reader_gone
from moedoctor.text import shorten

_MOST_LINKS = 40
_TRIED_BYTES = 4096
_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)


class OutputError(OSError):
    """A place that cannot be written to; one line says why."""


def check_writable(path: Path) -> None:
    """Raise OutputError now if `write` would fail later, so that no run is lost."""
    with _find(path) as place:
        if place.stream is not None:
            _check_open(place.stream)
            return
        with _make_temporary(place, private=True) as (file, _):
            _write_all(file, bytes(_TRIED_BYTES))  # a full disk still takes an empty file


def write(path: Path, data: str | bytes, *, private: bool = False) -> None:
    """Write `data` to a file beside `path` and rename it: a reader never sees half a report.

    A `private` file is readable for this user only: what a user computed belongs there, masked text does not
    need it. Half of a surrogate pair has no bytes in UTF-8. It is written as JSON writes it: ``\\ud800``.
    Raises OutputError if `path` cannot be written to.
    """
    with _find(path) as place:
        if place.stream is not None:
            _write_stream(place.stream, data)
            return
        with _make_temporary(place, private=private) as (file, name):
            _write_all(file, _encode(data))
            os.replace(name, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)


def append(path: Path, text: str) -> None:
    """Add `text` to the end of the file `path`. Raises OutputError."""
    with _find(path) as place:
        if place.stream is not None:
            _write_stream(place.stream, text)
            return
        place.find_existing()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(place.name, flags, 0o666, dir_fd=place.folder), "wb") as file:
            opened = os.fstat(file.fileno())
            replace(
                place, info=opened
            ).find_existing()  # again: another process may have put it there just now
            if opened.st_nlink > 1:  # its other name may be anywhere
                raise OutputError("is a hard link; expected a file with one name")
            file.write(_encode(text))


def make_folder(path: Path) -> None:
    """Make the folder `path` and those above it, if they are missing, for this user only.

    Raises OutputError.
    """
    with _find(path, make_folders=True):
        pass


def stream_of(path: Path) -> int | None:
    """Return the descriptor of the stream that `path` names, or None if it names a file."""
    with _find(path) as place:
        return place.stream


@dataclass(frozen=True)
class _Place:
    """A name in a folder, or a stream of this process."""

    folder: int
    """An open descriptor, which stays the same folder if another process moves it."""
    name: str
    info: os.stat_result | None
    """The status of what has the name, which is not a symlink; None if nothing has it."""
    owners: tuple[int, ...] | None
    """The users whose files may be replaced; None for all."""
    stream: int | None = None

    def find_existing(self) -> os.stat_result | None:
        """Return the facts about the file, or None if there is none yet. Raises OutputError."""
        if self.info is None:
            return None
        if stat.S_ISDIR(self.info.st_mode):
            raise OutputError("is a folder; expected the name of a file")
        if not stat.S_ISREG(self.info.st_mode):
            raise OutputError("is a device, pipe or socket; expected the name of a file, or /dev/stdout")
        _check_owner("file", self.name, self.info, self.owners)
        return self.info


@contextlib.contextmanager
def _find(path: Path, *, make_folders: bool = False) -> Iterator[_Place]:
    """Give the place that `path` leads to. Whatever fails, also inside, is an OutputError with the path."""
    shown = shorten(os.fspath(path), 200)
    try:
        with _walk(os.fspath(path), make_folders) as place:
            yield place
    except OutputError as error:
        raise OutputError(f"{shown}: {error}") from None
    except (OSError, ValueError) as error:
        raise OutputError(f"{shown}: cannot be written: {explain_error(error)}") from error


@contextlib.contextmanager
def _walk(path: str, make_folders: bool) -> Iterator[_Place]:
    """Follow `path` name by name. Each folder is opened, so that no other can take its place."""
    us, links, rest = os.geteuid(), 0, _split_names(path)
    if make_folders:
        rest.insert(0, ".")
    of_others = False  # inside of what another user put into a shared folder
    folder = os.open("/" if path.startswith("/") else ".", _FOLDER)
    try:
        while True:
            name = rest.pop()
            info, holder = _inspect(name, folder), os.fstat(folder)
            shared = holder.st_mode & stat.S_ISVTX and holder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            owners = (us,) if of_others else (us, holder.st_uid) if shared else None
            if not rest and name.isdecimal() and len(name) < 9 and _holds_streams(holder):
                yield _Place(folder, name, info, owners, int(name))
                return
            link = info if info is not None and stat.S_ISLNK(info.st_mode) else None
            in_proc = link is not None and bool(rest) and _is_in_proc(link)  # the kernel follows it
            if link is not None and not in_proc:
                _check_owner("link", name, link, owners)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = os.readlink(name, dir_fd=folder)
                rest += _split_names(target)
                if target.startswith("/"):
                    _enter("/", folder)
                    of_others = False
            elif not rest:
                yield _Place(folder, name, info, owners)
                return
            else:
                if info is None and make_folders:
                    with contextlib.suppress(FileExistsError):  # another process made it just now
                        os.mkdir(name, 0o700, dir_fd=folder)
                _enter(name, folder, 0 if in_proc else os.O_NOFOLLOW)
                if shared and os.fstat(folder).st_uid not in (us, holder.st_uid):
                    of_others = True
    finally:
        os.close(folder)


def _split_names(path: str) -> list[str]:
    """Return the names on a path, the last one first; at least one."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")] or ["."]


def _inspect(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _enter(name: str, folder: int, flags: int = 0) -> None:
    """Let the descriptor `folder` be the folder `name` in it."""
    try:
        opened = os.open(name, _FOLDER | flags, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        raise OutputError("its folder does not exist; create it first") from None
    os.dup2(opened, folder, inheritable=False)
    os.close(opened)


def _check_owner(kind: str, name: str, info: os.stat_result, owners: tuple[int, ...] | None) -> None:
    """Raise OutputError if another user may have put the file or link there as a trap."""
    if owners is not None and info.st_uid not in owners:
        raise OutputError(
            f"the {kind} {shorten(name, 80)} belongs to user {info.st_uid}, in a folder that users share; "
            "choose another name"
        )


def _holds_streams(folder: os.stat_result) -> bool:
    """Return True for the folder of this process's descriptors."""
    for name in ("/dev/fd", "/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(folder, os.stat(name)):
                return True
    return False


def _is_in_proc(link: os.stat_result) -> bool:
    """Return True for a link such as /proc/PID/root: the folder it names may be one of another root."""
    with contextlib.suppress(OSError):
        return link.st_dev == os.stat("/proc/self").st_dev
    return False


@contextlib.contextmanager
def _make_temporary(place: _Place, *, private: bool) -> Iterator[tuple[int, str]]:
    """Give a new file beside the one at `place`, with its owner and permissions, else as umask says.

    It is gone afterwards, also if a signal ends this process.
    """
    old = place.find_existing()
    name = f".moedoctor.{os.urandom(8).hex()}"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    interrupts.half_written.add((name, place.folder))
    try:
        mode = 0o666 if old is None and not private else 0o600
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=place.folder)
        if old is not None and not private:
            with contextlib.suppress(OSError):  # only root may give a file away
                os.fchown(file, old.st_uid, old.st_gid)
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(file, stat.S_IMODE(old.st_mode) & 0o777)
        yield file, name
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=place.folder)
        interrupts.half_written.discard((name, place.folder))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _write_all(file: int, data: bytes) -> None:
    """Write `data` and close `file`: some file systems report a full disk only then."""
    with os.fdopen(file, "wb") as stream:
        stream.write(data)


def _check_open(descriptor: int) -> None:
    """Raise OSError if `descriptor` cannot be written to."""
    if descriptor in (1, 2):
        (sys.stdout if descriptor == 1 else sys.stderr).fileno()  # raises if we found it closed
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OutputError("is not open for writing")


def _write_stream(descriptor: int, data: str | bytes) -> None:
    sys.stdout.flush()  # what was printed before comes first
    with os.fdopen(os.dup(descriptor), "wb", buffering=0) as file:
        raw = Unfailing(file)
        with io.BufferedWriter(raw) as stream:
            stream.write(_encode(data))
    if raw.error is not None and not is_reader_gone(raw.error):
        raise raw.error


def _encode(data: str | bytes) -> bytes:
    return data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
