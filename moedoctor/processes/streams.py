"""The standard streams: whatever is wrong with them, the command runs to its end and its code says so.

`run_with_streams` runs the command line with streams that never raise. `report_loss` says what could not be
written; the exit code is then 3.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from moedoctor.processes import interrupts
from moedoctor.text import print_message

_PLAIN = str.maketrans(
    {**dict.fromkeys("─━—", "-"), "…": "...", "·": "*", "±": "+-", "≤": "<=", "≥": ">=", "µ": "u"}
)
"""Some characters of our own texts, for a terminal that has only ASCII."""
_lost = False
"""True if something that was asked for could not be written."""


class Unfailing(io.RawIOBase):
    """Passes bytes to `raw`; keeps its first error instead of raising it, and drops what comes after it."""

    def __init__(self, raw: Any) -> None:
        """`raw` is None for a stream that was closed before we started."""
        self._raw = raw
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._raw is None:
            raise io.UnsupportedOperation("the stream is closed")
        return int(self._raw.fileno())

    def isatty(self) -> bool:
        return self._raw is not None and bool(self._raw.isatty())

    def write(self, data: Any, /) -> int:
        try:
            if self.error is None and len(data):
                if self._raw is None:
                    raise OSError("it is closed")
                while (written := self._raw.write(data)) is None:  # it does not block and is full
                    select.select([], [self._raw], [])
                return int(written)
        except OSError as error:
            self.error = error
        except ValueError:  # another part of the program closed it
            self.error = OSError("it is closed")
        return len(data)


def run_with_streams(command: Callable[[], int]) -> int:
    """Return what `command` returns, or 3 if something that it wrote is lost.

    A reader that went away, as with ``| head``, has read what it wanted: the code stays. A signal keeps its
    own code. Nothing that is written to stderr can change the code.
    """
    global _lost
    _lost = False
    _occupy_closed()
    before = sys.stdout, sys.stderr
    stdout, sys.stdout = _make_unfailing(sys.stdout)
    _, sys.stderr = _make_unfailing(sys.stderr)
    try:
        code = command()
        _flush(sys.stdout)
        if stdout is not None and stdout.error is not None and not is_reader_gone(stdout.error):
            report_loss(f"stdout cannot be written ({explain_error(stdout.error)}); send it to another place")
        return interrupts.exit_code(otherwise=3) if _lost else code
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        sys.stdout, sys.stderr = before


def report_loss(problem: str) -> None:
    """Say in one line on stderr what could not be written, and end with 3 when the command is done."""
    global _lost
    _lost = True
    print_message(problem)


def leave(code: int) -> NoReturn:
    """End the process at once, after what was written, where a library's threads crash its usual end."""
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    os._exit(interrupts.exit_code(otherwise=3) if _lost else code)


def is_reader_gone(error: OSError) -> bool:
    """Return whether a stream cannot be written because nobody reads it any more."""
    return isinstance(error, ConnectionError)


def explain_error(error: Exception) -> str:
    """Return the system's words for `error`."""
    return getattr(error, "strerror", None) or str(error)


def _make_unfailing(stream: Any) -> tuple[Unfailing | None, Any]:
    """Return a stream that writes to the same place and never raises; one in memory is left as it is."""
    buffer = getattr(stream, "buffer", None)
    if stream is not None and buffer is None:
        return None, stream
    if stream is not None:
        _flush(stream)
    raw = Unfailing(getattr(buffer, "raw", buffer))
    return raw, io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="moedoctor",
        # PYTHONUNBUFFERED, as containers set it, writes through to a raw stream; here a buffer is between.
        line_buffering=getattr(stream, "line_buffering", False) or getattr(stream, "write_through", False),
    )


def _flush(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def _occupy_closed() -> None:
    """Open the standard descriptors that are closed: else the next file opened would become our stdout."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest that is free


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks: with plain ones, and in JSON with its own escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    if not error.object.startswith("{"):
        text = text.translate(_PLAIN)
    units = text.encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes), error.end


codecs.register_error("moedoctor", _replace_unencodable)
