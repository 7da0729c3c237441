"""`moedoctor triage FILE|-`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from moedoctor.commands.options import InputError, Output, PageFormat, deliver
from moedoctor.text import TextFileError, open_file

if TYPE_CHECKING:
    from moedoctor.diagnose.triage.triage import Triage

MOST_BYTES = 200 * 2**20


def triage(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A log, traceback or report; - reads stdin.")],
    format: PageFormat = "table",
    output: Output = None,
) -> int:
    """Find known failures in a log or a bug report.

    Names the failure, the line that shows it, and the next step. If the text does not show a failure, it
    says so and does not guess. Exit code 1 if something was found.
    """
    if file == "-":
        if sys.stdin is None:
            raise InputError("stdin is closed, expected a log or report")
        result = _read(sys.stdin.buffer, "stdin")
    else:
        if output is not None and output.exists() and os.path.exists(file) and os.path.samefile(file, output):
            raise InputError(f"{file}: is also the output, expected another file with -o")
        with _opened(file) as stream:
            result = _read(stream, file)
    from moedoctor.reporters.triage import count_line, triage_page

    document = {"findings": [vars(finding) for finding in result.findings]}
    deliver(triage_page(result), document, format=format, output=output, summary=count_line(result))
    return 1 if result.findings else 0


class _Bounded(io.RawIOBase):
    """A stream that refuses to give more than `MOST_BYTES`."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._left = MOST_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        block = self._stream.read(size)
        self._left -= len(block)
        if self._left < 0:
            raise InputError(_too_large(self._name))
        return block


def _read(stream: BinaryIO, name: str) -> Triage:
    from moedoctor.diagnose.triage.triage import triage
    from moedoctor.redaction import Redactor

    try:
        return triage(_Bounded(stream, name), Redactor.of_this_process())  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({_reason(error)}), expected a text file") from None


def _opened(path: str) -> BinaryIO:
    try:
        stream = open_file(Path(path), expected="a log or report, or - for stdin")
    except TextFileError as error:
        raise InputError(f"{path}: {error.message}") from None
    if os.fstat(stream.fileno()).st_size > MOST_BYTES:
        stream.close()
        raise InputError(_too_large(path))
    return stream


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _too_large(name: str) -> str:
    return f"{name}: is too large, expected at most {MOST_BYTES // 2**20} MB; cut it with `tail -c 100M`"
