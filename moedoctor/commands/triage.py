"""`moedoctor triage FILE|- ...`."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from moedoctor.commands.options import Full, InputError, Output, TextFormat
from moedoctor.commands.pages import deliver_document
from moedoctor.text import TextFileError, open_file

if TYPE_CHECKING:
    from moedoctor.diagnose.triage.triage import Triage

MOST_BYTES = 200 * 2**20
"""Of one input; of a compressed one, before and after unpacking."""
_PEEK = 4096
"""The first bytes of an input, by which it is judged."""
_GZIP = b"\x1f\x8b"
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"(\xb5/\xfd": "compressed with zstd",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x04\x22\x4d\x18": "compressed with lz4",
}
_TEXT_BYTES = bytes({*range(0x20, 0x7F), *range(0x80, 0x100), 7, 8, 9, 10, 12, 13, 27})
_MOST_CONTROL = 0.1
"""Share of the first bytes that may be control characters in a text."""


def triage(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE|-", help="Logs, tracebacks or reports, also .gz; - reads stdin."),
    ],
    format: TextFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Find what ended a server, and known failures, in a log or a bug report.

    The first error of all processes, where it was raised, its class and what explains it; then the known
    failures: how sure that is and why, whether your release has it, and what to do. A text that does not
    decide gives a list of possible failures and what to paste next. Exit code 1 if a failure is certain or
    likely.
    """
    from moedoctor.reporters.pages.triage import TriageDocument, describe_findings

    results: list[tuple[str, Triage]] = []
    refused: list[InputError] = []
    for file in dict.fromkeys(files):
        try:
            results.append(("stdin" if file == "-" else file, _triage(file, output)))
        except InputError as error:
            refused.append(error)
    if not results:
        raise InputError("; ".join(map(str, refused)))
    document = TriageDocument.from_results(results)
    reasons = describe_findings(document)
    code = 1 if reasons else 2 if refused else 0
    reasons += map(str, refused)
    return deliver_document(document, format, output, full=full, code=code, reasons=reasons)


def _triage(file: str, output: Path | None) -> Triage:
    if file == "-":
        if sys.stdin is None:
            raise InputError("stdin is closed, expected a log or report")
        return _read(sys.stdin.buffer, "stdin")
    exist = output is not None and os.path.exists(output) and os.path.exists(file)
    if output is not None and exist and os.path.samefile(file, output):
        raise InputError(f"{file}: is also the output, expected another file with -o")
    try:
        stream = open_file(Path(file), expected="a log or report, or - for stdin")
    except TextFileError as error:
        raise InputError(f"{file}: {error.message}") from None
    with stream:
        if os.fstat(stream.fileno()).st_size > MOST_BYTES:
            raise _refuse_size(file)
        return _read(stream, file)


class _Bounded(io.RawIOBase):
    """A stream that refuses to give more than `MOST_BYTES`."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, name: str) -> None:
        self._stream = stream
        self._name = name
        self._left = MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        block = self._stream.read(len(buffer))
        self._left -= len(block)
        if self._left < 0:
            raise _refuse_size(self._name)
        buffer[: len(block)] = block
        return len(block)


def _read(stream: BinaryIO, name: str) -> Triage:
    from moedoctor.diagnose.triage.triage import triage
    from moedoctor.redaction import Redactor

    try:
        bounded = io.BufferedReader(_Bounded(stream, name), _PEEK)
        if bounded.peek().startswith(_GZIP):
            unpacked = gzip.GzipFile(fileobj=bounded)
            bounded = io.BufferedReader(_Bounded(unpacked, name), _PEEK)
        _check_text(bounded.peek(), name)
        return triage(bounded, Redactor.from_this_process())
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(
            f"{name}: is damaged or ends early, expected a whole .gz file; read what is left with `zcat`"
        ) from None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{name}: cannot be read ({reason}), expected a text file") from None


def _check_text(start: bytes, name: str) -> None:
    """Raise InputError if the first bytes of an input are not those of a text."""
    if not start.strip():
        raise InputError(
            f"{name}: is empty, expected a log or report; `vllm serve … 2>&1 | tee FILE` keeps one"
        )
    packed = next((what for mark, what in _PACKED.items() if start.startswith(mark)), None)
    if packed:
        raise InputError(f"{name}: is {packed}, expected a text or a .gz file; unpack it first")
    from moedoctor.diagnose.triage.log_text import find_encoding

    # UTF-16 and UTF-32 are texts with many zeros.
    control = len(start.translate(None, _TEXT_BYTES)) / len(start)
    if find_encoding(start) is None and control > _MOST_CONTROL:
        raise InputError(
            f"{name}: is binary, expected a log or report; give the text that the server printed"
        )


def _refuse_size(name: str) -> InputError:
    return InputError(
        f"{name}: is too large, expected at most {MOST_BYTES // 2**20} MB; cut it with `tail -c 100M`"
    )
