"""A small text file that a stranger may have written, read without blocking and without surprises."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

# Not compiled here: that takes 5 ms, also of every command that reads no file.
_UNPRINTABLE = "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


class TextFileError(Exception):
    """A file that cannot be used: on which line, and what was expected."""

    def __init__(self, line: int, message: str) -> None:
        """`line` counts from 1 and is 1 where none is known."""
        super().__init__(line, message)
        self.line = line
        self.message = message


def read_text(path: Path, limit: int) -> str:
    """The text of the regular file at `path`: UTF-8, with or without byte order mark, at most `limit` bytes.

    Raises `TextFileError` for anything else; it never waits for a pipe and never opens a device.
    """
    return _decode(_read_bytes(path, limit))


def check_printable(text: str) -> None:
    """Refuse control characters, half characters, and line ends that editors count differently."""
    if found := re.search(_UNPRINTABLE, text):
        line = text.count("\n", 0, found.start()) + 1
        raise TextFileError(
            line, f"character U+{ord(found.group()):04X} in the file, expected printable text"
        )


def _read_bytes(path: Path, limit: int) -> bytes:
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    )
    try:
        # Before the open, which can act on a device; after it again, in case the file was swapped.
        _require_small(os.stat(path), limit)
        with open(os.open(path, flags), "rb") as file:
            _require_small(os.fstat(file.fileno()), limit)
            data = file.read(limit + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise TextFileError(1, f"cannot be read ({reason}), expected a text file") from None
    except ValueError:
        raise TextFileError(1, "is no file name, expected the path of a text file") from None
    if len(data) > limit:
        raise TextFileError(1, f"is too large, expected at most {limit // 1024} KiB")
    return data


def _require_small(info: os.stat_result, limit: int) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise TextFileError(1, "is a folder, expected a text file")
    if not stat.S_ISREG(info.st_mode):
        raise TextFileError(1, "is a pipe, socket or device, expected a text file")
    if info.st_size > limit:
        size = f"{info.st_size / 2**20:.1f} MiB"
        raise TextFileError(1, f"is too large ({size}), expected at most {limit // 1024} KiB")


def _decode(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TextFileError(1, "is UTF-16 or UTF-32 text, expected UTF-8")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise TextFileError(line, "is a binary file (it holds NUL bytes), expected UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` and not `data`: the decoder counts from behind the byte order mark.
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{error.object[error.start]:02x}"
        raise TextFileError(line, f"is not UTF-8 text ({found}), expected UTF-8") from None
